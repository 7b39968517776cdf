"""The page check at an engine's start: on every platform, with up to three requests."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpilot_runtime.backends import page_check
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat
from support.own_process import ask


def measured(loses: str = "") -> float:
    """Return the error of a real engine's answers.

    If `loses` is "table", replace the first entry of each block table before the step that computes all requests. If
    it is "residuals", hide all residual pages from that step.
    """
    return float(ask("test_page_check", {"loses": loses}, KVPILOT_CALIBRATION="off")["off"])


def main() -> None:
    """Run an engine for the request on stdin."""
    loses = json.load(sys.stdin)["loses"]
    from vllm import LLM

    from kvpilot_runtime.backends import page_check
    from kvpilot_smallmodels.models import tiny_llama

    found: list[float] = []
    stock_off, stock_step = page_check._off, page_check._step

    def noted(*args: Any) -> float:
        found.append(stock_off(*args))
        return 0.0

    def step(config: Any, layer: Any, requests: Any, table: torch.Tensor) -> torch.Tensor:
        if loses == "table" and len(requests) > 1:
            table[:, 0] = 0
        if loses == "residuals" and len(requests) > 1:
            layer.impl.residuals(layer.kv_cache).pages.zero_()
        return stock_step(config, layer, requests, table)

    vars(page_check).update(_off=noted, _step=step)
    LLM(model=str(tiny_llama()), kv_cache_dtype="k4v4", max_model_len=256, kv_cache_memory_bytes=16 << 20,
        max_num_batched_tokens=48, max_num_seqs=8, enforce_eager=True)  # fmt: skip
    print(json.dumps({"off": max(found)}), flush=True)


pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("blocks", "size", "longest", "tokens"),
    [
        (100, 16, 2048, [19, 5, 33]),
        (4, 16, 2048, [19, 5]),  # no room for a third request
        (100, 16, 32, [19, 5]),  # no request exceeds the limit of 32 tokens
        (2, 16, 2048, [5]),
        (100, 3000, 65536, [3003, 5]),
    ],
)
def test_the_check_uses_as_many_requests_as_the_cache_can_hold(
    blocks: int, size: int, longest: int, tokens: list[int]
) -> None:
    assert page_check.lengths(blocks, size, longest) == tokens


def worker(device: str) -> Any:
    return SimpleNamespace(vllm_config=None, device=SimpleNamespace(type=device))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the only layer of a worker."""
    one = SimpleNamespace(
        kv_sharing_target_layer_name=None, head_size=64, num_kv_heads=2, num_heads=4, kv_cache_dtype="k4v4"
    )
    monkeypatch.setattr(page_check, "our_layers", lambda _config: {"layer": one})
    return one


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("layer")
def test_wrong_pages_prevent_the_start_on_every_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version_text", lambda: "0.32.0")
    monkeypatch.setattr(page_check, "_off", lambda *_: 0.7)
    with pytest.raises(UnsupportedEngineError, match="off by 70%"):
        page_check.check(worker(device))


@pytest.mark.parametrize(
    ("version", "refused"), [("0.32.0", False), ("0.31.0", True), ("0.33.0", False), ("0.34.0", True)]
)
@pytest.mark.usefixtures("layer")
def test_if_the_page_check_cannot_run_only_tested_versions_serve(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> float:
        raise TypeError("another step")

    monkeypatch.setattr(compat, "version_text", lambda: version)
    monkeypatch.setattr(page_check, "_off", fails)
    if not refused:
        page_check.check(worker("cuda"))
        return
    with pytest.raises(UnsupportedEngineError, match="TypeError: another step"):
        page_check.check(worker("cuda"))


def test_a_real_engine_reads_back_what_it_stored() -> None:
    assert measured() < page_check.WORST


@pytest.mark.parametrize("loses", ["table", "residuals"])
def test_the_check_finds_lost_pages(loses: str) -> None:
    assert measured(loses) > page_check.WORST
