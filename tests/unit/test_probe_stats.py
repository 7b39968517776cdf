"""Properties of the statistics by which a probe measures damage."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_probes.stats import (
    MAX_KL,
    Answers,
    Compared,
    Logprobs,
    compare,
    impossible,
    kl_nats,
    percentile,
    summarise,
    worst_prompt,
)

VOCABULARY = 40
TOP_K = 20

weights = st.lists(st.floats(1e-6, 1.0), min_size=VOCABULARY, max_size=VOCABULARY)


def normalised(values: list[float]) -> list[float]:
    total = math.fsum(values)
    return [v / total for v in values]


def top(distribution: list[float], k: int = TOP_K) -> dict[int, float]:
    """Return an engine's report of a distribution: the log-probabilities of its k most likely tokens."""
    best = sorted(range(len(distribution)), key=lambda t: -distribution[t])[:k]
    return {t: math.log(distribution[t]) for t in best}


def full_kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


compared = st.builds(
    Compared,
    prompt=st.integers(0, 5),
    kl=st.floats(0, MAX_KL),
    agrees=st.booleans(),
)


@given(weights, weights)
def test_damage_is_between_0_and_the_kl_over_the_whole_vocabulary(a: list[float], b: list[float]) -> None:
    p, q = normalised(a), normalised(b)
    damage = kl_nats(top(p), top(q))
    assert 0 <= damage <= full_kl(p, q) + 1e-4


@given(weights)
def test_two_equal_answers_have_no_damage(a: list[float]) -> None:
    assert kl_nats(top(normalised(a)), top(normalised(a))) == 0


@given(weights, weights, st.floats(0, 1), st.floats(0, 1))
def test_damage_grows_with_the_share_of_another_answer(a: list[float], b: list[float], s: float, t: float) -> None:
    """KL(p || (1 - s) p + s q) grows with s. Distributions are complete, so no token drops out of the top k."""
    p, q = normalised(a), normalised(b)
    less, more = sorted((s, t))

    def mixed(share: float) -> dict[int, float]:
        return top([(1 - share) * x + share * y for x, y in zip(p, q, strict=True)], VOCABULARY)

    assert kl_nats(top(p), mixed(less)) <= kl_nats(top(p), mixed(more)) + 1e-5


def test_an_answer_without_one_shared_token_is_large_damage() -> None:
    """A sum over shared tokens alone would be empty here, and garbage would look perfect."""
    sure = {1: math.log(0.9), 2: math.log(0.05), 3: math.log(0.01)}
    garbage = {7: math.log(0.5), 8: math.log(0.3), 9: math.log(1e-4)}
    assert kl_nats(sure, garbage) > 5


def test_a_confident_garbage_answer_is_larger_damage_than_a_doubtful_garbage_answer() -> None:
    sure = {1: math.log(0.9), 2: math.log(0.05)}
    confident = {7: math.log(0.99), 8: math.log(1e-6)}
    doubtful = {7: math.log(0.3), 8: math.log(0.2)}
    assert kl_nats(sure, confident) > kl_nats(sure, doubtful) > 1


def test_nan_logits_are_maximal_damage() -> None:
    assert kl_nats({1: -0.1}, {}) == MAX_KL


@given(weights, st.floats(-1e4, -30.0))
def test_damage_stays_bounded_for_any_logprob(a: list[float], low: float) -> None:
    assert kl_nats(top(normalised(a)), {0: low}) <= MAX_KL


def test_a_position_agrees_when_the_greedy_tokens_are_equal() -> None:
    here = Logprobs(5, {5: -0.1, 6: -3.0})
    assert compare(0, here, here).agrees
    assert not compare(0, here, Logprobs(6, {6: -0.7, 5: -0.7})).agrees


