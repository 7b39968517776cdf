"""Rings, which keep a request's recent tokens at 8 bits: their size, and the layers that get none, with the reason."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import attention
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvpilot_formats import formats
from kvpilot_runtime.backends import cpu, packed
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.recent import ring_layers
from kvpilot_runtime.recent.ring_layers import RecentLayer
from kvpilot_runtime.speculation import refuse_other_groups
from kvpilot_runtime.vllm_api import compat

NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the configuration of an engine in k4v4 with a context of 2,048 tokens."""
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    monkeypatch.delenv(ring_layers.VARIABLE, raising=False)
    return SimpleNamespace(
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


def attached(
    config: Any, dim: int = 128, kv_heads: tuple[int, int] = (8, 8), shared: str | None = None,
    names: Sequence[str] = NAMES,
) -> list[Any]:  # fmt: skip
    """Return two layers in the state in which vLLM has just loaded their weights."""
    dtype, context = config.cache_config.cache_dtype, config.compilation_config.static_forward_context
    cls = getattr(cpu, compat.backend_class(dtype))
    for name, heads in zip(names, kv_heads, strict=True):
        impl = cls.get_impl_cls()(32, dim, 1.0, heads, None, None, dtype,
                                  kv_sharing_target_layer_name=shared if name == names[1] else None)  # fmt: skip
        impl._config = config
        layer = attention.Attention.__new__(attention.Attention)
        torch.nn.Module.__init__(layer)
        vars(layer).update(
            impl=impl, kv_cache_dtype=dtype, layer_name=name, attn_backend=cls,
            get_kv_cache_spec=lambda _config, heads=heads: FullAttentionSpec(
                block_size=64, num_kv_heads=heads, head_size=dim, dtype=torch.uint8
            ),
        )  # fmt: skip
        context[name] = layer
    for name in names:
        context[name].impl.process_weights_after_loading(torch.bfloat16)
    return [context[name] for name in names]


def rings(config: Any) -> list[RecentLayer]:
    return [x for x in config.compilation_config.static_forward_context.values() if isinstance(x, RecentLayer)]


@pytest.mark.parametrize(
    ("dtype", "tokens", "blocks"), [("k8v4", 64, 1), ("k4v4", 64, 1), ("k4v2", 128, 4), ("k2v2", 512, 23)]
)
def test_a_ring_has_pages_of_its_layers_size_and_as_many_as_the_window_needs(
    config: Any, dtype: str, tokens: int, blocks: int
) -> None:
    config.cache_config.cache_dtype = dtype
    layers = attached(config)
    assert [ring.layer_name for ring in rings(config)] == [f"{name}.recent" for name in NAMES]
    spec = rings(config)[0].get_kv_cache_spec(config)
    page = layers[0].get_attn_backend().customize_spec(layers[0].get_kv_cache_spec(config))
    assert (spec.ring_blocks, spec.kept) == (blocks, tokens)
    assert (spec.page_size_bytes, spec.block_size) == (page.page_size_bytes, page.block_size)
    assert not spec.prefix_cacheable
    assert spec.max_memory_usage_bytes(config) == blocks * page.page_size_bytes
    groups = get_kv_cache_groups(config, {NAMES[0]: page, "ring": spec})
    assert [group.layer_names for group in groups] == [[NAMES[0]], ["ring"]]


@pytest.mark.parametrize(("dtype", "blocks"), [("k4v4", 1), ("k4v2", 1), ("k2v2", 3)])
def test_a_ring_gets_the_larger_block_size_that_vllm_chooses_for_its_layer(
    config: Any, dtype: str, blocks: int
) -> None:
    config.cache_config.cache_dtype = dtype
    layers = attached(config)
    spec = rings(config)[0].get_kv_cache_spec(config)
    page = layers[0].get_attn_backend().customize_spec(layers[0].get_kv_cache_spec(config))
    size = 8 * page.page_size_bytes
    other = SlidingWindowSpec(
        block_size=64, num_kv_heads=2, head_size=128, dtype=torch.float32, sliding_window=64, page_size_padded=size
    )
    groups = get_kv_cache_groups(config, {"window": other, NAMES[0]: page, "ring": spec})
    own, ring = (next(g.kv_cache_spec for g in groups if g.layer_names == [name]) for name in (NAMES[0], "ring"))
    assert ring.block_size == own.block_size == 8 * 64
    layout = formats.parse(dtype).ring_layout(128, own.block_size)
    assert (ring.ring_tokens, ring.ring_blocks) == (layout.tokens, blocks)


@pytest.mark.parametrize(
    ("dtype", "drafts", "blocks"),
    [("k8v4", 8, 1), ("k4v4", 1, 2), ("k4v4", 64, 2), ("k4v4", 65, 3), ("k4v2", 24, 4), ("k2v2", 18, 24)],
)
def test_a_ring_has_room_for_the_drafts_of_a_step(config: Any, dtype: str, drafts: int, blocks: int) -> None:
    config.cache_config.cache_dtype = dtype
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=drafts)
    attached(config)
    spec = rings(config)[0].get_kv_cache_spec(config)
    assert (spec.ring_blocks, spec.kept) == (blocks, formats.parse(dtype).window + drafts)


