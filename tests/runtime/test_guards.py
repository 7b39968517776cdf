"""Our backends return errors to vLLM in engines that start without preflight."""

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

from kvpilot_formats.arguments import rules
from kvpilot_runtime import plugin
from kvpilot_runtime.backends import packed
from kvpilot_runtime.errors import UnsupportedModelError

RIGHT = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="k4v4", block_size=None)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "latent attention": ({"use_mla": True}, "MLA not supported"),
    "a window": ({"has_sliding_window": True}, "--kv-cache-dtype-skip-layers sliding_window"),
    "an encoder": ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
    "cross attention": ({"attn_type": AttentionType.ENCODER_DECODER}, "attention type"),
    "not causal": ({"use_non_causal": True}, "non-causal attention not supported"),
    "batch invariance": ({"use_batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
    "a head_dim": ({"head_size": 32}, "head_size not supported"),
    "64-bit weights": ({"dtype": torch.float64}, "dtype not supported"),
    "blocks": ({"block_size": 24}, "block_size not supported"),
}


def chosen(**asked: Any) -> Any:
    """Return the backend class that vLLM selects on a CPU for a layer with these properties."""
    plugin.serve_dtype("k4v4")
    return resolve_obj_by_qualname(CpuPlatform.get_attn_backend_cls(None, RIGHT._replace(**asked), 4))


def test_layers_with_our_dtypes_get_our_backend_and_others_keep_vllms() -> None:
    assert chosen() is resolve_obj_by_qualname("kvpilot_runtime.backends.cpu.K4V4Backend")
    assert chosen(block_size=16).fmt.name == "k4v4"
    assert chosen(has_sink=True).fmt.name == chosen(use_mm_prefix=True).fmt.name == "k4v4"
    assert chosen(head_size=80).fmt.name == chosen(head_size=192).fmt.name == "k4v4"
    assert chosen(kv_cache_dtype="auto", has_sliding_window=True).get_name() == "CPU_ATTN"


@pytest.mark.parametrize("what", WRONG)
def test_the_cpu_platform_says_why_our_backend_refuses_a_model(what: str) -> None:
    asked, word = WRONG[what]
    with pytest.raises(UnsupportedModelError, match=r"kv-cache dtype 'k4v4' cannot serve this model: .*auto") as caught:
        chosen(**asked)
    assert word in str(caught.value)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER])
def test_our_backend_refuses_an_unsupported_kind_of_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    with pytest.raises(UnsupportedModelError, match=r"k4v4.*--kv-cache-dtype auto"):
        chosen().get_impl_cls()(4, 64, 0.125, 2, None, None, "k4v4", attn_type=kind)


def batch(causal: Any) -> SimpleNamespace:
    """Return a step of one sequence of three tokens."""
    return SimpleNamespace(
        num_reqs=1, causal=causal, query_start_loc=torch.tensor([0, 3]), seq_lens=torch.tensor([3], dtype=torch.int32),
        slot_mapping=torch.arange(3), block_table_tensor=torch.tensor([[0]], dtype=torch.int32), mm_req_doc_ranges=None,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, torch.tensor([False]), torch.tensor([True])], ids=["no", "none", "each"])
def test_a_step_that_is_not_causal_is_refused(causal: Any) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8)
    about = SimpleNamespace(cache_dtype="k4v4")
    config = SimpleNamespace(
        cache_config=about, speculative_config=None, kv_transfer_config=None, parallel_config=ParallelConfig()
    )
    builder = chosen().get_builder_cls()(spec, ["x"], config, torch.device("cpu"))
    assert builder.build(0, batch(True)).prefills
    with pytest.raises(UnsupportedModelError, match=r"causal=False.*'k4v4'.*--kv-cache-dtype auto"):
        builder.build(0, batch(causal))


def test_layers_with_chunked_attention_have_the_same_pages_as_full_attention() -> None:
    same = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
    chunked, full = (
        chosen().customize_spec(spec)
        for spec in (ChunkedLocalAttentionSpec(**same, attention_chunk_size=64), FullAttentionSpec(**same))
    )
    assert chunked.page_size_bytes == full.page_size_bytes
    assert chunked.attention_chunk_size == 64


def engine(layers: dict[str, Any] | None = None, **transfer: Any) -> SimpleNamespace:
    """Return a vLLM configuration with this KV connector, reduced to the fields that our backend reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="k4v4"),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        parallel_config=ParallelConfig(),
    )


@pytest.mark.parametrize(
    ("transfer", "what"),
    [
        ({"kv_connector": "NixlPushConnector"}, "the connector 'NixlPushConnector'"),
        ({"kv_connector": "NixlConnector"}, 'NixlConnector without "kv_load_failure_policy": "recompute"'),
        ({"kv_connector": "LMCacheConnectorV1"}, "the connector 'LMCacheConnectorV1'"),
        ({"kv_connector": "LMCacheMPConnector"},
         'LMCacheMPConnector without "lmcache.mp.mp_transfer_mode": "engine_driven" in kv_connector_extra_config'),
        ({"kv_connector": "SimpleCPUOffloadConnector"}, "the connector 'SimpleCPUOffloadConnector'"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"}},
         "the tier 'TieringOffloadingSpec'"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"canonical_layout": True}},
         "canonical_layout"),
    ],
)  # fmt: skip
def test_an_unsupported_kv_connector_or_option_of_one_is_refused_and_named(transfer: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{what} is not supported with kv-cache dtype 'k4v4'"):
        packed.refuse_unsupported_options(engine(**transfer))


def test_offloading_is_accepted_except_with_window_or_chunked_layers() -> None:
    tier = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30}}
    packed.refuse_unsupported_options(engine({"full": SimpleNamespace(sliding_window=None)}, **tier))
    with pytest.raises(UnsupportedModelError, match="sliding-window layers and kv-cache dtype 'k4v4'"):
        packed.refuse_unsupported_options(engine({"window": SimpleNamespace(sliding_window=64)}, **tier))
    with pytest.raises(UnsupportedModelError, match="chunked attention and kv-cache dtype 'k4v4'"):
        packed.refuse_unsupported_options(engine({"chunks": SimpleNamespace(attention_chunk_size=64)}, **tier))


SWITCHES = {
    one
    for group in (rules.BESIDE_ANY, rules.BESIDE_LATENT, rules.BESIDE_DRAFT_MODELS, rules.BESIDE_CONNECTORS)
    for one in group
    if one.setting
}


def test_every_setting_of_a_rule_is_in_vllms_configuration_and_off_by_default() -> None:
    config = VllmConfig()
    for switch in SWITCHES:
        attrgetter(switch.setting)(config)
    assert rules.first_set(config, SWITCHES) is None


@pytest.mark.parametrize("switch", rules.BESIDE_ANY, ids=lambda switch: switch.options[0])
def test_an_option_that_preflight_refuses_beside_our_dtypes_is_refused_by_the_backend_too(switch: rules.Switch) -> None:
    config = engine()
    part, name = switch.setting.split(".")
    setattr(config, part, SimpleNamespace(**{**vars(getattr(config, part, SimpleNamespace())), name: 2}))
    with pytest.raises(UnsupportedModelError, match=f"^{switch.options[0]} .* is not supported with .* 'k4v4'"):
        packed.refuse_unsupported_options(config)
