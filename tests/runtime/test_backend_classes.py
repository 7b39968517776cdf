"""Backend classes come from the table of formats: any process finds them by path, and each has one dtype."""

import json
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import cache
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import decode_reference
from kvpilot_runtime.backends import cpu, packed
from kvpilot_runtime.calibration.factors_file import Calibration
from kvpilot_runtime.vllm_api import compat
from support.own_process import ask


def main() -> None:
    """Read a pickled class from stdin and write the name of its dtype to stdout."""
    cls = pickle.loads(bytes.fromhex(json.load(sys.stdin)["pickled"]))  # noqa: S301 - our own bytes
    print(json.dumps(cls.fmt.name))


MADE_UP = replace(formats.parse("k8v4"), name="k8v2", value=formats.Side(2, 2, 64))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> formats.Format:
    """Add a dtype that does not exist to the table."""
    monkeypatch.setitem(formats.FORMATS, MADE_UP.name, MADE_UP)
    return MADE_UP


@pytest.mark.parametrize("dtype", formats.own_names())
def test_each_dtype_has_a_class_that_is_found_by_path_and_survives_pickling(dtype: str) -> None:
    cls = resolve_obj_by_qualname(f"kvpilot_runtime.backends.cpu.{compat.backend_class(dtype)}")
    assert cls is resolve_obj_by_qualname(f"kvpilot_runtime.backends.cpu.{compat.backend_class(dtype)}")
    assert pickle.loads(pickle.dumps(cls)) is cls  # noqa: S301 - our own bytes
    assert cls.full_cls_name() == ("kvpilot_runtime.backends.cpu", compat.backend_class(dtype))
    assert cls.supports_kv_cache_dtype(dtype)
    assert not any(cls.supports_kv_cache_dtype(other) for other in formats.own_names() if other != dtype)
    for dim, row in ((64, 64), (80, 96), (192, 192)):
        spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=dim, dtype=torch.uint8)
        assert cls.customize_spec(spec).page_size_bytes == 16 * 3 * formats.parse(dtype).row_bytes(row)
        assert cls.supports_head_size(dim)


def test_a_pickled_class_is_recreated_in_another_process() -> None:
    cls = resolve_obj_by_qualname("kvpilot_runtime.backends.cpu.K4V4Backend")
    assert ask("test_backend_classes", {"pickled": pickle.dumps(cls).hex()}) == "k4v4"


@pytest.mark.parametrize("name", ["K9V9Backend", "k4v4Backend", "AUTOBackend", "Backend"])
def test_a_name_of_another_dtype_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        resolve_obj_by_qualname(f"kvpilot_runtime.backends.cpu.{name}")


