"""Two revisions replace each other replica by replica."""

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.traffic_plan import Counts, rolling_step

SIZES = st.integers(1, 6)


def rolled(replicas: int, surge: int, floor: int, late: list[int]) -> tuple[list[tuple[int, int, int]], int]:
    """Simulate a promotion. New pods become ready only in turns for which `late` has 0.

    Return (growing pods, shrinking pods, ready pods) after each write, and the number of shrinking pods at the end.
    """
    total = replicas + surge
    growing, shrinking, ready = 0, replicas, 0
    states = []
    for turn in range(200):
        grown, left = rolling_step(
            Counts(growing, ready), replicas, Counts(shrinking, shrinking), total=total, floor=floor, both_serve=True
        )
        # The operator may be killed after the first of these two writes.
        states.append((max(growing, grown), shrinking, ready + shrinking))
        growing, shrinking = grown, left
        states.append((growing, shrinking, min(ready, growing) + shrinking))
        if not late or late[turn % len(late)] == 0:
            ready = growing
        if growing == replicas and ready == replicas:
            break
    return states, shrinking


@given(SIZES, st.integers(0, 1), st.integers(0, 6), st.lists(st.integers(0, 2), max_size=5))
def test_the_number_of_pods_stays_within_total_and_floor(replicas, surge, floor, late):
    floor = min(floor, replicas + surge - 1, replicas)
    states, _ = rolled(replicas, surge, floor, late)
    assert all(growing + shrinking <= replicas + surge for growing, shrinking, _ in states)
    assert all(answering >= floor for _, _, answering in states)


@given(SIZES, st.integers(0, 1), st.integers(0, 6))
def test_the_replacement_ends_with_all_replicas_on_the_growing_side(replicas, surge, floor):
    states, left = rolled(replicas, surge, min(floor, replicas + surge - 1), [])
    assert states[-1][0] == replicas
    assert left == surge


def test_without_spare_room_the_shrinking_side_loses_a_pod_first():
    assert rolling_step(Counts(0, 0), 1, Counts(3, 3), total=3, floor=2, both_serve=False) == (0, 2)
    assert rolling_step(Counts(0, 0), 1, Counts(2, 2), total=3, floor=2, both_serve=False) == (1, 2)


def test_a_replica_that_does_not_answer_yet_delays_the_replacement():
    assert rolling_step(Counts(2, 1), 4, Counts(3, 3), total=5, floor=1, both_serve=True) == (2, 3)


def test_a_replica_of_the_growing_side_that_stops_answering_stays():
    assert rolling_step(Counts(3, 1), 4, Counts(2, 2), total=5, floor=1, both_serve=True) == (3, 2)


def test_the_shrinking_side_loses_no_ready_pod_below_the_floor():
    assert rolling_step(Counts(1, 0), 4, Counts(4, 4), total=4, floor=4, both_serve=True) == (1, 4)


def test_the_shrinking_side_loses_pods_that_do_not_answer():
    assert rolling_step(Counts(1, 0), 4, Counts(4, 2), total=4, floor=3, both_serve=True) == (1, 3)


def test_a_lower_goal_during_the_replacement_removes_pods_of_the_shrinking_side():
    assert rolling_step(Counts(1, 1), 1, Counts(5, 5), total=3, floor=1, both_serve=True) == (1, 2)
