"""llm-d's saturation rules, compared with the worked examples of their documentation, and the HPA that follows them."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.backtest.wva import Wva, recommend


@pytest.mark.parametrize(
    ("peaks", "replicas", "wanted"),
    [
        ([(0.65, 0), (0.72, 0)], 2, 2),  # on average 11.5 percentage points below the limit of 80%
        ([(0.65, 0), (0.76, 0)], 2, 3),  # on average 9.5 percentage points below the limit
        ([(0.3, 2.5), (0.3, 2.5)], 2, 3),  # 2.5 waiting requests below the limit of five
        ([(0.9, 0), (0.2, 0)], 2, 2),  # the saturated replica does not count, and the other one must stay
        ([(0.9, 0), (0.85, 9)], 2, 3),  # no replica has room
        ([(0.9, 0)], 2, 2),  # one replica is already starting
        ([(0.3, 0), (0.3, 0)], 2, 1),  # after scale-in one replica would be at 60%: 20 points to spare
        ([(0.36, 0), (0.36, 0)], 2, 2),  # after scale-in one replica would be at 72%
        ([(0.1, 1.5), (0.1, 1.5)], 2, 2),  # after scale-in three requests would wait for one replica
        ([(0.1, 0)], 1, 1),
    ],
)
def test_a_replica_is_added_if_little_room_is_left_and_removed_if_enough_remains(peaks, replicas, wanted) -> None:
    assert recommend(peaks, replicas) == wanted


def test_a_recommendation_takes_effect_after_four_minutes() -> None:
    wva = Wva(minimum=1, maximum=8, sync_seconds=15)
    full, told = [(0.9, 6.0), (0.9, 6.0)], []
    for _ in range(17):
        told.append(wva.judge(full, 2))
    assert told[:15] == [2] * 15
    assert told[-1] == 3


def test_one_quiet_minute_prevents_the_addition_of_a_replica() -> None:
    wva = Wva(minimum=1, maximum=8, sync_seconds=15)
    full, fair = [(0.9, 6.0), (0.9, 6.0)], [(0.5, 0.0), (0.5, 0.0)]
    assert {wva.judge(full if i % 16 >= 4 else fair, 2) for i in range(60)} == {2}


@given(st.lists(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 50)), max_size=5), min_size=1, max_size=60))
def test_the_autoscaler_moves_one_replica_at_a_time_within_its_limits(pages) -> None:
    wva, replicas = Wva(minimum=1, maximum=4, sync_seconds=15), 2
    for page in pages:
        wanted = wva.judge(page[:replicas], replicas)
        assert 1 <= wanted <= 4
        assert abs(wanted - replicas) <= 1
        replicas = wanted
