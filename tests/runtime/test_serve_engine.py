"""kvpilot-serve and our backend in real vLLM: capacity and drain."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from kvpilot_demo.models import tiny_gemma3, tiny_llama
from kvpilot_operator.observe.page import parse_page
from kvpilot_operator.state.snapshot import ModelFacts
from support.engine import engine

pytestmark = pytest.mark.timeout(900)

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
    arguments = ("--kv-cache-memory-bytes=64M", "--shutdown-timeout=60")
    with engine(tiny_llama(), "k4v4", tmp_path, *arguments) as running:
        answers: list[str] = []
        asked = threading.Thread(target=lambda: answers.append(running.complete("Once", 1500, ignore_eos=True)))
        asked.start()
        while running.metric("vllm:num_requests_running") < 1:
            pass
        page = parse_page(httpx.get(f"{running.url}/metrics", timeout=10).text)
        assert page.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
        assert (page.dtype, page.running, page.older_names) == ("k4v4", 1, ())
        assert page.process_start is not None
        assert page.totals.ttft.bounds
        assert page.totals.itl.bounds
        os.kill(running.process.pid, signal.SIGTERM)
        asked.join(120)
        assert len(answers) == 1
        assert answers[0]
        running.process.wait(60)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{running.url}/health", timeout=2)
