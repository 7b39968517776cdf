"""Contract at start: a complete vLLM is served, and a missing part is named."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from vllm.config import cache
from vllm.config.cache import CacheConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.selector import AttentionSelectorConfig

from kvpilot_formats import dtypes
from kvpilot_localcluster.engines.real import engine
from kvpilot_operator.observe.page import VLLM_DTYPES
from kvpilot_runtime import plugin
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import contract, hooks
from kvpilot_runtime.vllm_api.vllm_parts import PARTS, Broken, Feature, Part, unlike
from kvpilot_smallmodels.models import tiny_llama
from support import forked_serve

pytestmark = pytest.mark.timeout(1800)

ON_CPU = [part for part in PARTS if part.platform in ("", "cpu") and not part.wrong()]
LAYER = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="k4v4", block_size=None)
AHEAD = "0.99.0+cpu"
REMEDY = "supported are 0.32 on a CPU; 0.32, 0.33 on a GPU; use a runtime image with vllm 0.32"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check vLLM again in each test, in an environment without earlier warnings."""
    monkeypatch.setenv(contract.TOLD, "")  # monkeypatch restores it afterwards
    monkeypatch.delenv(contract.TOLD)
    monkeypatch.setattr(contract.log, "propagate", True)
    looked_at = contract.broken
    looked_at.cache_clear()
    yield
    looked_at.cache_clear()


def owner(part: Part) -> tuple[Any, str]:
    """Return the object that has a part, and the part's name there."""
    module, _, name = part.path.partition(":")
    *above, last = name.split(".")
    return functools.reduce(getattr, above, importlib.import_module(module)), last


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)


def test_the_installed_vllm_has_every_part() -> None:
    assert not contract.broken("cpu")
    assert contract.has(Feature.WINDOW)


@pytest.mark.parametrize("part", [part for part in ON_CPU if "." not in part.path.split(":")[1]], ids=str)
def test_a_part_that_is_gone_is_named(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    above, name = owner(part)
    monkeypatch.delattr(above, name)
    (found,) = [one for one in contract.broken("cpu") if one.part is part]
    assert str(part) in str(found)
    assert "is not there" in found.why


@pytest.mark.parametrize("part", [part for part in ON_CPU if part.takes], ids=str)
def test_a_part_with_other_parameters_is_named(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    above, name = owner(part)

    def other(self: Any, first: Any) -> None:
        """Take an argument that vLLM does not pass."""

    monkeypatch.setattr(above, name, other)
    (found,) = [one for one in contract.broken("cpu") if one.part is part]
    assert f"takes (first), and not ({', '.join(part.takes)})" in found.why


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda query, key: 0, ""),
        (lambda query, key, more=1: 0, ""),
        (lambda query, *others, **named: 0, ""),
        (lambda key, query: 0, "takes (key, query), and not (query, key)"),
        (lambda query, key, more: 0, "asks for more"),
        (lambda query, key, *, more: 0, "asks for more"),
        (len, "takes (obj), and not (query, key)"),
    ],
)
def test_parameters_are_compared_as_a_call_would_give_them(function: Any, wrong: str) -> None:
    assert unlike(function, ("query", "key"), ()) == wrong


@pytest.mark.parametrize(
    ("path", "has", "word"),
    [
        ("vllm.v1.attention.backend:CommonAttentionMetadata", "slots_by_layer", "has no slots_by_layer"),
        ("vllm.v1.attention.backend:AttentionBackend", "customize_page", "has no customize_page"),
    ],
)
def test_a_field_that_is_gone_is_named(path: str, has: str, word: str) -> None:
    assert Part(path, has=(has,)).wrong() == word


def test_pages_of_another_size_than_a_backend_says_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import AttentionSpec

    monkeypatch.setattr(AttentionSpec, "page_size_bytes", property(lambda _self: 4096))
    assert [one.why for one in contract.broken("cpu") if "FullAttentionSpec" in one.part.path] == [
        f"makes pages of 4096 bytes, and not {16 * 2 * 68}"
    ]


@pytest.mark.parametrize("version", ["0.34.0", "1.2.3", "dev"])
def test_a_newer_version_is_served_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        plugin.serve_dtype("k4v4")
        plugin.serve_dtype("k4v4")
    (said,) = [r.getMessage() for r in caplog.records if "not supported" in r.getMessage()]
    assert said.startswith(f"vllm {version} is not supported on a CPU; {REMEDY}")
    assert "none differs" in said
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
        contract.tell((), platform)
    assert [r.getMessage() for r in caplog.records] == (
        [f"{said}; {REMEDY} (of the parts that kvpilot uses, none differs)"] if said else []
    )


@pytest.mark.parametrize("version", ["0.31.0+cpu", "0.28.0"])
def test_an_older_version_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    words = re.escape(f"'k4v4' needs vLLM 0.32 or newer (here is {version}); use --kv-cache-dtype auto, or a runtime")
    with pytest.raises(UnsupportedEngineError, match=words):
        plugin.serve_dtype("k4v4")


def broken_in(feature: Feature) -> tuple[Broken, ...]:
    return (Broken(Part("vllm.some:where", feature), "is not there (AttributeError)"),)


def test_a_scheduler_that_cannot_be_told_which_pages_to_free_refuses_bounded_caches_alone() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"SinksAndWindow:4:64.*vllm\.some\.where is not there"):
        contract.refuse_bound("SinksAndWindow:4:64", broken_in(Feature.BOUND))
    contract.refuse_bound("SinksAndWindow:4:64", broken_in(Feature.LAYERS))
    contract.refuse("k4v4", broken_in(Feature.BOUND), skipping=True)