@pytest.mark.parametrize(("dim", "kv_heads", "groups"), [(128, 8, 2), (128, 4, 3), (64, 8, 3)])
def test_a_draft_models_layers_are_in_one_group_without_rings_of_their_own(
    config: Any, dim: int, kv_heads: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SimpleNamespace(
        get_num_kv_heads=lambda _parallel: kv_heads, get_head_size=lambda: dim, get_total_num_hidden_layers=lambda: 2
    )
    config.speculative_config = SimpleNamespace(
        method="draft_model", num_speculative_tokens=3, draft_model_config=draft, use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: config)
    served = attached(config)
    names = [f"draft_model.{name}" for name in NAMES]
    drafting = attached(config, dim, (kv_heads, kv_heads), names=names)
    assert [layer.impl.drafting for layer in (*served, *drafting)] == [False, False, True, True]
    assert [layer.impl.recent for layer in (*served, *drafting)] == [64, 64, 0, 0]
    assert not any(layer.impl.ring for layer in drafting)
    # vLLM names a metadata builder by its backend. Layers with a window need another builder than layers without.
    own, of_model = (layers[0].get_attn_backend() for layers in (drafting, served))
    assert own.full_cls_name() != of_model.full_cls_name()
    assert issubclass(own, of_model)
    assert own is drafting[1].get_attn_backend()
    every = config.compilation_config.static_forward_context
    pages = {
        name: layer.get_kv_cache_spec(config)
        if isinstance(layer, RecentLayer)
        else layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(config))
        for name, layer in every.items()
    }
    found = get_kv_cache_groups(config, pages)
    assert len(found) == groups
    assert sum(not set(names).isdisjoint(group.layer_names) for group in found) == 1
    if groups == 2:
        refuse_other_groups(config, found, set(names))
        return
    # vLLM's proposer would store the draft model's tokens by the served model's block table.
    with pytest.raises(UnsupportedModelError, match=r"other heads or head_dim .* KVPILOT_RECENT_TOKENS to 0"):
        refuse_other_groups(config, found, set(names))


def test_a_draft_beside_a_layer_in_16_bits_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.speculative_config = SimpleNamespace(method="eagle3", num_speculative_tokens=3)
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: config)
    attached(config)
    other = attention.Attention.__new__(attention.Attention)
    torch.nn.Module.__init__(other)
    config.compilation_config.static_forward_context["model.layers.2.self_attn.attn"] = other
    with pytest.raises(UnsupportedModelError, match="a draft model beside layers"):
        attached(config, names=["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"])


def test_a_ring_grows_with_its_request_up_to_the_window() -> None:
    from kvpilot_runtime.recent.ring_spec import RingManager

    manager = RingManager.__new__(RingManager)
    manager.kv_cache_spec = SimpleNamespace(ring_blocks=3, ring_tokens=23)
    manager.req_to_blocks, manager.block_pool = {"a": []}, SimpleNamespace(get_new_blocks=lambda n: [object()] * n)
    given = []
    for tokens in (1, 23, 24, 46, 47, 70, 5000):
        needed = manager.get_num_blocks_to_allocate("a", tokens, [], 0, 0, tokens)
        assert needed == len(manager.allocate_new_blocks("a", tokens, tokens))
        given.append(len(manager.req_to_blocks["a"]))
    assert given == [1, 1, 2, 2, 3, 3, 3]


