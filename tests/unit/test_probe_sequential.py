"""Error rates of the sequential test, by simulation with fixed seeds, from measured damage and from heavier tails."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_probes.sequential import FALSE_ALARM, HEALTHY, MIN_PROMPTS, MISS, Allowed, Answer, Seen, decide

BUCKETS = tuple(f"b{i}" for i in range(8))
LIMIT = 0.020
LIMITS = Allowed(kl=LIMIT, disagreement=0.03)
MEASURED = json.loads(Path("docs/benchmarks/gate-prompts.json").read_text())["kl_millinats"]
Draw = Callable[[Random], float]


def exponential(mean: float) -> Draw:
    return lambda random: random.expovariate(1 / mean)


def lognormal(mean: float, spread: float) -> Draw:
    """Return a random log-normal damage. Its standard deviation is `spread` times its mean."""
    variance = math.log1p(spread * spread)
    return lambda random: mean * math.exp(random.gauss(-variance / 2, math.sqrt(variance)))


def again(dtype: str, limit: float = LIMIT) -> Draw:
    """Return a draw from the measured prompts of a dtype, scaled so that damage `limit` equals the test's limit."""
    values = [value / 1000 * LIMIT / limit for value in MEASURED[dtype]]
    return lambda random: random.choice(values)


def canaries(many: int, draws: Sequence[Draw], prompts: int, disagreement: float = 0.02) -> Counter[tuple[Answer, str]]:
    """Judge `many` canaries with `prompts` prompts in each bucket. Return the counts of (answer, failed bucket)."""
    random, found = Random(41), Counter[tuple[Answer, str]]()
    shares = [sum(random.random() < disagreement for _ in range(31)) / 31 for _ in range(10_000)]
    for _ in range(many):
        seen = [
            Seen(bucket, draw(random), random.choice(shares))
            for _ in range(prompts)
            for bucket, draw in zip(BUCKETS, draws, strict=True)
        ]
        outcome = decide(seen, BUCKETS, LIMITS, ended=True)
        found[outcome.answer, outcome.failed or ""] += 1
    return found


def share(found: Counter[tuple[Answer, str]], answer: Answer, bucket: str | None = None) -> float:
    return sum(n for (a, b), n in found.items() if a == answer and bucket in (None, b)) / found.total()


@pytest.mark.parametrize(
    "draw",
    [again("auto"), again("k4v4"), again("fp8", 0.100), lognormal(0.005, 1.5)],
    ids=["auto", "k4v4", "fp8 with a limit that suits it", "log-normal"],
)
def test_ten_thousand_healthy_canaries_hardly_ever_fail_and_nearly_all_pass(draw: Draw) -> None:
    found = canaries(10_000, [draw] * 8, 5)
    assert share(found, Answer.FAILED) <= FALSE_ALARM
    assert share(found, Answer.PASSED) > 0.99


@pytest.mark.parametrize("draw", [exponential(HEALTHY * LIMIT), lognormal(HEALTHY * LIMIT, 1.0)], ids=["exp", "log"])
def test_canaries_at_the_edge_of_healthy_fail_no_more_often_than_stated(draw: Draw) -> None:
    assert share(canaries(2_000, [draw] * 8, 24, disagreement=0.03), Answer.FAILED) <= FALSE_ALARM


@pytest.mark.parametrize("draw", [exponential(0.025), lognormal(0.025, 1.0)], ids=["exponential", "log-normal"])
def test_a_bucket_with_20_millinats_more_than_k4v4_is_found_and_named(draw: Draw) -> None:
    found = canaries(400, [again("k4v4")] * 5 + [draw] + [again("k4v4")] * 2, 64)
    assert share(found, Answer.FAILED, "b5") >= 1 - MISS


def test_a_bucket_at_the_limit_is_seldom_called_sound_and_seldom_lets_a_canary_pass() -> None:
    random, sound = Random(7), 0
    for _ in range(1_000):
        seen = [Seen("b0", exponential(LIMIT)(random), 0.0) for _ in range(30)]
        # Look after each prompt: a run may stop at any of them.
        sound += any("b0" in decide(seen[:n], ["b0"], LIMITS).sound for n in range(1, 31))
    assert sound <= 1_000 * MISS


@pytest.mark.parametrize(("kl", "most"), [(0.0, MIN_PROMPTS), (0.005, 11), (0.100, 5), (1.0, 1)])
def test_larger_damage_needs_fewer_prompts_for_a_verdict(kl: float, most: int) -> None:
    answers = [decide([Seen("b", kl, 0.0)] * n, ["b"], LIMITS).answer for n in range(most + 1)]
    assert answers[-2:] == [Answer.GO_ON, Answer.PASSED if kl < LIMIT else Answer.FAILED]


def test_disagreement_without_other_damage_fails_a_canary() -> None:
    assert decide([Seen("b", 0.0, 0.30)] * 6, ["b"], LIMITS).answer == Answer.FAILED


def test_garbage_in_one_prompt_fails_a_bucket_with_any_number_of_sound_ones() -> None:
    seen = [Seen("residue", 0.0, 0.0)] * 60
    outcome = decide([*seen, Seen("residue", 1.2, 0.0)], ["general", "residue"], LIMITS, ended=True)
    assert (outcome.answer, outcome.failed) == (Answer.FAILED, "residue")


def test_a_bucket_with_few_prompts_stays_open_and_is_reported() -> None:
    seen = [Seen("a", 0.001, 0.0)] * 12 + [Seen("b", 0.001, 0.0)] * 2
    outcome = decide(seen, ["a", "b", "c"], LIMITS, ended=True)
    assert outcome == (Answer.PASSED, None, ("a",), ("b", "c"))
    assert decide(seen, ["a", "b", "c"], LIMITS).answer == Answer.GO_ON


def test_a_doubtful_bucket_of_few_prompts_prevents_a_pass() -> None:
    seen = [Seen("a", 0.001, 0.0)] * 20 + [Seen("b", 0.060, 0.0)] * 3
    assert decide(seen[:-1], ["a", "b"], LIMITS, ended=True).answer == Answer.PASSED
    assert decide(seen, ["a", "b"], LIMITS, ended=True).answer == Answer.GO_ON


damage = st.lists(st.builds(Seen, st.sampled_from(BUCKETS[:3]), st.floats(0, 30), st.floats(0, 1)), max_size=40)


@given(damage, damage)
def test_a_test_that_has_failed_a_canary_never_passes_it_later(first: list[Seen], second: list[Seen]) -> None:
    before = decide(first, BUCKETS[:3], LIMITS)
    after = decide([*first, *second], BUCKETS[:3], LIMITS)
    assert before.answer != Answer.FAILED or after == before


@given(damage, st.floats(1, 100))
def test_more_damage_never_turns_a_failure_into_a_pass(seen: list[Seen], factor: float) -> None:
    worse = [one._replace(kl=one.kl * factor) for one in seen]
    answers = [decide(s, BUCKETS[:3], LIMITS, ended=True).answer for s in (seen, worse)]
    assert answers[0] != Answer.FAILED or answers[1] == Answer.FAILED


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_expected_factor_of_a_bet_is_one_if_the_mean_is_at_the_edge(values: list[float]) -> None:
    """Scale arbitrary values to this mean, and average the factors of the bet. Only the mean matters."""
    mean = sum(values) / len(values)
    if mean > 1e-6:
        assert sum((1 + value / mean) / 2 for value in values) / len(values) == pytest.approx(1)
