"""The recent window of an engine: its size, its report, and the map of residual pages that its layers share."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import attention
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpilot_formats import formats
from kvpilot_runtime.backends import cpu, packed
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.recent import residual_maps, window
from kvpilot_runtime.vllm_api import compat

NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the configuration of an engine in k4v4 with a context of 2,048 tokens."""
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    monkeypatch.delenv(window.VARIABLE, raising=False)
    found = SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype="k4v4",
            block_size=64,
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        ),
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: found)
    return found


def loaded(config: Any, dim: int = 128, kv_heads: int = 8, names: Sequence[str] = NAMES) -> list[Any]:
    """Return two layers in the state in which vLLM has just loaded their weights."""
    dtype, context = config.cache_config.cache_dtype, config.compilation_config.static_forward_context
    cls = getattr(cpu, compat.backend_class(dtype))
    made = []
    for name in names:
        impl = cls.get_impl_cls()(32, dim, 1.0, kv_heads, None, None, dtype)
        layer = attention.Attention.__new__(attention.Attention)
        torch.nn.Module.__init__(layer)
        spec = FullAttentionSpec(block_size=64, num_kv_heads=kv_heads, head_size=dim, dtype=torch.uint8)
        vars(layer).update(impl=impl, kv_cache_dtype=dtype, layer_name=name, attn_backend=cls, spec=spec)
        made.append(layer)
    for layer in made:
        context[layer.layer_name] = layer
        layer.impl.process_weights_after_loading(torch.bfloat16)
    return made


@pytest.mark.parametrize("text", ["", formats.ALL, *map(str, formats.RECENT_CHOICES)])
@pytest.mark.parametrize("dtype", formats.own_names())
def test_the_environment_sets_the_number_of_tokens_of_the_window(
    config: Any, dtype: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(window.VARIABLE, text)
    config.cache_config.cache_dtype = dtype
    fmt = formats.parse(dtype)
    wanted = 0 if not fmt.has_residuals else int(text) if text.isdecimal() else fmt.window
    assert [layer.impl.recent for layer in loaded(config)] == [wanted] * 2


@pytest.mark.parametrize("text", ["63", "-64", "many", "1e2"])
def test_a_window_that_cannot_be_served_is_refused(config: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(window.VARIABLE, text)
    with pytest.raises(UnsupportedModelError, match=rf"{window.VARIABLE} is '{text}'; use 0, 64, 128, 256, 512 or all"):
        loaded(config)


def test_a_window_longer_than_the_context_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(window.VARIABLE, "512")
    config.model_config.max_model_len = 400
    with pytest.raises(UnsupportedModelError, match=r"is 512, but the context has 400 tokens .*use a smaller one"):
        loaded(config)


@pytest.mark.parametrize(("context", "tokens"), [(2048, 512), (512, 512), (511, 256), (256, 256), (127, 64), (63, 0)])
def test_a_default_window_longer_than_the_context_is_cut_and_log_and_metric_say_so(
    config: Any, context: int, tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(window, "RECENT_WINDOW", SimpleNamespace(report=told.append))
    monkeypatch.setattr(window.log, "propagate", True)
    config.cache_config.cache_dtype = "k2v2"
    config.model_config.max_model_len = context
    assert [layer.impl.recent for layer in loaded(config)] == [tokens] * 2
    with caplog.at_level(logging.INFO, window.log.name):
        window.report(config)
    assert told == [{"dtype": "k2v2", "tokens": str(tokens), "reason": "" if tokens == 512 else "ShortContext"}]
    assert f"k2v2, {tokens} tokens" in caplog.text
    assert ("the context is shorter than the default of 512" in caplog.text) == (tokens < 512)


def test_layers_with_as_many_residual_pages_share_a_map_that_keeps_its_address(config: Any) -> None:
    first, second = loaded(config)
    cache = torch.zeros(9, 8, 64, formats.parse("k4v4").row_bytes(128), dtype=torch.uint8)
    found = first.impl.residuals(cache)
    assert found.pages.shape == (9, 1)
    assert found.newest.tolist() == [2]
    residual_maps.refine(config, {3: (7,), 8: (1,)})
    residual_maps.refine(config, {3: (), 4: (3,)})
    assert found.pages.flatten().tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 1]
    again = second.impl.residuals(cache)
    assert again.pages.data_ptr() == found.pages.data_ptr()
    # vLLM measures CUDA graphs with a small cache first.
    assert first.impl.residuals(cache[:2]).pages.tolist() == [[0], [0]]


def test_layers_with_fewer_residual_pages_than_others_use_the_first_ones(config: Any) -> None:
    config.cache_config.cache_dtype = "k2v2"
    first, second = loaded(config)
    row = formats.parse("k2v2").row_bytes(128)
    caches = [torch.zeros(9, 8, size, row, dtype=torch.uint8) for size in (16, 64)]
    four, three = (layer.impl.residuals(cache) for layer, cache in zip((first, second), caches, strict=True))
    residual_maps.refine(config, {2: (5, 6, 7, 8)})
    assert four.pages[2].tolist() == [5, 6, 7, 8]
    assert three.pages[2].tolist() == [5, 6, 7]
    assert (four.newest.item(), three.newest.item()) == (512 // 16 + 1, 512 // 64 + 1)


def test_an_engine_without_a_window_has_no_map(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(window.VARIABLE, "0")
    layer, _ = loaded(config)
    assert layer.impl.residuals(torch.zeros(9, 8, 64, 144, dtype=torch.uint8)) is None


@pytest.mark.parametrize(("dim", "kv_heads"), [(128, 8), (128, 4), (64, 8)])
def test_a_draft_models_layers_are_in_one_group_with_those_of_the_served_model(
    config: Any, dim: int, kv_heads: int
) -> None:
    config.speculative_config = SimpleNamespace(
        method="draft_model", num_speculative_tokens=3, use_eagle=lambda: False, use_eagle_block_drop=lambda: False
    )
    served = loaded(config)
    config.model_config.max_model_len = 32  # A draft model may have a shorter context.
    drafting = loaded(config, dim, kv_heads, [f"draft_model.{name}" for name in NAMES])
    assert [layer.impl.drafting for layer in (*served, *drafting)] == [False, False, True, True]
    assert [layer.impl.recent for layer in (*served, *drafting)] == [64] * 4
    pages = {layer.layer_name: layer.attn_backend.customize_spec(layer.spec) for layer in (*served, *drafting)}
    # vLLM's proposer stores the draft model's tokens by the block table of the first group.
    [group] = get_kv_cache_groups(config, pages)
    assert set(group.layer_names) == set(pages)


def test_a_draft_beside_a_layer_in_16_bits_is_refused(config: Any) -> None:
    config.speculative_config = SimpleNamespace(method="eagle3", num_speculative_tokens=3)
    loaded(config)
    other = attention.Attention.__new__(attention.Attention)
    torch.nn.Module.__init__(other)
    config.compilation_config.static_forward_context["model.layers.2.self_attn.attn"] = other
    with pytest.raises(UnsupportedModelError, match="a draft model beside layers"):
        loaded(config, names=["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"])


def test_a_window_is_refused_if_vllm_splits_the_schedulers_blocks(config: Any) -> None:
    layers = loaded(config)
    for layer in layers:
        layer.kv_cache = torch.zeros(10, 8, 64, formats.parse("k4v4").row_bytes(128), dtype=torch.uint8)
    packed.make_maps(layers, 10)
    with pytest.raises(UnsupportedModelError, match="into 64 tokens is not supported; set --block-size=64, or --rec"):
        packed.make_maps(layers, 5)
