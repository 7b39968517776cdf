"""The HorizontalPodAutoscaler's algorithm, compared with the worked examples of its documentation."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.backtest.hpa import Hpa, recommend


def one(use: float, replicas: int, target: float, ready: int | None = None) -> int:
    have = np.array([replicas])
    return int(recommend(np.array([use]), have if ready is None else np.array([ready]), have, target)[0])


@pytest.mark.parametrize(
    ("use", "target", "replicas", "wanted"),
    [
        (0.2, 0.1, 3, 6),  # twice the target doubles the replicas
        (0.05, 0.1, 4, 2),  # half of the target halves the replicas
        (0.5, 0.5, 5, 5),
        (0.55, 0.5, 5, 5),  # a ratio of use to target within 0.1 of 1 changes nothing
        (0.45, 0.5, 5, 5),
        (0.556, 0.5, 5, 6),
        (0.9, 0.6, 2, 3),  # ceil(2 * 1.5)
    ],
)
def test_desired_replicas_are_current_times_use_over_target_rounded_up(
    use: float, target: float, replicas: int, wanted: int
) -> None:
    assert one(use, replicas, target) == wanted


def test_starting_pods_count_as_idle_before_a_scale_up() -> None:
    # Two of four replicas are ready, at 160% of the target. The average over all four is 80%, so the HPA adds none.
    assert one(0.8, 4, 0.5, ready=2) == 4
    # Three of four replicas are ready, at 180%. The average over all four is 135%.
    assert one(0.9, 4, 0.5, ready=3) == 6


def test_the_highest_recommendation_of_five_minutes_delays_a_scale_down() -> None:
    hpa = Hpa(np.array([4]), target=0.8, minimum=1, maximum=8)
    wanted = [int(hpa.judge(np.array([0.1]), np.array([4]), np.array([4]))[0]) for _ in range(21)]
    assert wanted[:19] == [4] * 19
    assert wanted[19:] == [1, 1]


def test_a_scale_up_is_immediate_but_at_most_four_pods_or_double() -> None:
    hpa = Hpa(np.array([1, 6]), target=0.1, minimum=1, maximum=100)
    assert list(hpa.judge(np.array([1.0, 1.0]), np.array([1, 6]), np.array([1, 6]))) == [5, 12]


def test_the_hpa_stays_within_its_limits() -> None:
    hpa = Hpa(np.array([2]), target=0.8, minimum=2, maximum=3)
    assert hpa.judge(np.array([1.0]), np.array([3]), np.array([3]))[0] == 3
    for _ in range(40):
        wanted = hpa.judge(np.array([0.0]), np.array([2]), np.array([2]))
    assert wanted[0] == 2
