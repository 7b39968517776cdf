"""vLLM's cache manager and block tables with a bounded cache, compared with the bound."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from kvpilot_runtime.bounded import behaviour
from kvpilot_runtime.bounded.heavy_spec import HeavySpec
from kvpilot_runtime.bounded.spec import BoundedManager, BoundedSpec
from kvpilot_runtime.config.retention import HeavyHitters, SinksAndWindow
from kvpilot_runtime.errors import PreflightError, UnsupportedEngineError
from kvpilot_runtime.preflight import bounded
from kvpilot_runtime.serve import parse
from kvpilot_runtime.vllm_api import compat, contract

PAGE = 16
BOUND, HEAVY = SinksAndWindow(4, 192), HeavyHitters(4, 64, 256)
SHAPE: dict[str, Any] = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.uint8}
SPECS = {
    BOUND: BoundedSpec(**SHAPE, sinks=4, sliding_window=192),
    HEAVY: HeavySpec(**SHAPE, sinks=4, sliding_window=64, budget=256),
}


class Tables:
    """Block tables of vLLM 0.33, filled as by its kernel, which needs a GPU.

    An entry wholly below `reach` tokens before a request's first scheduled one becomes the null block; a reach of 0
    turns that off.
    """

    def __init__(self, reach: int) -> None:
        self.reach, self.block_sizes, self.max_num_reqs = reach, [PAGE], 4
        self.block_tables = [SimpleNamespace(gpu=torch.zeros(4, 200, dtype=torch.int32))]

    def append_block_ids(self, row: int, ids: tuple[list[int], ...], overwrite: bool) -> None:
        assert overwrite
        self.block_tables[0].gpu[row].zero_()
        self.block_tables[0].gpu[row, : len(ids[0])] = torch.tensor(ids[0], dtype=torch.int32)

    def apply_staged_writes(self) -> None:
        """Do nothing: writes are immediate here."""

    def gather_block_tables(self, rows: torch.Tensor, padded: int, num_computed_tokens: torch.Tensor) -> Any:
        table = self.block_tables[0].gpu[rows.long()].clone()
        if self.reach > 0:
            nulls = (num_computed_tokens[rows.long()] - self.reach).clamp(min=0) // PAGE
            table[torch.arange(table.shape[1]) < nulls[:, None]] = 0
        return (table[:padded],)


def worker(bound: SinksAndWindow, reach: int) -> Any:
    group = SimpleNamespace(kv_cache_spec=SPECS[bound])
    config = SimpleNamespace(kv_cache_groups=[group])
    return SimpleNamespace(model_runner=SimpleNamespace(block_tables=Tables(reach), kv_cache_config=config))


def test_the_installed_manager_leaves_three_requests_the_pages_that_they_attend_to() -> None:
    behaviour.refuse_other_pages()


def test_a_manager_that_frees_as_for_a_sliding_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedManager, "get_num_skipped_tokens", SlidingWindowManager.get_num_skipped_tokens)
    monkeypatch.setattr(
        BoundedManager, "remove_skipped_blocks", SlidingWindowManager.__mro__[1].__dict__["remove_skipped_blocks"]
    )
    monkeypatch.setattr(BoundedManager, "sliding_window", behaviour.BOUND.window, raising=False)
    monkeypatch.setattr(BoundedManager, "extra_retained_tokens", 0, raising=False)
    with pytest.raises(UnsupportedEngineError, match=r"--retention cannot be served.*holds pages.*and not \[0, "):
        behaviour.refuse_other_pages()


def test_a_manager_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedManager, "remove_skipped_blocks", None)
    with pytest.raises(UnsupportedEngineError, match=r"cannot be tried \(TypeError"):
        behaviour.refuse_other_pages()


@pytest.mark.parametrize("bound", SPECS, ids=str)
def test_a_worker_that_clears_below_our_reach_keeps_every_page_that_is_attended_to(bound: SinksAndWindow) -> None:
    behaviour.refuse_other_tables(worker(bound, SPECS[bound].num_retained_tokens), bound)


@pytest.mark.parametrize("bound", SPECS, ids=str)
def test_a_worker_that_clears_below_the_window_is_refused(bound: SinksAndWindow) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"block table: a request of \d+ tokens lacks pages \[0"):
        behaviour.refuse_other_tables(worker(bound, bound.window - 1), bound)


def test_a_runner_whose_tables_the_scheduler_writes_has_nothing_to_be_asked() -> None:
    behaviour.refuse_other_tables(SimpleNamespace(model_runner=SimpleNamespace()), BOUND)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.34.1+cu130", "1.0.0"])
def test_a_version_that_no_bounded_cache_was_run_with_is_refused_by_name(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version_text", lambda: version)
    words = re.escape(f"--retention SinksAndWindow:4:192 needs vLLM 0.32 to 0.33 (here is {version})")
    with pytest.raises(UnsupportedEngineError, match=words):
        contract.refuse_bound(str(BOUND), ())
    request = parse(["--model=m", "--retention=SinksAndWindow", "--retention-sink-tokens=4",
                     "--retention-window-tokens=192"])[0]  # fmt: skip
    with pytest.raises(PreflightError, match=words):
        bounded.check(SimpleNamespace(ours=True), None, request, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0"])
def test_a_version_that_bounded_caches_were_run_with_serves_them(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version_text", lambda: version)
    contract.refuse_bound(str(BOUND), ())
