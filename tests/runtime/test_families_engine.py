"""Model families with different kinds of attention in a real engine: greedy answers match the oracle.

Requests are sent together and computed in chunks, and half of them share a prefix. The oracle
(`kvpilot_smallmodels.oracle`) computes each request alone in plain transformers. test_random_requests.py does the same
with preemptions. One process serves all models, one after another.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpilot_smallmodels.families import FAMILIES, VOCABULARY, make
from kvpilot_smallmodels.oracle import SLACK, Oracle
from support.engines_in_turn import Answered, Turn, serve

pytestmark = pytest.mark.timeout(1800)

CHUNK = 48
LONGEST = 128
COUNT = 6
"""Number of requests of a round."""
EXACT = (
    "shared-kv-head", "gemma2", "gpt-oss", "gemma3n", "gemma4", "gemma4-26b", "llama-4", "granite-4", "qwen2",
    "qwen3-moe", "phi3", "stablelm", "heads-of-192",
)  # fmt: skip
"""Families whose answers in float32 with `auto` equal transformers' on a CPU, so that they depend only on the codec."""

PREEMPTED = "llama-4, preempted"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in EXACT},
    # Full layers have pages of 256 tokens here, and only prefixes that fill a page are found.
    "gemma4": ("gemma4", {"longest": 360}),
    # No other test preempts chunked attention.
    PREEMPTED: ("llama-4", {"longest": 112, "answers": (30, 48), "count": 10}),
}
"""Family and requests of each case."""


def turn(
    model: Path, name: str, blocks: int, longest: int = LONGEST, answers: tuple[int, int] = (4, 12), count: int = COUNT
) -> Turn:  # fmt: skip
    """Return two rounds of random requests. Half of them begin like a request of the first round."""
    rng = random.Random(20261122)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(longest * 3 // 4)]

    def prompt() -> list[int]:
        prefix = [] if rng.random() < 0.5 else shared
        return prefix + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest - len(prefix)))]

    rounds = [[prompt() for _ in range(count)] for _ in range(2)]
    tokens = [[rng.randint(*answers) for _ in range(count)] for _ in range(2)]
    options: dict[str, Any] = {
        "dtype": "float32", "block_size": 16, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": max(LONGEST, longest) + 32, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8,
    }  # fmt: skip
    if FAMILIES[name].skip:
        options["kv_cache_dtype_skip_layers"] = list(FAMILIES[name].skip)
    return Turn(str(model), "k4v4", rounds, tokens, options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Turn, Answered]]:
    """Return the engines' answers, by case."""
    turns = [turn(make(name, tmp_path_factory.mktemp(name)), name, 40, **requests) for name, requests in CASES.values()]
    return dict(zip(CASES, zip(turns, serve(turns), strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_each_familys_answers_equal_those_of_the_codec(
    name: str, served: dict[str, tuple[Turn, Answered]], record_property: Callable[[str, object], None]
) -> None:
    asked, told = served[name]
    requests = [
        (prompt, answer)
        for prompts, answers in zip(asked.rounds, told.answers, strict=True)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    oracle = Oracle(Path(asked.model), "k4v4")
    below = [max(oracle.shortfalls(prompt, answer)) for prompt, answer in requests]
    plain = Oracle(Path(asked.model), "auto")
    damaged = sum(max(plain.shortfalls(prompt, answer)) > SLACK for prompt, answer in requests)
    figures = {"worst": max(below), "not_equal": sum(x > SLACK for x in below), "damaged": damaged,
               "preempted": told.preempted, "cached": sum(map(sum, told.cached)), "groups": told.groups}  # fmt: skip
    for key, value in figures.items():
        record_property(key, value)
        print(f"{key}: {value}")
    assert [len(answer) for _, answer in requests] == [n for round_ in asked.tokens for n in round_]
    wrong = [
        i
        for i, (prompt, answer) in enumerate(requests)
        # A token that is not the oracle's best one is right only if rounding explains it.
        if below[i] > SLACK and not oracle.sound(prompt, answer, rounds=20)
    ]
    assert not wrong, [(i, below[i]) for i in wrong]
    assert all(used >= 0.9 * page for _, _, used, page in told.groups)  # pages of all kinds have the same size
    assert told.preempted or name != PREEMPTED
    assert figures["cached"] or name != "gemma4"
    assert damaged > len(requests) // 2  # the check can fail: a 16-bit cache answers differently