def test_a_layer_that_reads_another_layers_cache_uses_its_ring(config: Any) -> None:
    first, second = attached(config, shared=NAMES[0])
    assert len(rings(config)) == 1
    assert first.impl.ring is second.impl.ring


@pytest.mark.parametrize("tokens", formats.RECENT_CHOICES)
def test_the_environment_sets_the_number_of_tokens_of_the_window(
    config: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ring_layers.VARIABLE, str(tokens))
    layers = attached(config)
    assert [layer.impl.recent for layer in layers] == [tokens] * 2
    assert [ring.recent for ring in rings(config)] == ([tokens] * 2 if tokens else [])


@pytest.mark.parametrize("text", ["63", "-64", "many", "1e2"])
def test_a_window_that_cannot_be_served_is_refused(config: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ring_layers.VARIABLE, text)
    with pytest.raises(
        UnsupportedModelError, match=rf"{ring_layers.VARIABLE} is '{text}'; use one of 0, 64, 128, 256, 512"
    ):
        attached(config)


def test_a_window_longer_than_the_context_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ring_layers.VARIABLE, "512")
    config.model_config.max_model_len = 400
    with pytest.raises(UnsupportedModelError, match=r"is 512, but the context has 400 tokens .*use a smaller one"):
        attached(config)


@pytest.mark.parametrize(("context", "tokens"), [(2048, 512), (512, 512), (511, 256), (256, 256), (127, 64), (63, 0)])
def test_a_default_window_longer_than_the_context_is_cut_and_log_and_metric_say_so(
    config: Any, context: int, tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ring_layers, "RECENT_WINDOW", SimpleNamespace(report=told.append))
    monkeypatch.setattr(ring_layers.log, "propagate", True)
    config.cache_config.cache_dtype = "k2v2"
    config.model_config.max_model_len = context
    with caplog.at_level(logging.INFO, ring_layers.log.name):
        layers = attached(config)
    assert [layer.impl.recent for layer in layers] == [tokens] * 2
    assert [ring.recent for ring in rings(config)] == ([tokens] * 2 if tokens else [])
    ring_layers.report(config, dict(zip(NAMES, layers, strict=True)))
    assert told == [{"dtype": "k2v2", "tokens": str(tokens), "reason": "" if tokens == 512 else "ShortContext"}]
    if tokens < 512:
        assert f"'k2v2', 512 tokens, is cut to {tokens}: the context is {context} tokens" in caplog.text
    else:
        assert "is cut" not in caplog.text


@pytest.mark.parametrize("reason", ["HybridManagerOff", "UnlikeLayers", "OtherLayers"])
def test_without_rings_log_and_metric_name_the_reason(
    config: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ring_layers, "RECENT_WINDOW", SimpleNamespace(report=told.append))
    monkeypatch.setattr(ring_layers.log, "propagate", True)
    if reason == "HybridManagerOff":
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    elif reason == "OtherLayers":
        other = type("Mamba", (RecentLayer,), {})("model.layers.2.mamba", SimpleNamespace(kv_cache_dtype="auto"), 0)
        config.compilation_config.static_forward_context["model.layers.2.mamba"] = other
    with caplog.at_level(logging.WARNING, ring_layers.log.name):
        layers = attached(config, kv_heads=(8, 4) if reason == "UnlikeLayers" else (8, 8))
    assert not rings(config)[1:] if reason == "OtherLayers" else not rings(config)
    assert [layer.impl.recent for layer in layers] == [0, 0]
    assert f"No recent window ({reason})" in caplog.text
    ring_layers.report(config, dict(zip(NAMES, layers, strict=True)))
    assert told == [{"dtype": "k4v4", "tokens": "0", "reason": reason}]


def test_a_loader_that_does_not_call_layers_after_loading_is_reported(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ring_layers, "RECENT_WINDOW", SimpleNamespace(report=told.append))
    layer = SimpleNamespace(impl=SimpleNamespace(recent=None))
    ring_layers.report(config, {NAMES[0]: layer})
    assert told == [{"dtype": "k4v4", "tokens": "0", "reason": "NotAttached"}]
