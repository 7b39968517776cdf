"""Engines that answer well are scraped often, and failing ones rarely. Large pages cost extra."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.budget import METRICS, METRICS_LINES, METRICS_WORK_BYTES, METRICS_WORK_PER_SECOND
from kvpilot_operator.observe.scrape import BACKOFF, ScrapeThrottle

PODS = ("a", "b", "c")
MOST_WORK = METRICS_LINES + METRICS.read_bytes // METRICS_WORK_BYTES


def asked(
    throttle: ScrapeThrottle, cycles: int, answers: str, work: int = 0, pods: tuple[str, ...] = ("a",)
) -> list[int]:
    """Return the cycles, one per second, in which pods were scraped.

    `answers` repeats: `.` is a good answer and `x` a failure.
    """
    found = []
    for now in range(cycles):
        due = throttle.due(pods, float(now))
        if due:
            found.append(now)
        for pod in due:
            throttle.spend(work, float(now))
            if answers[(len(found) - 1) % len(answers)] == ".":
                throttle.answered(pod)
            else:
                throttle.failed(pod, float(now), "no")
    return found


def test_an_answering_engine_is_scraped_in_every_cycle() -> None:
    assert asked(ScrapeThrottle(), 20, ".") == list(range(20))


def test_one_failed_scrape_does_not_make_scrapes_rarer() -> None:
    assert asked(ScrapeThrottle(), 20, "x.") == list(range(20))


def test_each_further_failure_doubles_the_pause_up_to_the_longest() -> None:
    found = asked(ScrapeThrottle(), 200, "x")
    assert found[:6] == [0, 1, 3, 7, 15, 31]
    assert {later - one for one, later in pairwise(found[5:])} == {BACKOFF.last}


def test_the_first_valid_page_ends_the_pauses_between_scrapes() -> None:
    throttle = ScrapeThrottle()
    for now in (0.0, 1.0, 3.0, 7.0):
        assert throttle.due(("a",), now) == ["a"]
        throttle.failed("a", now, "no")
    assert throttle.due(("a",), 14.0) == []
    assert dict(throttle.backed_off) == {"a": "no"}
    assert throttle.due(("a",), 15.0) == ["a"]
    throttle.answered("a")
    assert (throttle.due(("a",), 15.0), dict(throttle.backed_off)) == (["a"], {})


def test_failures_of_one_pod_do_not_slow_others() -> None:
    throttle = ScrapeThrottle()
    for now in range(60):
        due = throttle.due(PODS, float(now))
        assert set(due) >= {"b", "c"}
        for pod in due:
            if pod == "a":
                throttle.failed(pod, float(now), "no")
            else:
                throttle.answered(pod)


def test_failed_scrapes_of_a_deleted_pod_are_forgotten() -> None:
    throttle = ScrapeThrottle()
    for now in (0.0, 1.0):
        throttle.failed("a", now, "no")
    assert throttle.due(("b",), 1.0) == ["b"]
    assert dict(throttle.backed_off) == {}
    assert throttle.due(("a", "b"), 1.0) == ["a", "b"]


def test_the_largest_pages_are_read_as_often_as_the_work_budget_allows() -> None:
    found = asked(ScrapeThrottle(), 130, ".", MOST_WORK)
    assert len(found) == 10
    # A service's pods are scraped together, and each pod has its own work budget.
    assert asked(ScrapeThrottle(), 130, ".", MOST_WORK, PODS) == found


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, MOST_WORK), st.floats(0, 20)), max_size=200),
    st.integers(1, 4),
)
def test_the_work_of_scrapes_is_bounded_and_no_engine_is_left_out_forever(
    cycles: list[tuple[bool, int, float]], number: int
) -> None:
    throttle, pods = ScrapeThrottle(), tuple("abcd"[:number])
    now, work, last = 0.0, 0, dict.fromkeys("abcd", 0.0)
    for good, each, pause in cycles:
        for pod in throttle.due(pods, now):
            last[pod] = now
            throttle.spend(each, now)
            work += each
            if good:
                throttle.answered(pod)
            else:
                throttle.failed(pod, now, "no")
        # One round may overdraw the budget. The next round waits until the overdraft is paid back.
        assert work <= number * (METRICS_WORK_PER_SECOND * now + MOST_WORK) * (1 + 1e-9)
        now += pause
    now += max(BACKOFF.last, MOST_WORK / METRICS_WORK_PER_SECOND * number)
    assert throttle.due(pods, now) == list(pods)
