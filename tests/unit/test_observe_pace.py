"""How often an engine is asked: always while it answers well, seldom while it does not, and large pages are paid."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.budget import METRICS, METRICS_LINES, METRICS_WORK_BYTES, METRICS_WORK_PER_SECOND
from kvpilot_operator.observe.pace import BACKOFF, Pace

PODS = ("a", "b", "c")
MOST_WORK = METRICS_LINES + METRICS.read_bytes // METRICS_WORK_BYTES


def asked(pace: Pace, cycles: int, answers: str, work: int = 0, pods: tuple[str, ...] = ("a",)) -> list[int]:
    """The cycles, one a second, in which pods were asked; `answers` is gone through and around, . good and x not."""
    found = []
    for now in range(cycles):
        due = pace.due(pods, float(now))
        if due:
            found.append(now)
        for pod in due:
            pace.spend(work, float(now))
            if answers[(len(found) - 1) % len(answers)] == ".":
                pace.answered(pod)
            else:
                pace.failed(pod, float(now), "no")
    return found


def test_an_engine_that_answers_is_asked_in_every_cycle() -> None:
    assert asked(Pace(), 20, ".") == list(range(20))


def test_one_failure_changes_nothing() -> None:
    assert asked(Pace(), 20, "x.") == list(range(20))


def test_each_further_failure_doubles_the_pause_up_to_the_longest() -> None:
    found = asked(Pace(), 200, "x")
    assert found[:6] == [0, 1, 3, 7, 15, 31]
    assert {later - one for one, later in pairwise(found[5:])} == {BACKOFF.last}


def test_failures_are_forgotten_with_the_first_page_that_is_good() -> None:
    pace = Pace()
    for now in (0.0, 1.0, 3.0, 7.0):
        assert pace.due(("a",), now) == ["a"]
        pace.failed("a", now, "no")
    assert pace.due(("a",), 14.0) == []
    assert dict(pace.backed_off) == {"a": "no"}
    assert pace.due(("a",), 15.0) == ["a"]
    pace.answered("a")
    assert (pace.due(("a",), 15.0), dict(pace.backed_off)) == (["a"], {})


def test_what_one_pod_does_slows_no_other_down() -> None:
    pace = Pace()
    for now in range(60):
        due = pace.due(PODS, float(now))
        assert set(due) >= {"b", "c"}
        for pod in due:
            if pod == "a":
                pace.failed(pod, float(now), "no")
            else:
                pace.answered(pod)


def test_a_pod_that_is_gone_is_forgotten() -> None:
    pace = Pace()
    for now in (0.0, 1.0):
        pace.failed("a", now, "no")
    assert pace.due(("b",), 1.0) == ["b"]
    assert dict(pace.backed_off) == {}
    assert pace.due(("a", "b"), 1.0) == ["a", "b"]


def test_a_page_as_large_as_it_may_be_is_read_as_often_as_its_work_is_paid_for() -> None:
    found = asked(Pace(), 130, ".", MOST_WORK)
    assert len(found) == 10
    # All pods of a service are asked together, and each has a share of its own.
    assert asked(Pace(), 130, ".", MOST_WORK, PODS) == found


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, MOST_WORK), st.floats(0, 20)), max_size=200),
    st.integers(1, 4),
)
def test_whatever_engines_answer_the_work_is_bounded_and_none_is_left_out_for_ever(
    cycles: list[tuple[bool, int, float]], number: int
) -> None:
    pace, pods = Pace(), tuple("abcd"[:number])
    now, work, last = 0.0, 0, dict.fromkeys("abcd", 0.0)
    for good, each, pause in cycles:
        for pod in pace.due(pods, now):
            last[pod] = now
            pace.spend(each, now)
            work += each
            if good:
                pace.answered(pod)
            else:
                pace.failed(pod, now, "no")
        # One round may be on credit: before it is asked again it is paid for.
        assert work <= number * (METRICS_WORK_PER_SECOND * now + MOST_WORK) * (1 + 1e-9)
        now += pause
    now += max(BACKOFF.last, MOST_WORK / METRICS_WORK_PER_SECOND * number)
    assert pace.due(pods, now) == list(pods)
