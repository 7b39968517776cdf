"""If an engine starts without preflight, vLLM itself refuses features that our backend does not support."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_smallmodels.models import tiny_llama
from support.engines_in_turn import refused

pytestmark = pytest.mark.timeout(1800)

BASE = {"vocab_size": 512, "torch_dtype": "bfloat16", "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_size": 256, "intermediate_size": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mla": {
        **BASE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": None,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64,
        "n_routed_experts": 4, "n_shared_experts": 1,
    },
    "alibi": {**BASE, "architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 1, "n_head": 4},
    "windows": {
        **BASE, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
SPECULATION = {
    "speculative_config": {"model": str(tiny_llama()), "num_speculative_tokens": 2, "kv_cache_dtype": "auto"}
}
TRANSFER = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": {"shared_storage_path": "unused"}}}  # fmt: skip
# Each case is a request, with words that its refusal must contain besides the dtype's name.
CASES: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "mla": ("mla", {}, "MLA not supported"),
    "alibi": ("alibi", {}, "a model with ALiBi is not supported"),
    "windows": ("windows", {}, "keep these in 16 bits: --kv-cache-dtype-skip-layers sliding_window"),
    "speculation": (None, SPECULATION, "a KV-cache dtype of the draft's own (kv_cache_dtype)"),
    "transfer": (None, TRANSFER, "the connector 'ExampleConnector' is not supported"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unsupported_engine_ends_with_the_cause_and_the_remedy(case: str, tmp_path: Path) -> None:
    config, options, words = CASES[case]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[config]))
    log = refused(tiny_llama() if config is None else tmp_path, **options)
    raised = [line for line in log.splitlines() if "UnsupportedModelError: " in line or "with error '" in line]
    assert any(words in line and "k4v4" in line for line in raised), log[-3000:]