@given(weights, st.sampled_from([0.0, 1 / 4096, 1 / 512]))
def test_reported_logprobs_of_a_real_distribution_are_accepted(a: list[float], rounding: float) -> None:
    """A logprob has these errors: 1e-7 from float32, 1/4096 nat from storage, and 1/512 of its value from bfloat16."""
    told = {token: lp + rounding for token, lp in top(normalised(a)).items()}
    assert impossible(told, next(iter(told))) is None


@given(weights, st.floats(0.011, 1e308))
def test_probabilities_that_add_up_to_more_than_1_are_reported(a: list[float], more: float) -> None:
    told = top(normalised(a), VOCABULARY)
    assert impossible({token: lp + 0.02 for token, lp in told.items()}, 0) is not None
    assert "add up to 1.8" in (impossible({1: math.log(0.9), 2: math.log(0.9)}, 1) or "")
    assert "cannot be above 0" in (impossible({**told, 7: more}, 0) or "")
    assert "chosen" in (impossible({**told, 7: -9999.0}, 7) or "")
    assert impossible({**told, 7: -math.inf}, 8) is None


@given(st.lists(compared, min_size=1, max_size=60), st.randoms())
def test_the_order_of_positions_does_not_matter(items: list[Compared], random: Random) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    one, other = summarise(items), summarise(shuffled)
    assert replace(one, seen=()) == replace(other, seen=())
    assert sorted(seen.kl for seen in one.seen) == pytest.approx(sorted(seen.kl for seen in other.seen))
    assert worst_prompt(items) == worst_prompt(shuffled)


@given(st.lists(st.floats(0, 30), min_size=1, max_size=300))
def test_at_most_one_value_in_a_hundred_lies_above_the_99th_percentile(values: list[float]) -> None:
    p99 = percentile(values, 0.99)
    assert p99 in values
    assert sum(v > p99 for v in values) <= len(values) / 100


def test_one_bad_position_in_fifty_shows_in_the_99th_percentile_but_hardly_in_the_mean() -> None:
    items = [Compared(0, 10.0 if i == 7 else 0.001, i != 7) for i in range(50)]
    whole = summarise(items)
    assert whole.p99_kl_micronats == 10_000_000
    assert whole.mean_kl_micronats == pytest.approx(200_980, abs=1)
    assert whole.top1_agreement_permille == 980


def test_a_thousand_permille_means_that_every_position_agreed() -> None:
    items = [Compared(0, 0.0, i > 0) for i in range(4096)]
    assert summarise(items).top1_agreement_permille == 999


def test_the_standard_error_treats_a_prompts_positions_as_one_cluster() -> None:
    """A hundred equal positions of one prompt count as one observation."""
    clustered = [Compared(p, float(p), True) for p in (0, 1) for _ in range(100)]
    spread = [Compared(i, float(i % 2), True) for i in range(200)]
    assert summarise(clustered).stderr_kl_micronats == pytest.approx(500_000, abs=1)
    assert summarise(spread).stderr_kl_micronats < 50_000


def test_without_measurements_there_are_no_positions_and_no_verdict() -> None:
    whole = summarise([])
    assert (whole.positions, whole.prompts, whole.sample) == (0, 0, None)
    assert worst_prompt([]) is None


def test_the_worst_prompt_is_the_one_with_the_largest_mean_not_the_largest_sum() -> None:
    items = [Compared(0, 1.0, True)] * 10 + [Compared(1, 3.0, False)]
    assert worst_prompt(items) == 1


@given(
    st.lists(
        st.dictionaries(st.integers(0, 2**24 - 1), st.floats(-30, 0, width=32), min_size=1, max_size=21).flatmap(
            lambda top: st.sampled_from(sorted(top)).map(lambda token: Logprobs(token, top))
        ),
        max_size=6,
    )
)
def test_packed_answers_are_restored_unchanged(positions: list[Logprobs]) -> None:
    packed = Answers(positions)
    assert list(packed) == positions
    assert [packed[-i] for i in range(1, len(packed) + 1)] == positions[::-1]
    with pytest.raises(IndexError):
        packed[len(positions)]
