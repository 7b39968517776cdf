"""Verdicts of the benchmark `gpu_equality`, which compares the answers of two runs."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.gpu_equality_compare import agreement


def answer(tokens, logprob=-0.1):
    return {"tokens": tokens, "logprobs": [{str(t): logprob, "0": math.log(1 - math.exp(logprob))} for t in tokens]}


def test_the_same_answer_twice_is_equal_in_every_figure():
    found = agreement([answer([5, 6, 7])], [answer([5, 6, 7])])
    assert found["answers_equal"] == found["tokens_equal"] == found["top1_equal"] == 1
    assert found["mean_kl"] == found["mean_logprob_difference"] == found["not_a_number"] == 0


def test_equal_tokens_count_only_up_to_the_first_difference():
    found = agreement([answer([5, 6, 7, 8])], [answer([5, 9, 7, 8])])
    assert found["tokens_equal"] == 0.25
    assert found["positions"] == 2
    assert found["answers_equal"] == 0


def test_positions_with_nan_are_counted_and_left_out_of_means():
    broken = answer([5, 6, 7])
    broken["logprobs"][1] = {"6": math.nan, "0": math.nan}
    found = agreement([answer([5, 6, 7])], [broken])
    assert found["not_a_number"] == 1
    assert found["positions"] == 2
    assert found["mean_kl"] == 0


def test_an_engine_with_only_nan_has_no_divergence():
    nothing = {"tokens": [5], "logprobs": [{"5": math.nan}]}
    assert math.isnan(agreement([answer([5])], [nothing])["mean_kl"])


@pytest.mark.parametrize("shift", [0.05, 0.5])
def test_a_shifted_distribution_diverges_by_its_kl(shift):
    found = agreement([answer([5], -0.1)], [answer([5], -0.1 - shift)])
    p, q = math.exp(-0.1), math.exp(-0.1 - shift)
    wanted = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert found["mean_kl"] == pytest.approx(wanted, rel=1e-6)
    assert found["mean_logprob_difference"] == pytest.approx(shift)
