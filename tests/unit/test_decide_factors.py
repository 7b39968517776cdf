"""Calibration factors that differ within a revision, and the recent window that engines report."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide import decide
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Condition, Stable, Status
from support.services import NOW, manifest, pod, revision_of, running
from support.trials import NEW, OLD, at_every_moment, ended, on_trial

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"}, replicas=2, scaling={"mode": "External"})
NAME = revision_of(OBJ, "k4v4")
PODS = (pod(NAME), pod(NAME, name="odd"))
SAMPLE = Sample(NOW, 2, 0.5, 4, 0, 6000, "k4v4", recent_tokens=64, factors="aaaa")
MIXED = replace(SAMPLE, mixed=(("odd", "bbbb"),))


def told(decision: Decision, kind: str) -> Condition:
    found = decision.status.condition(kind)
    assert found is not None
    return found


def serving(sample: Sample | None) -> Snapshot:
    return running(OBJ, "k4v4", pods=PODS, samples={NAME: (sample,)} if sample is not None else {}, rejections=())


def at_stage(stage: str, sample: Sample) -> Snapshot:
    """Return a snapshot of a k4v4 canary at this stage, beside a stable revision in 16 bits.

    `sample` is the canary's sample.
    """
    stable = revision_of(OBJ, "auto")
    canary = Canary(
        revision=NAME, dtype="k4v4", from_dtype="auto", stage=stage, started_time=NOW, stage_time=NOW, generation=1,
        verdict="Pending" if stage in ("Starting", "Probing") else "Passed",
        traffic_mode="ReplicaRatio" if stage == "Shifting" else None,
    )  # fmt: skip
    status = Status(
        stable=Stable(revision=stable, dtype="auto", since=NOW - timedelta(days=1), ever_ready=True), canary=canary
    )
    s = running(OBJ, "auto", pods=(pod(stable), *PODS), samples={NAME: (sample,)}, rejections=())
    views = {stable: DeploymentView(stable, "auto", 2), NAME: DeploymentView(NAME, "k4v4", 2)}
    return replace(s, status=status, deployments=views, traffic=stable)


def test_engines_with_other_factors_are_named_with_field_and_remedy_and_an_event():
    decision = decide(serving(MIXED))
    condition = told(decision, "AccuracyVerified")
    assert (condition.status, condition.reason) == ("False", "MixedFactors")
    for word in (f"revision {NAME}", "odd has bbbb", "others have aaaa", "KVPILOT_CALIBRATION in spec.engine.env"):
        assert word in condition.message
    assert "see AccuracyVerified" in told(decision, "Ready").message
    assert [event.reason for event in decision.events] == ["MixedFactors"]


def test_differing_factors_cause_one_event_for_as_long_as_they_differ():
    s = serving(MIXED)
    first = decide(s)
    assert [event.reason for event in decide(replace(s, status=first.status)).events] == []


def test_engines_with_equal_factors_are_not_reported():
    decision = decide(serving(SAMPLE))
    assert told(decision, "AccuracyVerified").reason == "NotProbed"
    assert "calibration factors" not in told(decision, "Ready").message


def test_the_message_about_differing_factors_does_not_name_deleted_or_terminating_pods():
    for pods in ((pod(NAME),), (pod(NAME), pod(NAME, name="odd", terminating=True))):
        assert told(decide(replace(serving(MIXED), pods=pods)), "AccuracyVerified").reason != "MixedFactors"


@pytest.mark.parametrize("stage", ["Probing", "Shifting", "Promoting"])
def test_a_canary_with_differing_factors_is_rolled_back_without_a_verdict(stage):
    decision = decide(at_stage(stage, MIXED))
    canary = decision.status.canary
    assert canary is not None
    assert (canary.stage, canary.verdict, canary.reason) == ("RollingBack", "Error", "MixedFactors")
    assert "odd has bbbb" in canary.message
    assert decision.probe is None


@pytest.mark.parametrize("stage", ["Probing", "Shifting", "Promoting"])
def test_a_canary_with_equal_factors_continues(stage):
    canary = decide(at_stage(stage, SAMPLE)).status.canary
    assert canary is not None
    assert canary.stage != "RollingBack"


def test_metrics_have_the_recent_window_that_engines_report() -> None:
    assert decide(serving(SAMPLE)).figures.recent_tokens == 64
    assert decide(serving(replace(SAMPLE, recent_tokens=None))).figures.recent_tokens == 0


def test_a_requested_recent_window_that_engines_lack_is_reported_with_the_remedy():
    asks = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4", "recentTokens": 128})
    name = revision_of(asks, "k4v4")

    def ready(recent: int | None) -> Condition:
        sample = replace(SAMPLE, recent_tokens=recent)
        return told(decide(running(asks, "k4v4", samples={name: (sample,)}, rejections=())), "Ready")

    found = ready(0)
    assert (found.status, found.reason) == ("True", "Serving")
    assert "spec.kvCache.recentTokens is 128, but the engines read the last 0 tokens at 8 bits" in found.message
    assert ready(128).message == ready(None).message == "k4v4 serves"


def test_a_missing_default_recent_window_is_not_reported():
    assert "recentTokens" not in told(decide(serving(replace(SAMPLE, recent_tokens=0))), "Ready").message


@pytest.mark.slow
@given(replicas=st.sampled_from([2, 3, 5]), cuts=st.dictionaries(st.integers(0, 120), st.integers(0, 4), max_size=10))
@settings(max_examples=15, deadline=None)
def test_a_growing_canary_with_differing_factors_loses_its_traffic_even_after_kills(
    replicas: int, cuts: dict[int, int]
) -> None:
    cluster = on_trial(replicas, cluster={"odd_factors": frozenset({NEW})})
    cluster.watch = at_every_moment
    for tick in range(400):
        cluster.tick(cut_after=cuts.get(tick))
        if ended(cluster.parsed()):
            break
    last = cluster.parsed().last_trial
    assert last is not None
    assert last.reason == "MixedFactors"
    settled = cluster.settle()
    assert settled.kv_cache.active_dtype == OLD
    # The operator does not retry at once, because the factors of new engines would differ, too.
    assert settled.canary is None
    assert list(cluster.deployments) == [revision_of(cluster.obj, OLD)]
