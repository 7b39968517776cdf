"""Weights of 8 and 4 bits with one of our KV caches: the damage is the cache's, as large as with 16-bit weights.

Such engines compute in bfloat16, where a key's codes differ slightly from the oracle's, and answers are not equal. So
the test measures how far their tokens are below the oracle's best: with `auto`, next to nothing by the dequantized
weights; with `k4v4`, as far as with weights in 16 bits, and less by the codec than without one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpilot_smallmodels.families import VOCABULARY
from kvpilot_smallmodels.families import make as make_model
from kvpilot_smallmodels.oracle import Oracle
from kvpilot_smallmodels.processor import serves_quantized
from support.engines_in_turn import Answered, Turn, serve
from support.processors import quantized_weights_by_vllm
from support.quantized_weights import METHODS, make

pytestmark = pytest.mark.timeout(1800)

DTYPES = ("k4v4", "auto")
CASES = ("none", *METHODS) if serves_quantized() else ("none",)


def asked(model: Path, dtype: str) -> Turn:
    """Return twelve random prompts, in chunks."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(8, 96))] for _ in range(12)]
    options = {"dtype": "bfloat16", "max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 8,
               "kv_cache_memory_bytes": 16 << 20, "block_size": 32}  # fmt: skip
    return Turn(str(model), dtype, [prompts], [[16] * len(prompts)], options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Turn, Answered]]:
    """Return, by method and dtype, the dequantized weights, the requests and the answers."""
    root = tmp_path_factory.mktemp("weights")
    models, plain = {"none": make_model("plain", root / "model")}, {"none": root / "model"}
    for method in CASES[1:]:
        models[method], plain[method] = root / method, root / f"{method}-read-back"
        make(method, root / "model", models[method], plain[method])
    turns = {(case, dtype): asked(models[case], dtype) for case in CASES for dtype in DTYPES}
    return {
        key: (plain[key[0]], turns[key], told) for key, told in zip(turns, serve(list(turns.values())), strict=True)
    }


def below(folder: Path, codec: str, turn: Turn, told: Answered) -> float:
    """Return by how many logits an answer's tokens are below the oracle's best, on average."""
    oracle = Oracle(folder, codec)
    found = [x for prompt, answer in zip(turn.rounds[0], told.answers[0], strict=True)
             for x in oracle.shortfalls(prompt, answer)]  # fmt: skip
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def found(served: dict[tuple[str, str], tuple[Path, Turn, Answered]]) -> dict[tuple[str, str, str], float]:
    """Return this distance by method, dtype and the oracle's codec."""
    return {(case, dtype, codec): below(*served[case, dtype][:1], codec, *served[case, dtype][1:])
            for case in CASES for dtype in DTYPES for codec in DTYPES}  # fmt: skip


@pytest.mark.parametrize("case", ["none", *(pytest.param(x, marks=quantized_weights_by_vllm) for x in METHODS)])
def test_answers_are_those_of_the_weights_and_of_the_cache_that_is_served(
    case: str, found: dict[tuple[str, str, str], float], record_property: Callable[[str, object], None]
) -> None:
    for (_, dtype, codec), value in ((key, value) for key, value in found.items() if key[0] == case):
        record_property(f"{dtype} by {codec}", value)
        print(f"{case}: {dtype} by {codec}: {value:.4f}")
    assert found[case, "auto", "auto"] < 0.1 < found[case, "auto", "k4v4"]
    assert found[case, "k4v4", "k4v4"] < 0.75 * found[case, "k4v4", "auto"]
    assert found[case, "k4v4", "auto"] < 1.6 * found["none", "k4v4", "auto"]
