"""kvpilot-serve and our backend in real vLLM: capacity and drain."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvpilot_demo.models import tiny_gemma3, tiny_llama
from kvpilot_operator.observe.page import PodMetrics, parse_page
from kvpilot_operator.state.snapshot import ModelFacts
from support.engine import HANGS, Engine, engine

pytestmark = pytest.mark.timeout(1800)

# Window and chunk are small, so that what a long request needs is its full layer's share.
LONG = ("--kv-cache-memory-bytes=64M", "--max-model-len=4096", "--max-num-batched-tokens=64", "--max-num-seqs=8")


def capacity(model: Path, dtype: str, folder: Path, *arguments: str) -> int:
    """Tokens that the engine says its KV cache holds."""
    with engine(model, dtype, folder, *arguments) as running:
        labels = running.cache_config()
        assert labels["cache_dtype"] == dtype
        return int(labels["kv_cache_size_tokens"])


def test_the_same_memory_holds_at_least_3_7_times_the_tokens(tmp_path: Path) -> None:
    ours, stock = (capacity(tiny_llama(), d, tmp_path, "--kv-cache-memory-bytes=64M") for d in ("k4v4", "auto"))
    assert ours >= 3.7 * stock


def test_16_bit_windows_share_the_pool_and_leave_most_of_the_gain(tmp_path: Path) -> None:
    ours = capacity(tiny_gemma3(), "k4v4", tmp_path, *LONG)
    assert ours >= 2.5 * capacity(tiny_gemma3(), "auto", tmp_path, *LONG)
    # Nobody named the layers to skip: kvpilot-serve did.
    [log] = tmp_path.glob("k4v4-*.log")
    assert "'kv_cache_dtype_skip_layers': ['sliding_window']" in log.read_text()


def test_a_request_in_flight_is_finished_after_sigterm(tmp_path: Path) -> None:
    # Its tokens take seconds: what happens between two looks takes milliseconds.
    tokens = 4000
    arguments = ("--kv-cache-memory-bytes=64M", "--max-model-len=4096", f"--shutdown-timeout={HANGS}")
    with engine(tiny_llama(), "k4v4", tmp_path, *arguments) as running, ThreadPoolExecutor(1) as user:
        answer = user.submit(running.tokens, [7] * 8, tokens)
        page = running_page(running, answer)
        assert page.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
        assert (page.dtype, page.running, page.older_names) == ("k4v4", 1, ())
        assert page.process_start is not None
        assert page.totals.ttft.bounds
        assert page.totals.itl.bounds
        os.kill(running.process.pid, signal.SIGTERM)
        assert not answer.done(), "the request ended before it could be in flight: ask for more tokens"
        assert len(answer.result(HANGS)) == tokens
        running.process.wait(HANGS)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{running.url}/health", timeout=2)


def running_page(running: Engine, answer: Future[list[int]]) -> PodMetrics:
    """The first page of the engine that shows the request running: whatever is asserted is asserted of this one."""
    while not answer.done():
        page = parse_page(httpx.get(f"{running.url}/metrics", timeout=HANGS).text)
        if page.running:
            return page
    raise AssertionError(f"the request ended before a page showed it: {answer.result()[:8]}")
