"""In a real engine, greedy answers with speculative decoding equal those without it, whichever drafts are rejected."""

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats import formats
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.judge import Judge, newest_blocks
from support.stepped_engine import Asked, Told, serve

pytestmark = pytest.mark.timeout(3600)


def asked(model: Path, dtype: str, count: int, blocks: int, longest: int = 120, **more: Any) -> Asked:
    """Return two rounds of random requests, made of few repeated words. Some drafts are right, and some are wrong.

    Most prompts share a prefix with others of either round.
    """
    rng = random.Random(20261122)
    words = [[rng.randrange(3, 49152) for _ in range(rng.randint(2, 5))] for _ in range(12)]

    def text(length: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            found += rng.choice(words)
        return found[:length]

    shared = [text(longest * 3 // 4) for _ in range(2)]

    def prompt() -> list[int]:
        prefix = [] if rng.random() < 0.3 else rng.choice(shared)[: rng.randint(16, longest * 3 // 4)]
        return prefix + text(rng.randint(1, longest - len(prefix)))

    rounds = [[prompt() for _ in range(count // 2)] for _ in range(2)]
    tokens = [[rng.randint(12, 48) for _ in prompts] for prompts in rounds]
    options: dict[str, Any] = {
        "block_size": 16, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": longest + 64, "max_num_batched_tokens": 64, "max_num_seqs": 8,
    }  # fmt: skip
    if model == tiny_gemma3():
        options["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    return Asked(str(model), dtype, rounds, tokens, options, **more)


def figures(question: Asked, told: Told) -> dict[str, int]:
    """Count preemptions, prefix hits, drafts and similar events."""
    begun = sum(step["anew"] for step in told.steps)
    return {
        "drafted": told.drafted, "accepted": told.accepted, "refused": told.drafted - told.accepted,
        "preempted": begun - sum(map(len, question.rounds)), "cached": sum(map(sum, told.cached)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "dtype", "count", "blocks"),
    [
        *(
            pytest.param(
                tiny_llama, dtype, 24, 24, id=f"llama-{dtype}", marks=[] if dtype == "k4v4" else pytest.mark.long
            )
            for dtype in formats.own_names()
        ),
        *(
            pytest.param(tiny_llama, dtype, 2000, 24, id=f"llama-{dtype}-2000", marks=pytest.mark.long)
            for dtype in formats.own_names()
        ),
    ],
)
def test_greedy_answers_are_those_without_speculation(
    model: Callable[[], Path], dtype: str, count: int, blocks: int, record_property: Callable[[str, object], None]
) -> None:
    # Without a window, and if prompts read quantized pages, an answer depends only on its tokens.
    question = asked(model(), dtype, count, blocks, recent=0)
    plain = serve(question)
    assert plain.drafted == 0
    question.drafts, question.right = 3, plain.answers
    told = serve(question)
    found = figures(question, told)
    for name, value in found.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert min(found.values()) > 0
    assert len(told.steps) < len(plain.steps)
    pairs = zip(*(chain(*of) for of in (question.rounds, told.answers, plain.answers)), strict=True)
    other = [(prompt, answer) for prompt, answer, wanted in pairs if answer != wanted]
    record_property("not_equal", len(other))
    print(f"not_equal: {len(other)}")
    # Rounding may change the choice between two equally good tokens. The oracle checks that this explains the answer.
    oracle = Oracle(model(), dtype)
    assert all(max(oracle.shortfalls(*each)) <= SLACK or oracle.sound(*each, rounds=20) for each in other)
    assert len(other) < count // 2


def test_suffix_decoding_does_not_change_answers(record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("arctic_inference", reason="suffix decoding needs the package arctic-inference")
    question = asked(tiny_llama(), "k4v4", 16, 60, recent=0)
    # Repeat the requests, because their answers are now in the suffix trees.
    question.rounds, question.tokens = [question.rounds[0]] * 2, [question.tokens[0]] * 2
    plain = serve(question)
    question.drafts, question.method = 6, "suffix"
    told = serve(question)
    for name, value in figures(question, told).items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert told.accepted > 100
    assert told.answers == plain.answers


@pytest.mark.parametrize(
    ("model", "dtype", "drafts", "longest", "count", "blocks"),
    [
        pytest.param(tiny_llama, "k4v4", 3, 120, 30, 36, id="llama-k4v4"),
        pytest.param(tiny_llama, "k4v2", 7, 120, 30, 44, id="llama-k4v2", marks=pytest.mark.long),
        pytest.param(tiny_gemma3, "k4v4", 4, 300, 16, 52, id="gemma3-k4v4"),
    ],
)
def test_with_drafts_a_window_counts_from_the_last_draft_and_rejected_drafts_are_never_read(
    model: Callable[[], Path], dtype: str, drafts: int, longest: int, count: int, blocks: int,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    question = asked(model(), dtype, count, blocks, longest)
    question.right = serve(question).answers
    question.drafts = drafts
    told = serve(question)
    found = Judge(question, told, Oracle(model(), dtype))
    seen = {**figures(question, told), "judged": found.judged, "windowed": found.windowed, "poisoned": told.poisoned}
    for name, value in seen.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert not found.wrong
    del seen["preempted"]  # Running requests take the residual pages of others first.
    if told.block_size > 16:  # Gemma's full layers have blocks of 256 tokens, and no prefix here is that long
        del seen["cached"]
    assert min(seen.values()) > 0
    # Control: a window with one block less gives other answers.
    fewer = newest_blocks(question, told) - 1
    assert Judge(question, told, Oracle(model(), dtype), rounds=0, newest=fewer).wrong
