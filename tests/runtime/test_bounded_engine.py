"""A real engine whose cache keeps sinks and a window: answers match attention with that mask, and pages are freed.

The pool is smaller than one stream. Prompts come in chunks, requests are preempted and restart, and freed pages are
overwritten at once.
"""

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from bounded_engine import Asked, Told, serve

from kvpilot_runtime.config.retention import SinksAndWindow
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.engines_in_turn import refused
from support.forked_serve import engine

pytestmark = pytest.mark.timeout(3600)

BOUND = SinksAndWindow(4, 64)
PAGE = {"auto": 32, "k4v4": 16}
BLOCKS = {"auto": 12, "k4v4": 20}


def seen(page: int) -> Callable[[int], torch.Tensor]:
    """Return the mask of docs/retention.md."""

    def mask(length: int) -> torch.Tensor:
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        return (key < -(-BOUND.sinks // page) * page) | (key >= (query - BOUND.window + 1) // page * page)

    return mask


def asked(dtype: str, **more: object) -> Asked:
    """Return different requests that share a pool which is too small, and then a prompt and its continuation."""
    rng = random.Random(20261122)
    prompts = [[rng.randrange(3, 49152) for _ in range(length)] for length in (150, 20, 260, 7, 90, 12, 200)]
    rounds = [prompts[:-1], [prompts[-1]], [[*prompts[-1], *prompts[1]], prompts[0]]]
    options = {
        "max_model_len": 640, "block_size": PAGE[dtype], "num_gpu_blocks_override": BLOCKS[dtype],
        "kv_cache_memory_bytes": 64 * 2**20, "max_num_batched_tokens": 48, "max_num_seqs": 8,
    }  # fmt: skip
    tokens = [[180, 150, 60, 400, 120, 300], [4], [90, 20]]
    return Asked(str(tiny_llama()), dtype, str(BOUND), rounds, tokens, options, **more)  # type: ignore[arg-type]


def unsound(what: Asked, told: Told, oracle: Oracle) -> list[tuple[int, float]]:
    """Return the requests whose answer is not the best by attention with the mask, apart from rounding."""
    pairs = list(zip(chain(*what.rounds), chain(*told.answers), strict=True))
    below = [max(oracle.shortfalls(prompt, answer)) for prompt, answer in pairs]
    suspects = [i for i, most in enumerate(below) if not most <= SLACK]
    return [(i, below[i]) for i in suspects if not oracle.sound(*pairs[i], rounds=10)]


@pytest.mark.parametrize("dtype", ["auto", "k4v4"])
def test_answers_are_those_of_sinks_and_window_whatever_happened_to_a_request(
    dtype: str, record_property: Callable[[str, object], None]
) -> None:
    what = asked(dtype)
    told = serve(what)
    page = PAGE[dtype]
    for name in ("freed", "held", "chunks", "preempted", "blocks", "tokens_of_cache", "concurrency", "usage", "cached"):
        record_property(name, getattr(told, name))
        print(f"{name}: {getattr(told, name)}")
    assert [[len(a) for a in one] for one in told.answers] == what.tokens
    assert told.freed > 20
    assert told.preempted > 0
    assert told.chunks > 3
    assert told.cached[2][0] >= 192 - page  # a prefix hit, although its middle was freed long ago
    # A request holds the sinks' page, the window and one step, at any alignment. The longest stream has 407 tokens.
    assert told.held <= 1 + -(-(BOUND.window - 1 + 48) // page) + 1
    assert told.blocks * page < 407
    # vLLM's capacity counts the kept tokens of requests of 640 tokens.
    assert told.concurrency == pytest.approx(told.blocks / (1 + -(-(BOUND.window - 1 + 48) // page) + 1), rel=0.1)
    bound = f'page_tokens="{page}",sink_tokens="4",window_tokens="64"'
    assert f"kvpilot_retention_info{{{bound}}} 1.0" in told.metrics
    off = 'kvpilot_recent_window_info{dtype="k4v4",reason="BoundedCache",tokens="0"} 1.0'
    assert (off in told.metrics) == (dtype == "k4v4")
    assert not unsound(what, told, Oracle(tiny_llama(), dtype, seen=seen(page)))

    # The check can fail: answers from an unbounded cache differ.
    whole = Oracle(tiny_llama(), dtype)
    pairs = zip(what.rounds[0], told.answers[0], strict=True)
    assert sum(max(whole.shortfalls(prompt, answer)) > SLACK for prompt, answer in pairs) >= 4


def test_a_freed_page_that_was_read_would_show() -> None:
    what = asked("k4v4", spoil_sinks=True)
    what.rounds, what.tokens = what.rounds[:1], [[24] * len(what.rounds[0])]  # one round shows the error
    assert len(unsound(what, serve(what), Oracle(tiny_llama(), "k4v4", seen=seen(16)))) >= 4


def test_kvpilot_serve_serves_a_stream_that_its_cache_could_not_hold(tmp_path: Path) -> None:
    """The operator always names the sliding-window layers, too."""
    options = [
        "--retention=4:64", "--block-size=16",
        "--num-gpu-blocks-override=20", "--kv-cache-memory-bytes=64M", "--max-num-batched-tokens=64", "--dtype=float32",
        "--kv-cache-dtype-skip-layers=sliding_window",
    ]  # fmt: skip
    prompt = list(range(100, 130))
    exact = {"KVPILOT_PREFILL_FROM_PAGES": "1", "KVPILOT_CALIBRATION": "off"}
    with engine(tiny_llama(), "k4v4", tmp_path, *options, env=exact) as running:
        answer = running.tokens(prompt, 500)
        capacity = int(running.cache_config()["kv_cache_size_tokens"])
        page = running.page()
    assert len(answer) == 500 > 20 * 16
    assert capacity > 2048  # the pool has room for 320 tokens, and streams have 2,048
    assert 'sink_tokens="4",window_tokens="64"' in page
    assert Oracle(tiny_llama(), "k4v4", seen=seen(16)).sound(prompt, answer, rounds=10)


def test_an_engine_that_is_started_without_kvpilot_serve_refuses_a_model_with_windows() -> None:
    log = refused(tiny_gemma3(), {"KVPILOT_RETENTION": "4:64"}, dtype="auto")
    assert "a sliding-window layer (model.layers.0.self_attn.attn) is not supported with KVPILOT_RETENTION" in log
