"""A supported vLLM is served, and a newer one with a warning. If vLLM lacks a part, the error names the part."""

import importlib.metadata
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from vllm.config import cache
from vllm.config.cache import CacheConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.core import EngineCoreProc

from kvpilot_formats import dtypes, formats
from kvpilot_runtime import plugin
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import contract
from kvpilot_smallmodels.models import tiny_llama
from support import forked_serve

pytestmark = pytest.mark.timeout(1800)

LAYER = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="k4v4", block_size=None)
AHEAD = "0.99.0+cpu"
REMEDY = "supported are 0.32 on a CPU; 0.32, 0.33 on a GPU; use a runtime image with vllm 0.32"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an environment in which no warning was printed yet."""
    monkeypatch.setenv(contract.TOLD, "")  # monkeypatch restores it afterwards
    monkeypatch.delenv(contract.TOLD)
    monkeypatch.setattr(contract.log, "propagate", True)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)


@pytest.mark.parametrize("version", ["0.34.0", "1.2.3", "dev"])
def test_a_newer_version_is_served_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        plugin.serve_dtype("k4v4")
        plugin.serve_dtype("k4v4")
    (said,) = [r.getMessage() for r in caplog.records if "not supported" in r.getMessage()]
    assert said == f"vllm {version} is not supported on a CPU; {REMEDY}"
    assert CpuPlatform.get_attn_backend_cls(None, LAYER, 4) == "kvpilot_runtime.backends.cpu.K4V4Backend"


@pytest.mark.parametrize(
    ("version", "platform", "said"),
    [
        ("0.32.0+cpu", "cpu", ""),
        ("0.32.0", "cuda", ""),
        ("0.33.0", "cuda", ""),
        ("0.33.1", "cpu", "vllm 0.33.1 is not supported on a CPU"),
        ("0.34.0", "cuda", "vllm 0.34.0 is not supported on a GPU"),
    ],
)
def test_a_warning_names_the_version_the_supported_ones_and_the_remedy(
    version: str, platform: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        contract.tell(platform)
    assert [r.getMessage() for r in caplog.records] == ([f"{said}; {REMEDY}"] if said else [])


@pytest.mark.parametrize("version", ["0.31.0+cpu", "0.28.0"])
def test_a_version_of_vllm_before_0_32_is_refused_and_the_error_names_it(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    words = re.escape(f"'k4v4' needs vLLM 0.32 or newer (here is {version}); use --kv-cache-dtype auto, or a runtime")
    with pytest.raises(UnsupportedEngineError, match=words):
        plugin.serve_dtype("k4v4")


def test_a_dtype_is_refused_by_the_name_of_a_part_that_vllm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Platform, "_align_heterogeneous_kv_block_size")
    plugin.register()
    assert CacheConfig(cache_dtype="auto").cache_dtype == "auto"
    words = r"'k4v4' cannot be served by vllm .*_align_heterogeneous_kv_block_size.*; use --kv-cache-dtype auto"
    with pytest.raises(ValidationError, match=words):
        CacheConfig(cache_dtype="k4v4")


@pytest.mark.parametrize(("owner", "name"), [(BlockPool, "evict_blocks"), (KVCacheManager, "pop_blocks_for_free")])
def test_a_dtype_with_residuals_is_refused_without_a_function_that_its_pool_overrides(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        UnsupportedEngineError, match=f"'k4v4' cannot be served by vllm .*{owner.__name__} has no {name}"
    ):
        plugin.serve_dtype("k4v4")
    plugin.serve_dtype("int8")


def test_a_dtype_with_residuals_is_refused_without_an_argument_that_its_pool_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate_slots(self: KVCacheManager, request: object, num_new_tokens: int) -> None: ...

    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate_slots)
    with pytest.raises(UnsupportedEngineError, match="allocate_slots has no num_new_computed_tokens"):
        plugin.serve_dtype("k4v4")


def test_a_layer_is_refused_by_the_name_of_a_module_that_vllm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.serve_dtype("k4v4")
    monkeypatch.delitem(sys.modules, "kvpilot_runtime.backends.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", None)
    with pytest.raises(UnsupportedEngineError, match=r"'k4v4' cannot be served by vllm .*vllm\.forward_context"):
        CpuPlatform.get_attn_backend_cls(None, LAYER, 4)


def test_a_missing_shutdown_function_is_logged_and_engines_with_auto_still_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(options.SERVE, "1")
    monkeypatch.setattr(plugin.log, "propagate", True)
    monkeypatch.delattr(EngineCoreProc, "_reject_add_in_shutdown")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "_reject_add_in_shutdown" in caplog.text
    assert "when an engine ends: use vllm 0.32" in caplog.text
    assert CacheConfig(cache_dtype="auto").cache_dtype == "auto"


# This plugin passes keys as values to every attention layer, as another argument order in a later vLLM might.
SWAPS = """
def register():
    from vllm.model_executor.layers.attention import Attention
    stock = Attention.forward
    Attention.forward = lambda self, query, key, value, *args, **kw: stock(self, query, value, key, *args, **kw)
"""


def another_vllm(folder: Path, version: str, plugin_source: str = "") -> dict[str, str]:
    """Return an environment in which the installed vLLM reports this version and loads another plugin."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    if plugin_source:
        (folder / "vllm_swaps.py").write_text(plugin_source)
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nswaps = vllm_swaps:register\n")
    return {"PYTHONPATH": str(folder), "KVPILOT_CALIBRATION": "off"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], str]]:
    """Return answers and logs of two engines of a later version: one unchanged, and one that swaps keys and values."""

    def run(name: str, source: str, more: dict[str, str]) -> tuple[list[int], str]:
        folder = tmp_path_factory.mktemp(name)
        env = another_vllm(folder / "site", AHEAD, source) | more
        small = ("--kv-cache-memory-bytes=16M", "--max-model-len=256", "--num-gpu-blocks-override=20")
        answer: list[int] = []
        try:
            with forked_serve.engine(tiny_llama(), "k4v4", folder, *small, env=env) as running:
                answer = running.tokens([5, 6, 7], 4)
        except RuntimeError:  # The engine has ended by itself. Its log says why.
            pass
        (log,) = folder.glob("*.log")
        return answer, log.read_text(errors="replace")

    # By default, vLLM runs the serving engine in several processes, and each of them loads the plugin.
    asked = {"served": ("", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}), "swapped": (SWAPS, dict[str, str]())}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv(contract.TOLD, raising=False)  # The plugin of an earlier test has set it.
        return dict(zip(asked, pool.map(lambda name: run(name, *asked[name]), asked), strict=True))


def test_an_engine_of_a_newer_version_serves_and_warns_once(engines: dict[str, tuple[list[int], str]]) -> None:
    answer, log = engines["served"]
    assert len(answer) == 4, log[-3000:]
    assert log.count(f"vllm {AHEAD} is not supported on a CPU") == 1


def test_an_engine_that_misreads_its_pages_stops_and_names_dtype_and_version(
    engines: dict[str, tuple[list[int], str]],
) -> None:
    answer, log = engines["swapped"]
    assert not answer
    raised = [line for line in log.splitlines() if "UnsupportedEngineError: " in line]
    assert raised, log[-3000:]
    words = (AHEAD, "'k4v4'", "attention.Attention is not what was stored", "off by", "--kv-cache-dtype auto")
    assert all(word in raised[-1] for word in words), raised[-1]


def test_the_operator_knows_every_dtype_that_vllm_may_report() -> None:
    assert set(get_args(cache.CacheDType)) <= {*dtypes.names(), *formats.VLLM_DTYPES_LEFT_OUT}
