"""Random requests through a real engine whose cache is far too small for them, compared with an oracle without a cache.

The engine preempts requests, finds prefixes in its cache and cuts prompts into chunks. The oracle
(`kvpilot_smallmodels.oracle`) computes each request alone in plain transformers.
"""

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpilot_localcluster.engines.real import Engine
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama, tiny_qwen3
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.engines_in_turn import Answered, Turn, serve
from support.forked_serve import engine

pytestmark = pytest.mark.timeout(3600)

CHUNK = 48
# Use float32, no factors, no recent window (see test_recent_engine.py), and prompts that read quantized pages. Answers
# then depend only on the codec.
EXACT = ("--dtype=float32", f"--max-num-batched-tokens={CHUNK}", "--max-num-seqs=16", "--recent-tokens=0")
FROM_PAGES = {"KVPILOT_PREFILL_FROM_PAGES": "1", "KVPILOT_CALIBRATION": "off"}


class Request:
    """Request: a prompt of up to `longest` tokens that may share a prefix with others, and the length of its answer."""

    def __init__(self, rng: random.Random, shared: list[int], longest: int) -> None:
        self.alone = rng.random() < 0.5
        # Gemma's two kinds of layers share pages. So a block of a full layer has 256 tokens, and prefixes must be as
        # long.
        prefix = [] if self.alone else shared[: rng.randint(256 if longest > 256 else 16, len(shared))]
        tail = rng.randint(0 if prefix else 1, rng.choice([16, longest - len(prefix)]))
        self.prompt = prefix + [rng.randrange(3, 49152) for _ in range(tail)]
        self.tokens = rng.randint(1, 24)
        self.answer: list[int] = []


def drawn(count: int, longest: int, seed: int) -> list[Request]:
    """Return `count` random requests. Each group of 40 shares a prefix, so that some of them find it in the cache."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, 49152) for _ in range(longest * 3 // 4)] for _ in range(count // 40 + 1)]
    return [Request(rng, shared[i // 40], longest) for i in range(count)]


def served(running: Engine, count: int, longest: int, seed: int) -> list[Request]:
    """Send `count` random requests, 24 at a time, and return them with their answers."""
    requests = drawn(count, longest, seed)

    def ask(request: Request) -> None:
        request.answer = running.tokens(request.prompt, request.tokens)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, requests))
    return requests


def served_in_turn(model: Path, count: int, longest: int, blocks: int, seed: int) -> tuple[list[Request], Answered]:
    """Answer the same requests in an engine in which all of them wait from the start."""
    requests = drawn(count, longest, seed)
    options: dict[str, Any] = {
        "dtype": "float32", "max_num_batched_tokens": CHUNK, "max_num_seqs": 16, "block_size": 16,
        "num_gpu_blocks_override": blocks, "max_model_len": longest + 32, "kv_cache_memory_bytes": 64 << 20,
    }  # fmt: skip
    if model == tiny_gemma3():
        options["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    turn = Turn(str(model), "k4v4", [[r.prompt for r in requests]], [[r.tokens for r in requests]], options)
    (told,) = serve([turn])
    for request, answer in zip(requests, told.answers[0], strict=True):
        request.answer = answer
    return requests, told


@pytest.mark.parametrize(
    ("model", "count", "longest", "blocks"),
    [
        pytest.param(tiny_llama, 80, 128, 20, id="llama"),
        pytest.param(tiny_qwen3, 200, 128, 20, id="qwen3", marks=pytest.mark.long),
        pytest.param(tiny_gemma3, 60, 448, 44, id="gemma3"),
    ],
)
def test_paging_changes_no_token(
    model: Callable[[], Path],
    count: int,
    longest: int,
    blocks: int,
    record_property: Callable[[str, object], None],
) -> None:
    requests, told = served_in_turn(model(), count, longest, blocks, seed=20261121)
    figures = {"preemptions": told.preempted, "prefix_hit_tokens": sum(told.cached[0])}
    judge(model(), requests, figures, record_property)


@pytest.mark.long
@pytest.mark.parametrize("offloaded", [False, True], ids=["llama-2000", "llama-2000-offloaded"])
def test_paging_changes_no_token_of_requests_that_come_and_go(
    offloaded: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    small = ("--block-size=16", "--num-gpu-blocks-override=20", "--max-model-len=160", "--kv-cache-memory-bytes=64M")
    arguments = (*EXACT, *small, *(["--kv-offloading-size=0.125"] * offloaded))
    with engine(tiny_llama(), "k4v4", tmp_path, *arguments, env=FROM_PAGES) as running:
        began = time.monotonic()
        requests = served(running, 2000, 128, seed=20261121)
        record_property("seconds", round(time.monotonic() - began, 1))
        figures = {
            "preemptions": running.metric("vllm:num_preemptions_total"),
            "prefix_hit_tokens": running.metric("vllm:prefix_cache_hits_total"),
        }
        loaded = running.metric("vllm:external_prefix_cache_hits_total")
    record_property("loaded_tokens", loaded)
    assert (loaded > 0) == offloaded
    judge(tiny_llama(), requests, figures, record_property)


def judge(
    model: Path, requests: list[Request], figures: dict[str, float], record_property: Callable[[str, object], None]
) -> None:
    """Check that all answers match the oracle, and that preemptions, prefix hits and chunks occurred."""
    assert [len(r.answer) for r in requests] == [r.tokens for r in requests]
    oracle = Oracle(model, "k4v4")
    below = [max(oracle.shortfalls(r.prompt, r.answer)) for r in requests]
    suspects = [i for i, most in enumerate(below) if most > SLACK]
    told = {
        **figures,
        "tokens": sum(len(r.answer) for r in requests),
        # Half of the prompts share no prefix, so the long ones among them must come in chunks.
        "certainly_chunked": sum(r.alone and len(r.prompt) > CHUNK for r in requests),
        "worst": max(below),
        "not_equal": len(suspects),
    }
    for name, value in told.items():
        record_property(name, value)
        print(f"{name}: {value}")
    # One occurrence of each event is enough, because their number depends on the speed of the machine.
    assert all(figures.values())
    assert told["certainly_chunked"] > len(requests) / 10
    # Rounding may change any number of answers, so judge each one alone. A broken engine fails in the first three.
    unsound = (i for i in suspects if not oracle.sound(requests[i].prompt, requests[i].answer))
    wrong = list(itertools.islice(unsound, 3))
    assert not wrong, [(i, below[i]) for i in wrong]

    # Control: a wrong oracle must disagree. An oracle with a 16-bit cache disagrees with 81 to 98 of 100 answers,
    # depending on the model. One that misreads a block disagrees with 179 of 180, by more than rounding explains.
    plain = Oracle(model, "auto")
    assert sum(max(plain.shortfalls(r.prompt, r.answer)) > SLACK for r in requests[:30]) > 15
    long = sorted((r for r in requests if len(r.prompt) > CHUNK), key=lambda r: len(r.prompt))[:6]
    misread = [oracle.sound(r.prompt, r.answer, misread=len(r.prompt) // 2, rounds=10) for r in long]
    assert sum(misread) <= 1
