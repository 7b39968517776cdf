"""A server like `support.vllm_forks` without vLLM, whose import takes ten seconds of a core, for tests of its end."""

from support import vllm_forks

if __name__ == "__main__":
    vllm_forks.IMPORTED = ()
    vllm_forks.main()
