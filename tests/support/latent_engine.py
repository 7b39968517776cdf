"""A real vLLM in its own process, and a small model with multi-head latent attention (MLA) for it.

`python -m support.latent_engine` reads the fields of `Asked` as a JSON object from stdin. It writes the result of
`serve` as the last line of stdout.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpilot_runtime.backends.packed import PREFILL_FROM_PAGES
from support.own_process import ask

VOCABULARY = 256
COUNTED = ("vllm:num_preemptions", "vllm:prefix_cache_hits")


@dataclass
class Asked:
    """Request for an engine.

    Attributes:
        engine: arguments of `vllm.LLM`.
        requests: prompts and answer lengths.
        interpreted: see `serve`.
    """

    engine: dict[str, Any]
    requests: list[tuple[list[int], int]]
    interpreted: bool


def make_model(folder: Path) -> Path:
    """Create a DeepSeek V2 of 2 dense layers with seeded random weights, and with the real model's cache dimensions."""
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
    model: Path, dtype: str, requests: list[tuple[list[int], int]], from_pages: bool, interpreted: bool = False,
    **engine: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ask an engine for greedy answers to all requests at once.

    Args:
        requests: prompt and number of answer tokens of each request.
        from_pages: True lets prefills read quantized pages.
        interpreted: True uses the CUDA backend in Triton's interpreter.
        engine: additional arguments of `vllm.LLM`.

    Returns:
        `answers`: the tokens of each answer. `first`: the log-probability of each answer's first token. `tokens`: the
        capacity of the cache. Also the counters of `COUNTED`.

    Raises:
        RuntimeError: the engine did not start, or failed. The message has the end of its output.
    """
    whole = {
        "model": str(model), "dtype": "float32", "kv_cache_dtype": dtype, "skip_tokenizer_init": True, "seed": 0,
        "enforce_eager": True, "disable_log_stats": False,
        # vLLM's own MLA on a CPU accepts only this block size. Processors with AMX are an exception: their default is
        # 128.
        "block_size": 16, **engine,
    }  # fmt: skip
    environment = {PREFILL_FROM_PAGES: str(int(from_pages))}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    told: dict[str, Any] = ask("support.latent_engine", Asked(whole, requests, interpreted), **environment)
    return told


def main() -> None:
    """Run the engine that stdin describes, and print its answers."""
    from vllm import LLM, SamplingParams

    job = Asked(**json.load(sys.stdin))
    if job.interpreted:
        from support import latent_interpreted

        latent_interpreted.install()
    llm = LLM(**job.engine)
    ways = [
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
        for _, count in job.requests
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in job.requests], ways, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    first = [output.outputs[0].logprobs[0][answer[0]].logprob for output, answer in zip(outputs, answers, strict=True)]
    config = llm.llm_engine.vllm_config.cache_config
    counted = {m.name: m.value for m in llm.get_metrics() if m.name in COUNTED}
    tokens = config.num_gpu_blocks * config.block_size
    print(json.dumps({"answers": answers, "first": first, "tokens": tokens, **counted}))


if __name__ == "__main__":
    main()
