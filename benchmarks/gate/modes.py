"""Failure modes of the gate's detection matrix: how each damages a real engine, and the bug report that it imitates."""

from typing import NamedTuple

SHARED = "damaged"
"""Name of the 16-bit engine in which most failure modes run, one after another."""


DEFAULT, PRESSURE, CONNECTOR = "default", "pressure", "connector"
_PATHS = (DEFAULT, "paths")


class Mode(NamedTuple):
    """One failure mode.

    - `source`: the public report, as repository#number.
    - `reported`: what the report says, in a few words.
    - `damage`: what the mode does to the engine, for the page.
    - `stages`: stages of the gate to run, until one of them finds the damage. DEFAULT sends the default packs.
      PRESSURE fills a context, then the KV cache. CONNECTOR loads prompts through the KV connector. `paths` is the
      opt-in pack. Modes that the default packs cannot trigger, such as a full cache, leave DEFAULT out.
    - `engine`: the engine to damage: SHARED, or a name that `_own_engine` in `run.py` knows.
    """

    name: str
    source: str
    reported: str
    damage: str
    stages: tuple[str, ...] = (DEFAULT,)
    engine: str = SHARED


MODES = (
    Mode("long-context", "eeshansrivastava89/minimal-ai#18", "quality drops after 40K tokens",
         "in contexts of more than 1,344 tokens, pages beyond 1,280 tokens are read from earlier in the text"),
    Mode("hit", "LMCache/LMCache#4463", "reused KV differs from computed KV",
         "after a prefix hit, the last page of the hit is another request's"),
    Mode("long-hit", "LMCache/LMCache#4385", "long conversations that return get another request's KV",
         "after a hit of at least 512 tokens, one page is another request's"),
    Mode("loaded", "LMCache/LMCache#4463", "reused KV differs from computed KV",
         "after a load from host memory, the last loaded page is another request's", (DEFAULT, CONNECTOR), "offload"),
    Mode("first-tokens-after-hit", "vllm-project/vllm-ascend#10440", "a partial private block is reused by a hit",
         "after a hit, the first three tokens read another request's page", _PATHS),
    Mode("full-pool", "vllm-project/vllm#50702", "corrupt JSON with a full pool only",
         "with 90% of the pool in use, one page of each sequence is another request's", (PRESSURE,)),
    Mode("preempted", "LMCache/LMCache#1969", "wrong KV when a preempted request resumes",
         "after a preemption, one page is stale", (PRESSURE,)),
    Mode("crowd", "vllm-project/vllm-ascend#14118", "content of other requests under high concurrency",
         "with five or more sequences in a step, one page is the neighbour's"),
    Mode("large-batch", "pytorch/torchtitan#3668", "random tokens with large batches",
         "with 16 or more sequences in a step, one page is another request's"),
    Mode("mixed-step", "vllm-project/vllm#40766", "decode reads wrong state beside a prefill",
         "sequences that decode in one step with a prompt read another request's page"),
    Mode("shared-prefix", "vllm-project/vllm#22103", "wrong answers to prompts with a common prefix",
         "sequences of one step with four common pages read another request's pages in place of three of them"),
    Mode("shared-page", "openvinotoolkit/openvino.genai#3722", "a hash collision gives a wrong block",
         "sequences of one step with four common pages read another request's page in place of one of them"),
    Mode("page-start", "GeeeekExplorer/nano-vllm#71", "off by one when a new block begins",
         "the step that fills the first place of a page reads another request's page", _PATHS),
    Mode("residue", "vllm-project/vllm#50749", "first tokens wrong, by prompt length modulo 16",
         "after prompts of 16 n + 5 tokens, the first four tokens read another request's page", _PATHS),
    Mode("chunk", "pytorch/executorch#20346", "the tail of the previous chunk is lost at a chunk boundary",
         "in the second chunk of a prompt, the last two pages of the first chunk are lost", ("paths",)),
    Mode("long-generation", "osaurus-ai/osaurus#998", "endless loops after long thinking",
         "after 128 generated tokens, the pages of the generation are lost"),
    Mode("loops", "osaurus-ai/osaurus#998", "endless loops after long thinking",
         "after 64 generated tokens, the last eight tokens repeat"),
    Mode("one-head", "ovg-project/kvcached#424", "scales of single heads at wrong places",
         "one of 90 KV heads stores values with eight times their scale"),
    Mode("overflow", "sgl-project/sglang#20705", "scales of the checkpoint are ignored",
         "elements of keys beyond 18 overflow and change their sign, in one key of 200"),
    Mode("sinks", "awslabs/keys_values#140", "garbage once old tokens are evicted",
         "in sequences of more than 512 tokens, the first page is lost"),
    Mode("nan-logprobs", "vllm-project/vllm#48585", "NaN logprobs with a quantized path",
         "NaN logits in sequences of more than 600 tokens"),
    Mode("cut-streams", "vllm-project/vllm#27572", "streams without a finish_reason",
         "each stream ends after 12 chunks, without a finish_reason"),
    Mode("drafts", "vllm-project/vllm#40831", "degenerate with drafts only",
         "in steps with drafts, one page is another request's", engine="drafts"),
    Mode("tokenizer", "huggingface/transformers#45812", "another release gives other token ids",
         "the canary's tokenizer puts a space before each text", engine="tokenizer"),
    Mode("pictures", "waybarrios/vllm-mlx#718", "another image's KV is reused",
         "pages with only an image's tokens are another request's", ("images",), "pictures"),
    Mode("float16", "vllm-project/vllm#54338", "fluent nonsense with a float16 cache on a bf16 model",
         "a service with `kvCache.baseline: float16` and no `--dtype`", ("spec",), "spec"),
    Mode("full-context", "vllm-project/vllm#46985", "out of memory at long contexts",
         "attention runs out of memory beyond 2,290 tokens", (PRESSURE,), "full-context"),
    Mode("reference", "vllm-project/vllm#54338", "the reference itself is damaged",
         "the 16-bit engine repeats its last eight tokens after 64 tokens; the canary is healthy",
         engine="reference"),
)  # fmt: skip

DRAFTS, HOST, IMAGES = "drafts", "host memory", "images"
HEALTHY = (
    "auto", f"auto with {DRAFTS}", "k8v4", "k4v4", "fp8", f"auto with {HOST}", f"k4v4 with {HOST}",
    f"k4v4 with {IMAGES}",
)  # fmt: skip
"""Canaries without damage, which the gate must promote. Each name has the dtype and, after "with", what else runs."""