def test_a_dtype_that_is_added_to_the_table_can_serve_a_token(
    made_up: formats.Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    monkeypatch.setattr(packed, "window", lambda _config: 0)
    cls: Any = resolve_obj_by_qualname("kvpilot_runtime.backends.cpu.K8V2Backend")
    heads, kv_heads, dim, tokens = 4, 2, 64, 5
    spec = cls.customize_spec(FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=dim, dtype=torch.uint8))
    pages = torch.zeros(3, kv_heads, 16, spec.page_size_bytes // (16 * kv_heads), dtype=torch.uint8)
    impl = cls.get_impl_cls()(heads, dim, dim**-0.5, kv_heads, None, None, made_up.name)
    layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
    rng = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(tokens, n, dim, generator=rng) for n in (heads, kv_heads, kv_heads))
    factors = Factors.identity(kv_heads, dim)
    factors.key_first.add_(5.0)  # The layer adds this term only to the key at position 0, so it must know positions.
    impl.set_factors(layer, factors)
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=made_up.name), kv_transfer_config=None)
    builder = cls.get_builder_cls()(spec, ["x"], config, torch.device("cpu"))
    step = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(cpu, "get_forward_context", lambda: step)
    for new in (slice(0, 3), slice(3, 4), slice(4, 5)):  # A prompt comes first, then single steps.
        lens, slots = torch.tensor([new.stop], dtype=torch.int32), 32 + torch.arange(new.start, new.stop)
        meta = builder.build(0, SimpleNamespace(
            num_reqs=1, causal=True, query_start_loc=torch.tensor([0, len(slots)]), seq_lens=lens, slot_mapping=slots,
            block_table_tensor=torch.tensor([[2]], dtype=torch.int32), mm_req_doc_ranges=None,
        ))  # fmt: skip
        step.attn_metadata = {layer.layer_name: meta}
        impl.do_kv_cache_update(layer, key[new], value[new], pages, slots)
    out = torch.empty(1, heads, dim)
    impl.forward(layer, query[-1:], key[-1:], value[-1:], pages, meta, out)
    wanted = decode_reference(query[-1], key, value, made_up, dim**-0.5, factors)
    torch.testing.assert_close(out[0].double(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("inference", [True, False])
def test_factors_can_be_replaced_even_if_made_in_inference_mode(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    monkeypatch.setattr(packed, "window", lambda _config: 0)
    cls: Any = resolve_obj_by_qualname("kvpilot_runtime.backends.cpu.K4V4Backend")
    impl = cls.get_impl_cls()(4, 64, 0.125, 2, None, None, "k4v4")
    with torch.inference_mode(inference):  # vLLM's trial capture of graphs does this to measure their memory
        made = impl.factors(SimpleNamespace(layer_name="x"))
    found = Factors(*(torch.full((2, 64), float(x)) for x in range(1, 5)))
    impl.set_factors(SimpleNamespace(layer_name="x"), found)
    assert impl.factors(SimpleNamespace(layer_name="x")) is made
    assert torch.equal(made.value_mean, found.value_mean)


def test_a_layer_that_uses_another_layers_cache_has_the_factors_that_its_tokens_were_stored_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = tuple(Factors(*(torch.full((2, 64), float(10 * i + x)) for x in range(1, 6))) for i in range(2))
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: Calibration(layers))
    monkeypatch.setattr(packed, "window", lambda _config: 0)
    cls: Any = resolve_obj_by_qualname("kvpilot_runtime.backends.cpu.K4V4Backend").get_impl_cls()
    names = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    alone = cls(4, 64, 0.125, 2, None, None, "k4v4")
    shared = cls(4, 64, 0.125, 2, None, None, "k4v4", kv_sharing_target_layer_name=names[0])
    layer = SimpleNamespace(layer_name=names[1])
    assert torch.equal(alone.factors(layer).key_scale, layers[1].key_scale)
    assert torch.equal(shared.factors(layer).key_scale, layers[0].key_scale)


def test_with_vllms_registry_each_dtype_gets_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow the contract of vLLM 0.33: `register_kv_cache_dtype(name)` returns a decorator, which creates an instance.

    The test follows the source of 0.33's config/cache.py, because two versions of vLLM cannot be installed together.
    """
    handlers: dict[str, Any] = {}

    def register(name: str) -> Any:
        def decorate(cls: type) -> type:
            handlers[name] = cls()
            return cls

        return decorate

    monkeypatch.setattr(cache, "register_kv_cache_dtype", register, raising=False)
    monkeypatch.setattr(cache, "get_kv_cache_dtype_handler", handlers.get, raising=False)
    names, asked = formats.own_names(), []
    compat.make_known(names, asked.append)
    compat.make_known(names, asked.append)
    assert list(handlers) == list(names)
    assert not asked
    assert {h.name for h in handlers.values()} == set(names)
    assert {h.torch_dtype() for h in handlers.values()} == {torch.uint8}
    assert {h.quant_mode() for h in handlers.values()} == {KVQuantMode.NONE}
    assert {handlers[name].quant_mode() for name in names} == {KVQuantMode.NONE}
    assert asked == list(names), "each once, when something is made with it"
