"""Preflight and backend refuse the same options if pages are transferred by NIXL or LMCache."""

import importlib.metadata
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.v1.attention.backends import utils

from kvpilot_runtime import plugin, serve
from kvpilot_runtime.backends import packed
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request
from kvpilot_runtime.transfer.terms import Terms, short
from kvpilot_runtime.vllm_api import compat
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama
from support.preflights import asked, refusal

DECODE = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
PREFILL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
SHARE = {
    "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://10.0.0.1", "lmcache.mp.mp_transfer_mode": "engine_driven"},
}  # fmt: skip
BESIDE = {
    "pipeline parallelism": ["--pipeline-parallel-size=2"], "data parallelism": ["-dp", "2"],
    "speculative decoding": ["--spec-method=ngram", "--spec-tokens=2"], "adapters": ["--enable-lora"],
    "offloading": ["--kv-offloading-size=1"], "layers that stay in 16 bits": ["--kv-cache-dtype-skip-layers=0"],
}  # fmt: skip
ONE_BATCH = {"enable_dbo": False, "ubatch_size": 0}


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the packages are installed; nothing here imports them."""
    find, version = importlib.util.find_spec, importlib.metadata.version
    packages = ("nixl", "lmcache")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: find("json" if name in packages else name, *a))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.6" if name == "lmcache" else version(name))


def transferring(transfer: dict[str, Any], *more: str, dtype: str = "k4v4", model: str | None = None) -> Request:
    """Return a request with such a transfer and other arguments."""
    return asked(*more, "--kv-transfer-config", json.dumps(transfer), dtype=dtype, model=model)


@pytest.mark.parametrize("transfer", [DECODE, PREFILL, {**DECODE, "kv_role": "kv_both"},
                                      {**DECODE, "kv_connector_extra_config": {"kv_lease_duration": 60}}, SHARE,
                                      {**SHARE, "kv_role": "kv_consumer"}])  # fmt: skip
def test_tested_configurations_of_connectors_are_accepted(transfer: dict[str, Any]) -> None:
    check(transferring(transfer))
    packed.refuse_unsupported_options(engine(transfer))


@pytest.mark.parametrize("transfer", [DECODE, PREFILL])
def test_options_of_a_connector_with_dots_in_their_names_mean_the_same(transfer: dict[str, Any]) -> None:
    dotted = [f"--kv-transfer-config.{key}={value}" for key, value in transfer.items() if isinstance(value, str)]
    check(serve.parse([f"--model={tiny_llama()}", "--kv-cache-dtype=k4v4", *dotted])[0])


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_connector_extra_config": {"enforce_handshake_compat": False}}, "enforce_handshake_compat False"),
        ({"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}, "bidirectional_kv_xfer True"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, "backends ['GDS']"),
        ({"kv_connector_extra_config": {"what_is_to_come": 1}}, "what_is_to_come 1"),
        ({"kv_connector_module_path": "elsewhere"}, "kv_connector_module_path 'elsewhere'"),
        ({"enable_permute_local_kv": True}, "enable_permute_local_kv True"),
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device 'cuda'"),
    ],
)  # fmt: skip
def test_untested_configurations_are_refused_by_preflight_and_backend(more: dict[str, Any], what: str) -> None:
    assert_refused({**DECODE, **more}, what)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_role": "kv_producer", "kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_connector_extra_config": {}}, '"lmcache.mp.mp_transfer_mode": "engine_driven"'),
        ({"kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": "auto"}}, "lmcache.mp.mp_transfer_mode 'auto'"),
        ({"kv_connector_extra_config": SHARE["kv_connector_extra_config"] | {"lmcache.mp.lazy_offload": True}},
         "lmcache.mp.lazy_offload True"),
        ({"kv_connector_module_path": "elsewhere"}, "kv_connector_module_path 'elsewhere'"),
    ],
)  # fmt: skip
def test_untested_configurations_of_lmcache_are_refused(more: dict[str, Any], what: str) -> None:
    assert_refused({**SHARE, **more}, what)


def assert_refused(transfer: dict[str, Any], what: str) -> None:
    message = refusal(transferring(transfer)).message
    assert f"{transfer['kv_connector']} with" in message
    assert what in message
    assert "'k4v4'" in message
    check(transferring(transfer, dtype="auto"))
    with pytest.raises(UnsupportedModelError) as caught:
        packed.refuse_unsupported_options(engine(transfer))
    assert what in str(caught.value)


def engine(transfer: dict[str, Any], **more: Any) -> SimpleNamespace:
    """Return a vLLM configuration with this KV connector, reduced to the fields that our backend reads."""
    same = {
        "cache_config": SimpleNamespace(cache_dtype="k4v4", kv_cache_dtype_skip_layers=[]),
        "compilation_config": SimpleNamespace(static_forward_context={}),
        "parallel_config": ParallelConfig(),
        "speculative_config": None, "lora_config": None, "kv_transfer_config": KVTransferConfig(**transfer),
    }  # fmt: skip
    return SimpleNamespace(**same | more)


@pytest.mark.parametrize("transfer", [DECODE, SHARE], ids=["NIXL", "LMCache"])
@pytest.mark.parametrize("what", BESIDE)
def test_options_untested_with_a_connector_are_refused_and_the_message_names_them(
    what: str, transfer: dict[str, Any]
) -> None:
    message = refusal(transferring(transfer, *BESIDE[what])).message
    assert f"beside {what}" in message
    assert "'k4v4'" in message
    if what != "layers that stay in 16 bits":
        check(transferring(transfer, *BESIDE[what], dtype="auto"))


@pytest.mark.parametrize(
    "more",
    [
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=1, **ONE_BATCH)},
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=2, **ONE_BATCH)},
        {"speculative_config": SimpleNamespace(method="ngram")}, {"lora_config": SimpleNamespace()},
        {"cache_config": SimpleNamespace(cache_dtype="k4v4", kv_cache_dtype_skip_layers=["0"])},
        {"compilation_config": SimpleNamespace(static_forward_context={"a": SimpleNamespace(sliding_window=64)})},
    ],
)  # fmt: skip
def test_an_engine_started_without_preflight_refuses_options_that_preflight_refuses(more: dict[str, Any]) -> None:
    packed.refuse_unsupported_options(engine(DECODE))
    with pytest.raises(UnsupportedModelError, match=r"--kv-transfer-config.*'k4v4'"):
        packed.refuse_unsupported_options(engine(DECODE, **more))


def test_only_nixl_may_use_the_layout_with_all_layers_of_a_block_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"cache_dtype": "k4v4", "kv_cache_dtype_skip_layers": [], "kv_cache_layout": "BHLNC"}
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    check(transferring(DECODE))
    packed.refuse_unsupported_options(engine(DECODE, cache_config=SimpleNamespace(**cache)))
    assert "VLLM_KV_CACHE_LAYOUT" in refusal(transferring(SHARE)).message
    with pytest.raises(UnsupportedModelError, match="LMCacheMPConnector beside VLLM_KV_CACHE_LAYOUT=BHLNC"):
        packed.refuse_unsupported_options(engine(SHARE, cache_config=SimpleNamespace(**cache)))
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    check(transferring(SHARE))
    check(transferring(SHARE, dtype="auto"))


def test_models_with_sliding_window_layers_are_refused_with_a_connector() -> None:
    assert (
        "--kv-transfer-config for a model with sliding-window layers"
        in refusal(transferring(DECODE, model=str(tiny_gemma3()))).message
    )


def test_a_host_buffer_is_refused_on_a_gpu() -> None:
    assert options.refused(["--kv-transfer-config", json.dumps({**DECODE, "kv_buffer_device": "cpu"})], {}, "cuda")
    assert not options.refused(["--kv-transfer-config", json.dumps({**DECODE, "kv_buffer_device": "cuda"})], {}, "cuda")


def test_another_vllm_and_an_image_without_the_package_are_refused_before_a_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "nixl" else found(name, *a))
    assert "needs the package nixl" in refusal(transferring(DECODE)).message
    monkeypatch.setattr(compat, "vllm_version", lambda: (0, 33))
    assert "needs vLLM 0.32" in refusal(transferring(DECODE)).message
    with pytest.raises(UnsupportedModelError, match="NixlConnector of vllm"):
        packed.refuse_unsupported_options(engine(DECODE))
    check(transferring(DECODE, dtype="auto"))


def test_another_release_of_lmcache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1" if name == "lmcache" else version(name))
    assert "needs lmcache 0.5 (here is 0.6.1)" in refusal(transferring(SHARE)).message
    with pytest.raises(UnsupportedModelError, match=r"LMCacheMPConnector of lmcache 0\.6\.1"):
        packed.refuse_unsupported_options(engine(SHARE))
    packed.refuse_unsupported_options(engine(DECODE))
    check(transferring(SHARE, dtype="auto"))


@pytest.mark.parametrize(
    ("transfer", "dtype", "heads", "wanted"),
    [
        (DECODE, "k4v4", 8, "BHLNC"), (PREFILL, "k2v2", 2, "BHLNC"),
        (DECODE, "k4v4", 1, "LBHNC"),  # vLLM copies this layout layer by layer, and NIXL merges adjacent parts
        (DECODE, "auto", 8, "LBHNC"), (None, "k4v4", 8, None),
    ],
)  # fmt: skip
def test_only_our_dtypes_request_the_layout_with_the_fewest_copies(
    transfer: dict[str, Any] | None, dtype: str, heads: int, wanted: str | None
) -> None:
    plugin.serve_dtype("k4v4")
    model = SimpleNamespace(use_mla=False, get_num_kv_heads=lambda parallel: heads)
    found = engine(transfer or DECODE, model_config=model, cache_config=SimpleNamespace(cache_dtype=dtype))
    if transfer is None:
        found.kv_transfer_config = None
    assert utils.get_kv_connector_cache_layout(found) == wanted


def told(tokens: int = 40, **changes: Any) -> dict[str, Any]:
    blocks = {"remote_block_ids": [[1, 2, 3], [4, 5]], "remote_num_tokens": tokens, "remote_blocks_expiry_time": 1.0}
    return blocks | changes


@pytest.mark.parametrize(
    ("params", "what"),
    [
        (told(), None), (told(41), None),
        (told(39), "39 of 40 tokens"), (told(remote_num_tokens=None), "0 of 40 tokens"),
        (told(remote_block_ids=[[1, 2], [4, 5]]), "[2, 2] blocks"),
        (told(remote_block_ids=[[1, 2, 3, 6], [4, 5]]), "[4, 2] blocks"),
        (told(remote_block_ids=[[1, 2, 3], [4]]), "[3, 1] blocks"),
        (told(remote_block_ids=[[1, 2, 3]]), "[3] blocks"),
        (told(remote_block_ids=None), "[] blocks"),
        (told(remote_blocks_expiry_time=None), "remote_blocks_expiry_time"),
    ],
)  # fmt: skip
def test_a_prompt_is_pulled_only_if_the_sender_has_exactly_its_blocks(params: dict[str, Any], what: str | None) -> None:
    found = short(params, 40, [3, 2])
    assert found is None if what is None else what in (found or "")


def test_the_text_of_an_engines_terms_differs_if_any_part_differs() -> None:
    terms = {"dtype": "k4v4", "page": 4352, "block": 16, "ranks": 2, "layout": "BHLNC", "factors": "abc"}
    own = str(Terms(**terms))
    assert own == "kv-cache dtype k4v4, 4352 bytes for 16 tokens, tensor parallel 2, layout BHLNC, factors abc"
    others = [Terms(**terms | {key: f"{value}1" if isinstance(value, str) else value + 1})
              for key, value in terms.items()]  # fmt: skip
    assert len({own, *map(str, others)}) == len(terms) + 1
