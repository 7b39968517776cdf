"""A real vLLM in a process of its own that serves multi-head latent attention, and a model for it.

`python -m support.latent_engine JOB`: a JSON file with `engine`, arguments of `vllm.LLM`, and `requests`, each a prompt
and how many tokens are asked for. Prints, as JSON on the last line, what `serve` gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvpilot_runtime.backend import PREFILL_FROM_PAGES

HANGS = 1200
VOCABULARY = 256
COUNTED = ("vllm:num_preemptions", "vllm:prefix_cache_hits")


def make_model(folder: Path) -> Path:
    """A DeepSeek V2 of 2 dense layers with seeded random weights, of the cache's true sizes: it means nothing."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64,
        v_head_dim=32, first_k_dense_replace=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=64, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).float().save_pretrained(folder)
    return folder


def serve(
    model: Path, dtype: str, folder: Path, requests: list[tuple[list[int], int]], from_pages: bool,
    interpreted: bool = False, **engine: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ask an engine for greedy answers to all requests at once.

    Args:
        from_pages: prompts read themselves back. interpreted: the CUDA backend serves, in Triton's interpreter.

    Returns:
        `answers`, tokens of each; `first`, the log-probability of each one's first; `tokens` that fit the cache; and
        the counters of `COUNTED`.

    Raises:
        RuntimeError: the engine did not start or failed, with the end of what it said.
    """
    whole = {
        "model": str(model), "dtype": "float32", "kv_cache_dtype": dtype, "skip_tokenizer_init": True, "seed": 0,
        "enforce_eager": True, "disable_log_stats": False, **engine,
    }  # fmt: skip
    job = folder / f"{dtype}.json"
    job.write_text(json.dumps({"engine": whole, "requests": requests, "interpreted": interpreted}))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        PREFILL_FROM_PAGES: str(int(from_pages)), "TRITON_INTERPRET": str(int(interpreted)),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "support.latent_engine", str(job)], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=HANGS, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(ended.stderr[-4000:] + ended.stdout[-4000:])
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def main(file: str) -> None:
    """Be the engine."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(file).read_text())
    if job["interpreted"]:
        from support import latent_interpreted

        latent_interpreted.install()
    llm = LLM(**job["engine"])
    ways = [
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
        for _, count in job["requests"]
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in job["requests"]], ways, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    first = [output.outputs[0].logprobs[0][answer[0]].logprob for output, answer in zip(outputs, answers, strict=True)]
    config = llm.llm_engine.vllm_config.cache_config
    counted = {m.name: m.value for m in llm.get_metrics() if m.name in COUNTED}
    tokens = config.num_gpu_blocks * config.block_size
    print(json.dumps({"answers": answers, "first": first, "tokens": tokens, **counted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
