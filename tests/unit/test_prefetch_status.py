"""The Job that fills a claim: its state in status and conditions, and its progress from its metrics page."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefetched import GB, applied, deleted, kept, obj, said, view, worker

from kvpilot_operator.api.words import CachePhase
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError, ScrapeError
from kvpilot_operator.observe.prefetch import ProgressReader
from kvpilot_operator.state.questions import Question, unanswered
from support.services import running, snapshot, spec_of


def test_its_progress_is_reported_in_status_and_conditions() -> None:
    s = snapshot(obj(), prefetch=view(downloaded_bytes=4 * GB, total_bytes=16 * GB))
    decision = decide(s)
    cache = decision.status.cache
    assert cache is not None
    assert cache.phase == CachePhase.PREFETCHING
    for kind in ("Ready", "Serving", "Reconciling"):
        assert said(decision, kind).reason == "Prefetching"
        assert "fills PersistentVolumeClaim chat-weights: 25% of 16.0 GB" in said(decision, kind).message
    assert (said(decision, "Reconciling").status, said(decision, "Stalled").status) == ("True", "False")
    assert decision.again_seconds


@given(st.lists(st.integers(0, 16 * GB), max_size=60))
def test_a_status_is_written_for_each_hundredth_at_most(steps: list[int]) -> None:
    s, writes = snapshot(obj()), 0
    for there in sorted(steps):
        status = decide(replace(s, prefetch=view(downloaded_bytes=there, total_bytes=16 * GB))).status
        writes += status != s.status
        s = replace(s, status=status)
    assert writes <= 101


def test_a_filled_claim_is_told_once() -> None:
    s = kept(snapshot(obj()), CachePhase.PREFETCHING)
    decision = decide(replace(s, prefetch=view(done=True, pods=())))
    cache = decision.status.cache
    assert cache is not None
    assert cache.phase == CachePhase.READY
    assert [one.reason for one in decision.events].count("WeightsPrefetched") == 1
    (told,) = [one.message for one in decision.events if one.reason == "WeightsPrefetched"]
    assert told == "PersistentVolumeClaim chat-weights is filled"
    assert decision.status.stable is not None
    again = decide(replace(s, status=decision.status, prefetch=None))
    assert not [one for one in again.events if one.reason == "WeightsPrefetched"]


REFUSED = json.dumps(
    {"kvpilot": "refused", "reason": "ModelNotFound", "message": "model 'a' is gated: accept its terms"}
)


@pytest.mark.parametrize(
    ("changes", "reason", "words", "stuck"),
    [
        ({"pods": (worker(ready=False, waiting_reason="CrashLoopBackOff", exit_message=REFUSED),)}, "ModelNotFound",
         "accept its terms", True),
        ({"pods": (worker(ready=True, exit_message=REFUSED),)}, "ModelNotFound", "spec.cache.prefetch to false", True),
        ({"pods": (), "failure": "Job was active longer than specified deadline"}, "PrefetchFailed", "Delete it", True),
        ({"pods": (worker(ready=False, unschedulable="pod has unbound immediate PersistentVolumeClaims"),)},
         "ClaimNotBound", "put spec.cache.weights back", False),
        ({"pods": (worker(ready=False, waiting_reason="ErrImagePull", exit_message="no such image"),)},
         "ImageUnavailable", "no such image", False),
        ({"pods": ()}, "Prefetching", "kubectl describe job chat-prefetch", False),
    ],
)  # fmt: skip
def test_why_it_does_not_come_on_is_reported_with_the_remedy(
    changes: dict[str, Any], reason: str, words: str, stuck: bool
) -> None:
    decision = decide(snapshot(obj(), prefetch=view(**changes)))
    assert said(decision, "Ready").reason == reason
    assert words in said(decision, "Ready").message
    assert "chat-prefetch" in said(decision, "Ready").message
    assert said(decision, "Stalled").status == ("True" if stuck else "False")
    assert said(decision, "Reconciling").status == ("False" if stuck else "True")
    assert applied(decision, "Deployment") == []
    # The Job retries by itself, so it continues as soon as it can.
    assert applied(decision, "Job")
    assert deleted(decision) == []


def test_one_that_gets_on_again_after_a_refusal_is_told_to_get_on() -> None:
    s = snapshot(obj(), prefetch=view(pods=(worker(exit_message=REFUSED),), downloaded_bytes=0, total_bytes=GB))
    assert said(decide(s), "Reconciling").reason == "Prefetching"


def test_the_serving_revision_is_repaired_and_scaled_while_another_model_is_fetched() -> None:
    old = obj()
    s = kept(running(old, "auto"), CachePhase.READY)
    new = obj(model={"revision": "v2"}, replicas=3)
    later = replace(s, spec=spec_of(new), generation=2, prefetch=None)
    decision = decide(later)
    assert decision.objects is not None
    assert decision.status.canary is None
    assert decision.objects.scale == {s.status.stable.revision: 3} if s.status.stable else False
    assert said(decision, "Serving").status == "True"
    assert said(decision, "Reconciling").status == "True"


def test_the_dtype_may_change_without_another_prefetch() -> None:
    s = kept(running(obj(), "auto"), CachePhase.READY)
    decision = decide(replace(s, spec=spec_of(obj(kvCache={"mode": "Fixed", "dtype": "k4v4"})), generation=2))
    assert decision.status.canary is not None
    assert applied(decision, "Job") == []


def test_a_service_that_serves_and_is_given_a_prefetch_continues() -> None:
    s = running(obj(), "auto")
    decision = decide(s)
    assert applied(decision, "Job")
    assert applied(decision, "Deployment")
    assert said(decision, "Ready").status == "True"


def test_an_unread_job_is_neither_made_nor_deleted() -> None:
    unread = (unanswered(Question.PREFETCH, ClusterError("GET", "jobs", 403, "forbidden")),)
    decision = decide(snapshot(obj(), unanswered=unread))
    assert (applied(decision, "Job"), deleted(decision), applied(decision, "Deployment")) == ([], [], [])


# The Job's metrics page.


def read(page: bytes) -> tuple[int, int]:
    reader = ProgressReader()
    for _ in reader.steps(page):
        pass
    return tuple(reader.close())


def test_its_page_is_read() -> None:
    page = b"# HELP a b\nkvpilot_prefetch_bytes 1.5e+09\nkvpilot_prefetch_total_bytes 1.6e+10\nother 1\n"
    assert read(page) == (1_500_000_000, 16 * GB)


@pytest.mark.parametrize(
    "page",
    [b"", b"kvpilot_prefetch_bytes 1\n", b"kvpilot_prefetch_bytes -1\nkvpilot_prefetch_total_bytes 1\n",
     b"kvpilot_prefetch_bytes NaN\nkvpilot_prefetch_total_bytes 1\n",
     b"kvpilot_prefetch_bytes 1\nkvpilot_prefetch_total_bytes +Inf\n"],
)  # fmt: skip
def test_a_page_that_says_neither_or_nonsense_is_refused(page: bytes) -> None:
    with pytest.raises(ScrapeError):
        read(page)


@given(st.binary(max_size=400))
def test_whatever_the_pod_sends_is_read_or_refused(page: bytes) -> None:
    try:
        there, total = read(b"kvpilot_prefetch_total_bytes 5\n" + page)
    except ScrapeError:
        return
    assert 0 <= there <= total
