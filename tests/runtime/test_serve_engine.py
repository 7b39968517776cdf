"""kvpilot-serve and our backend in real vLLM: capacity, equal answers under pressure, drain."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvpilot_demo.models import tiny_llama
from support.engine import Engine, engine

pytestmark = pytest.mark.timeout(900)

# Without float32, sums in another order (a batch of eight, not of one) flip near-ties of the random model.
FLOAT32 = "--dtype=float32"
# Chunks that read themselves back from their pages: answers then do not depend on how a prompt was cut, cached or
# recomputed, and can be compared to the letter.
FROM_PAGES = {"KVPILOT_PREFILL_FROM_PAGES": "1"}
PROMPTS = [[100 + 7 * i + j % 50 for j in range(90 + 37 * (i % 5))] for i in range(24)]
SHARED = [[200 + j % 60 for j in range(256)] + [1000 + i] * 5 for i in range(8)]


def greedy(running: Engine, prompts: list[list[int]], at_once: int) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: running.complete(prompt, 48, ignore_eos=True), prompts))


def test_the_same_memory_holds_at_least_3_7_times_the_tokens(tmp_path: Path) -> None:
    capacity = {}
    for dtype in ("auto", "k4v4"):
        with engine(tiny_llama(), dtype, tmp_path, "--kv-cache-memory-bytes=64M") as running:
            labels = running.cache_config()
            assert labels["cache_dtype"] == dtype
            capacity[dtype] = int(labels["kv_cache_size_tokens"])
    assert capacity["k4v4"] >= 3.7 * capacity["auto"]


def test_preemption_prefix_hits_and_chunked_prefill_do_not_change_a_letter(tmp_path: Path) -> None:
    roomy = ("--kv-cache-memory-bytes=64M", "--max-num-seqs=1", "--no-enable-prefix-caching", FLOAT32)
    with engine(tiny_llama(), "k4v4", tmp_path, *roomy, env=FROM_PAGES) as running:
        alone = greedy(running, [*PROMPTS, *SHARED], at_once=1)
    tight = (
        "--kv-cache-memory-bytes=64M",
        "--num-gpu-blocks-override=9",
        "--max-model-len=512",
        "--max-num-seqs=8",
        "--max-num-batched-tokens=64",
        FLOAT32,
    )
    with engine(tiny_llama(), "k4v4", tmp_path, *tight, env=FROM_PAGES) as running:
        crowded = greedy(running, [*PROMPTS, *SHARED], at_once=8)
        assert running.metric("vllm:num_preemptions_total") > 0
        assert running.metric("vllm:prefix_cache_hits_total") > 0
    different = [i for i, (a, b) in enumerate(zip(alone, crowded, strict=True)) if a != b]
    assert not different


def test_a_request_in_flight_is_finished_after_sigterm(tmp_path: Path) -> None:
    arguments = ("--kv-cache-memory-bytes=64M", "--shutdown-timeout=60")
    with engine(tiny_llama(), "k4v4", tmp_path, *arguments) as running:
        answers: list[str] = []
        asked = threading.Thread(target=lambda: answers.append(running.complete("Once", 1500, ignore_eos=True)))
        asked.start()
        while running.metric("vllm:num_requests_running") < 1:
            pass
        os.kill(running.process.pid, signal.SIGTERM)
        asked.join(120)
        assert len(answers) == 1
        assert answers[0]
        running.process.wait(60)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{running.url}/health", timeout=2)
