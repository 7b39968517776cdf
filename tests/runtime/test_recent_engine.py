"""The recent window in a real engine, whose requests share prefixes, come in chunks, are preempted and change rows.

Residual pages are full of random bytes when a block gets them. The test records each step of the engine, so that the
oracle knows which tokens each query read with residuals.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats import formats
from kvpilot_smallmodels.families import VOCABULARY, make
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama, tiny_qwen3
from kvpilot_smallmodels.oracle import Oracle
from support.judge import Judge, newest_blocks
from support.stepped_engine import Asked, Told, serve

pytestmark = pytest.mark.timeout(3600)

BLOCK, CHUNK = 16, 48


def asked(
    model: Path, dtype: str, count: int, longest: int, blocks: int, seed: int, vocabulary: int = 49152,
    answer: int = 40, **more: Any,
) -> Asked:  # fmt: skip
    """Return three rounds of random requests. Most share a prefix within their round, some with another round.

    Prompts have up to `longest` tokens, and answers up to `answer`.
    """
    rng = random.Random(seed)
    shared = [[rng.randrange(3, vocabulary) for _ in range(longest * 3 // 4)] for _ in range(2)]

    def prompt() -> list[int]:
        prefix = [] if rng.random() < 0.3 else rng.choice(shared)[: rng.randint(16, longest * 3 // 4)]
        return prefix + [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, longest - len(prefix)))]

    rounds = [[prompt() for _ in range(count // 3)] for _ in range(3)]
    tokens = [[rng.randint(8, answer) for _ in prompts] for prompts in rounds]
    options = {
        "block_size": BLOCK, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": longest + answer + 24, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8,
    }  # fmt: skip
    if model == tiny_gemma3():
        options["kv_cache_dtype_skip_layers"] = ["sliding_window"]
    return Asked(str(model), dtype, rounds, tokens, options, **more)


@pytest.mark.parametrize(
    ("model", "dtype", "count", "longest", "blocks", "answer"),
    [
        pytest.param(tiny_llama, "k4v4", 24, 160, 30, 160, id="llama-k4v4"),
        pytest.param(tiny_qwen3, "k4v2", 18, 160, 60, 40, id="qwen3-k4v2"),
        pytest.param(tiny_gemma3, "k4v4", 18, 448, 44, 40, id="gemma3-k4v4"),
    ],
)
def test_answers_equal_attention_with_a_window_after_preemption_and_prefix_hits(
    model: Callable[[], Path],
    dtype: str,
    count: int,
    longest: int,
    blocks: int,
    answer: int,
    record_property: Callable[[str, object], None],
) -> None:
    question = asked(model(), dtype, count, longest, blocks, seed=20261122, answer=answer)
    told = serve(question)
    found = Judge(question, told, Oracle(model(), dtype))
    figures = {
        "judged": found.judged, "windowed": found.windowed, "unrefined": found.unrefined, "preempted": found.preempted,
        "moved": told.moved, "cached": sum(map(sum, told.cached)), "poisoned": told.poisoned,
    }  # fmt: skip
    for name, value in figures.items():
        record_property(name, value)
        print(f"{name}: {value}")
    assert not found.wrong
    if told.block_size > BLOCK:  # Gemma's full layers have blocks of 256 tokens, and no prefix here is that long
        del figures["cached"]
    if dtype == "k4v2":  # A window takes ten pages, so that nearly all requests run alone.
        del figures["preempted"]
    assert all(figures.values())
    assert found.judged == sum(map(sum, question.tokens))
    # Show that this check can fail: without a window, or with one block less, other answers are right.
    for newest in (0, newest_blocks(question, told) - 1):
        assert len(Judge(question, told, Oracle(model(), dtype), rounds=0, newest=newest).wrong) > count // 10


def answered_with_all(count: int, longest: int, blocks: int, answer: int, seed: int) -> tuple[Asked, Told, Judge]:
    """Serve random requests with `--recent-tokens=all`, and check that every answer is right."""
    question = asked(tiny_llama(), "k4v4", count, longest, blocks, seed, answer=answer, recent=formats.ALL)
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4"))
    assert not found.wrong
    assert found.judged == sum(map(sum, question.tokens))
    return question, told, found


def test_with_all_answers_equal_attention_with_the_residuals_that_memory_had_room_for() -> None:
    question, told, found = answered_with_all(24, 160, 45, 160, seed=20261129)
    print(f"windowed {found.windowed}, unrefined {found.unrefined}, preempted {found.preempted}")
    [share] = [x.split()[1] for x in told.metrics if x.startswith("kvpilot_tokens_at_8_bits_ratio ")]
    assert 0 < float(share) <= 1
    assert min(found.windowed, found.unrefined, found.preempted, sum(map(sum, told.cached))) > 0
    floor = formats.parse("k4v4").recent_blocks(64, told.block_size)
    for newest in (0, floor):  # Show that this check can fail.
        assert len(Judge(question, told, Oracle(tiny_llama(), "k4v4"), rounds=0, newest=newest).wrong) > 8


@pytest.mark.long
def test_with_all_2000_random_requests_are_answered_right_while_blocks_lose_their_residuals() -> None:
    _, told, found = answered_with_all(2001, 96, 26, 24, seed=7)
    assert min(found.windowed, found.unrefined, sum(map(sum, told.cached))) > 10_000


@pytest.mark.parametrize(("layout", "recent"), [("BHLNC", 64), ("BHLNC", 0), ("BLHNC", 64)])
def test_answers_are_the_same_in_the_layout_with_all_layers_of_a_block_together(layout: str, recent: int) -> None:
    question = asked(tiny_llama(), "k4v4", 12, 160, 24, seed=20261122, answer=130, recent=recent, layout=layout)
    told = serve(question)
    assert told.layout == layout
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4"))
    assert not found.wrong
    assert found.judged == sum(map(sum, question.tokens))
    assert found.preempted
    assert bool(told.poisoned) == bool(recent)  # Only residual pages are poisoned.


def test_residual_pages_fit_the_block_size_that_vllm_raises_for_larger_pages(tmp_path: Path) -> None:
    model = make("gemma4-26b", tmp_path / "model")
    question = asked(model, "k4v4", 18, 160, 60, seed=20261122, vocabulary=VOCABULARY)
    question.options |= {"kv_cache_dtype_skip_layers": ["sliding_window"]}
    told = serve(question)
    # A 16-bit page is as large as several of ours, so vLLM merges ours into one block.
    assert told.block_size > BLOCK
    found = Judge(question, told, Oracle(model, "k4v4"))
    assert not found.wrong
    assert found.windowed
    assert len(Judge(question, told, Oracle(model, "k4v4"), rounds=0, newest=0).wrong) > 3


def test_a_default_window_is_cut_to_a_shorter_context_and_answers_equal_the_cut_window() -> None:
    question = asked(tiny_llama(), "k2v2", 18, 160, 400, seed=20261122)
    assert question.options["max_model_len"] == 224
    question.recent = None
    told = serve(question)
    assert newest_blocks(question, told) == 128 // BLOCK + 1
    assert not Judge(question, told, Oracle(tiny_llama(), "k2v2")).wrong
    assert told.poisoned > 0
    for other in (8, 10):
        assert len(Judge(question, told, Oracle(tiny_llama(), "k2v2"), rounds=0, newest=other).wrong) > 3


def test_the_test_would_detect_residual_pages_without_the_residuals_of_stored_tokens() -> None:
    question = asked(tiny_llama(), "k4v4", 18, 160, 60, seed=20261122, careless=True)
    told = serve(question)
    found = Judge(question, told, Oracle(tiny_llama(), "k4v4"), rounds=3)
    assert len(found.wrong) > 3


def test_a_recent_window_changes_answers_but_shortens_no_prefix_hit() -> None:
    question = asked(tiny_llama(), "k4v4", 18, 160, 400, seed=3)
    with_window = serve(question)
    question.recent = 0
    without = serve(question)
    assert without.cached == with_window.cached
    assert sum(map(sum, without.cached)) > 0
    assert without.poisoned == 0
    assert not Judge(question, without, Oracle(tiny_llama(), "k4v4")).wrong
    assert without.answers != with_window.answers


def test_answers_with_a_window_are_nearer_to_those_of_16_bits() -> None:
    question = asked(tiny_llama(), "k4v4", 18, 160, 400, seed=5)
    exact = Oracle(tiny_llama(), "auto")
    pairs = [p for round_ in question.rounds for p in round_]

    def shortfall(recent: int) -> float:
        question.recent = recent
        answers = [a for round_ in serve(question).answers for a in round_]
        return sum(sum(exact.shortfalls(*one)) for one in zip(pairs, answers, strict=True))

    assert shortfall(64) < 0.75 * shortfall(0)