def test_only_dtypes_of_ours_are_refused_for_a_part_that_their_layers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"'k4v4'.*vllm\.some\.where is not there.*--kv-cache-dtype auto"):
        contract.refuse("k4v4", broken_in(Feature.LAYERS), skipping=False)
    contract.refuse("k4v4", broken_in(Feature.SKIPPED), skipping=False)
    contract.refuse("k4v4", broken_in(Feature.WINDOW), skipping=True)
    with pytest.raises(UnsupportedEngineError, match=r"vllm\.some\.where"):
        contract.refuse("k4v4", broken_in(Feature.SKIPPED), skipping=True)


def test_a_part_that_latents_alone_need_costs_no_other_dtype_anything(caplog: pytest.LogCaptureFixture) -> None:
    contract.tell(broken_in(Feature.LATENTS), "cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    contract.refuse("k4v4", broken_in(Feature.LATENTS), skipping=True)
    with pytest.raises(UnsupportedEngineError, match="'mla4' cannot be served"):
        contract.refuse("mla4", broken_in(Feature.LATENTS), skipping=False)


def test_what_is_broken_is_logged_with_its_remedy_and_costs_auto_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        contract.tell(broken_in(Feature.LAYERS), "cpu")
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert all(word in caplog.text for word in ("vllm.some.where is not there", "--kv-cache-dtype auto"))


def test_an_engines_end_that_is_not_as_it_was_is_told_and_no_dtype_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        contract.tell(broken_in(Feature.DRAIN), "cpu")
    assert "before SIGTERM are not answered: use vllm 0.32" in caplog.text
    assert "auto" not in caplog.text


def test_a_vllm_that_does_not_say_where_images_are_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contract.has(Feature.IMAGES)
    monkeypatch.setattr(contract, "broken", lambda _platform: broken_in(Feature.IMAGES))
    assert not contract.has(Feature.IMAGES)


@pytest.mark.parametrize("feature", [Feature.NAMES, Feature.LAYERS])
def test_a_dtype_that_this_vllm_cannot_serve_is_refused_before_anything_of_it_is_wrapped(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "broken", lambda _platform: broken_in(feature))
    monkeypatch.setattr(hooks, "wrap", lambda *_: pytest.fail("vLLM was changed"))
    plugin.register()
    assert CacheConfig(cache_dtype="auto").cache_dtype == "auto"
    with pytest.raises(ValidationError, match=r"'k4v4' cannot be served.*vllm\.some\.where is not there"):
        CacheConfig(cache_dtype="k4v4")


# Plugin that passes keys as values to every attention layer, as a changed argument order in a later vLLM might.
SWAPS = """
def register():
    from vllm.model_executor.layers.attention import Attention
    stock = Attention.forward
    Attention.forward = lambda self, query, key, value, *args, **kw: stock(self, query, value, key, *args, **kw)
"""


def another_vllm(folder: Path, version: str, plugin_source: str = "") -> dict[str, str]:
    """Return an environment in which the installed vLLM has this version, and loads another plugin."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    if plugin_source:
        (folder / "vllm_swaps.py").write_text(plugin_source)
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nswaps = vllm_swaps:register\n")
    return {"PYTHONPATH": str(folder), "KVPILOT_CALIBRATION": "off"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], str]]:
    """Return the answers and logs of two engines of a later version: one unchanged, one that swaps keys and values."""

    def run(name: str, start: Any, source: str, more: dict[str, str]) -> tuple[list[int], str]:
        folder = tmp_path_factory.mktemp(name)
        env = another_vllm(folder / "site", AHEAD, source) | more
        small = ("--kv-cache-memory-bytes=16M", "--max-model-len=256", "--num-gpu-blocks-override=20")
        answer: list[int] = []
        try:
            with start(tiny_llama(), "k4v4", folder, *small, env=env) as running:
                answer = running.tokens([5, 6, 7], 4)
        except RuntimeError:  # the engine ended by itself; its log says why
            pass
        (log,) = folder.glob("*.log")
        return answer, log.read_text(errors="replace")

    # The serving engine has several processes, by vLLM's default, and each imports the plugin anew.
    asked: dict[str, tuple[Any, str, dict[str, str]]] = {
        "served": (engine, "", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        "swapped": (forked_serve.engine, SWAPS, {}),
    }
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv(contract.TOLD, raising=False)  # an earlier test's plugin set it
        return dict(zip(asked, pool.map(lambda name: run(name, *asked[name]), asked), strict=True))


def test_an_engine_of_a_version_to_come_serves_and_warns_once(engines: dict[str, tuple[list[int], str]]) -> None:
    answer, log = engines["served"]
    assert len(answer) == 4, log[-3000:]
    assert log.count(f"vllm {AHEAD} is not supported on a CPU") == 1


def test_an_engine_whose_pages_come_back_wrong_is_refused_by_name(engines: dict[str, tuple[list[int], str]]) -> None:
    answer, log = engines["swapped"]
    assert not answer
    raised = [line for line in log.splitlines() if "UnsupportedEngineError: " in line]
    assert raised, log[-3000:]
    words = (AHEAD, "'k4v4'", "attention.Attention is not what was stored", "off by", "--kv-cache-dtype auto")
    assert all(word in raised[-1] for word in words), raised[-1]


def test_the_operator_knows_every_dtype_that_vllm_may_report() -> None:
    assert set(get_args(cache.CacheDType)) <= {*dtypes.names(), *VLLM_DTYPES}
