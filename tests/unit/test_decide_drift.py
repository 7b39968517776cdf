"""The operator acts once on drift after a promotion. A false or single alarm never counts against the dtype."""

from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fleet import GARBAGE, PERIOD, SOUND, fixed, serving

from kvpilot_operator.state.decision import ProbeFailed
from kvpilot_operator.state.status import MAX_MESSAGE, Denied, parse_status
from kvpilot_probes.stats import AnswerPair
from support.services import measurement, revision_of

FEW = measurement(1_000, 1000, prompts=3)


def test_a_drift_denies_the_dtype_and_is_reported_once_and_in_the_journal():
    cluster = serving()
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    status = decision.status
    assert (status.accuracy.failures, status.accuracy.errors) == (1, 0)
    (denied,) = status.kv_cache.denied
    assert (denied.dtype, denied.reason) == ("k8v4", "AccuracyDrifted")
    assert denied.until == cluster.now + timedelta(seconds=604_800)
    entry = status.decisions[0]
    assert (entry.action, entry.reason, entry.from_dtype) == ("RollBack", "AccuracyDrifted", "k8v4")
    assert cluster.runs[-1] in entry.message
    assert "excess KL" in entry.message
    drifts = [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert [e.type for e in drifts] == ["Warning"]
    verified = status.condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("False", "AccuracyDrifted")


def test_a_drift_denies_a_dtype_that_was_already_denied_for_latency():
    cluster = serving()
    spec = cluster.snapshot().spec
    assert spec is not None
    older = Denied(
        dtype="k8v4", model=spec.model.source, image=spec.engine.image, gpu="cpu", reason="PerformanceRegressed",
        message="slow", until=cluster.now + timedelta(days=7),
    )  # fmt: skip
    status = parse_status(cluster.status)
    kept = msgspec.structs.replace(status.kv_cache, denied=(older,))
    cluster.status = msgspec.structs.replace(status, kv_cache=kept).as_written()
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    assert [d.reason for d in decision.status.kv_cache.denied] == ["AccuracyDrifted"]


def test_with_on_failure_report_a_drift_only_causes_one_warning():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    warnings = []
    for _ in range(6 * PERIOD // 5):
        decision = cluster.tick()
        assert decision is not None
        assert decision.status.kv_cache.denied == ()
        warnings += [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert len(cluster.runs) >= 4
    assert len(warnings) == 1
    assert "onFailure is Report" in warnings[0].message
    assert parse_status(cluster.status).kv_cache.active_dtype == "k8v4"


def test_a_drifting_dtype_is_not_denied_if_denials_are_turned_off():
    cluster = serving(rollout={"denySeconds": 0})
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    assert decision.status.kv_cache.denied == ()
    assert any("denySeconds is 0" in e.message for e in decision.events)


def test_a_dtype_has_drifted_only_after_as_many_failed_probes_in_a_row_as_the_spec_says():
    cluster = serving(accuracy={"failureLimit": 3})
    cluster.outcomes = {0: GARBAGE, 1: GARBAGE, 2: SOUND, 3: GARBAGE, 4: GARBAGE, 5: GARBAGE}
    seen = []
    for _ in range(6):
        status = cluster.run_on(1).status
        verified = status.condition("AccuracyVerified")
        assert verified is not None
        seen.append((status.accuracy.failures, verified.reason, len(status.kv_cache.denied)))
    assert seen == [
        (1, "AccuracyRegressed", 0),
        (2, "AccuracyRegressed", 0),
        (0, "WithinLimits", 0),
        (1, "AccuracyRegressed", 0),
        (2, "AccuracyRegressed", 0),
        (3, "AccuracyDrifted", 1),
    ]


@pytest.mark.parametrize(("gpus", "said"), [(2, ", at most 2,880 GPU-seconds a day"), (0, "")])
def test_the_status_tells_the_gpu_seconds_a_day_of_periodic_probes(gpus: int, said: str):
    cluster = serving(engine={"resources": {"limits": {"nvidia.com/gpu": gpus} if gpus else {}}})
    last = cluster.run_on(1).status.accuracy.last
    # A run takes 1 s on two GPUs, once in 60 s.
    assert last is not None and (last.covered or "").partition(" tokens in ")[2] == f"1 s{said}"


def test_a_passed_probe_after_failed_ones_resets_their_count_and_is_reported():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.outcomes = {0: GARBAGE}
    cluster.run_on(1)
    decision = cluster.run_on(1)
    assert decision.status.accuracy.failures == 0
    assert [e.reason for e in decision.events] == ["AccuracyRecovered"]
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.status == "True"


@pytest.mark.parametrize("without", [ProbeFailed("EngineUnreachable", "no connection"), FEW])
def test_runs_without_a_verdict_never_deny_the_dtype(without):
    cluster = serving(accuracy={"consecutiveErrorLimit": 2})
    cluster.outcomes = dict.fromkeys(range(5), without)
    cluster.run_on(1)
    verified = parse_status(cluster.status).condition("AccuracyVerified")
    assert verified is not None
    assert verified.reason == "WithinLimits"
    decision = cluster.run_on(1)
    assert [(e.type, e.reason) for e in decision.events] == [("Warning", "AccuracyUnknown")]
    decision = cluster.run_on(3)
    status = decision.status
    assert (status.accuracy.failures, status.accuracy.errors) == (0, 5)
    assert status.kv_cache.denied == ()
    assert decision.events == ()
    verified = status.condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("Unknown", "ProbeErrors")
    assert cluster.run_on(1).status.accuracy.errors == 0


def test_only_a_failed_run_shows_both_answers() -> None:
    pair = AnswerPair("x" * 2000 + "and the capital?", "Paris.\x1b", "y" * 2000)
    for outcome, shown in ((GARBAGE, True), (SOUND, False)):
        cluster = serving()
        cluster.outcomes = {0: replace(outcome, sample=pair)}
        told = [one.message for one in cluster.run_on(1).events if one.reason == "AnswersDiffer"]
        assert len(told) == shown
        assert all("and the capital? | 16-bit: Paris." in one and "| k8v4: yyy" in one for one in told)
        assert all(len(one) <= MAX_MESSAGE and "\x1b" not in one for one in told)


def test_failed_probes_of_the_former_dtype_do_not_count_for_a_new_one():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    cluster.run_on(2)
    assert cluster.accuracy.failures == 2
    cluster.bad_pods = frozenset()
    cluster.edit(fixed("k4v4", accuracy={"onFailure": "Report"}))
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "k4v4" and d.status.canary is None)
    assert (decision.status.accuracy.failures, decision.status.accuracy.errors) == (0, 0)
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.status == "True"


def test_a_return_to_the_baseline_resets_the_drift():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    cluster.run_on(1)
    cluster.edit(fixed("auto"))
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "auto" and d.status.canary is None)
    assert (decision.status.accuracy.failures, decision.status.accuracy.checked_time) == (0, None)
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.reason == "Reference"


def test_a_deleted_baseline_is_not_a_failure_and_is_searched_again():
    cluster = serving()
    cluster.outcomes = {0: ProbeFailed("BaselineLost", "ConfigMap chat-baseline-abcdef01 holds no baseline")}
    cluster.baseline = None
    decision = cluster.until(lambda d: any(e.reason == "BaselineLost" for e in d.events))
    assert decision.status.accuracy.baseline is None
    assert (decision.status.accuracy.failures, decision.status.accuracy.errors) == (0, 0)
    for _ in range(3 * PERIOD // 5):
        cluster.tick()
    assert cluster.accuracy.baseline is None
    assert len(cluster.runs) == 1
    verified = parse_status(cluster.status).condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("Unknown", "NotProbed")


@pytest.mark.slow
@given(cuts=st.dictionaries(st.integers(0, 120), st.integers(0, 4), max_size=25), bad=st.booleans())
@settings(max_examples=25)
def test_a_restarted_operator_neither_loses_the_count_of_failed_probes_nor_counts_one_twice(cuts, bad):
    cluster = serving(accuracy={"onFailure": "Report", "failureLimit": 100})
    cluster.bad_pods = frozenset("0") if bad else frozenset()
    before = cluster.accuracy
    for tick in range(120):
        cluster.tick(cut_after=cuts.get(tick))
        if tick in cuts:
            cluster.waiting = ""
        after = cluster.accuracy
        counted = after.checked_time != before.checked_time
        assert after.failures - before.failures == (1 if bad and counted else 0)
        assert after.errors == 0
        before = after
    # The prober repeats a lost run within the run's period. So only the newest of ten periods may have no run yet.
    assert before.checked_time is not None
    assert cluster.now - before.checked_time < timedelta(seconds=3 * PERIOD)


def test_after_a_drift_the_service_returns_to_the_baseline_and_stays():
    cluster = serving()
    cluster.bad_pods = frozenset("0")
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "auto" and d.status.canary is None)
    probes = [e.action for e in decision.status.decisions]
    assert "Judge" in probes, "the replacement dtype is probed before it gets traffic"
    for _ in range(60):
        cluster.tick()
    status = parse_status(cluster.status)
    assert status.kv_cache.active_dtype == "auto"
    assert cluster.traffic == revision_of(cluster.obj, "auto")
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [("k8v4", "AccuracyDrifted")]
    assert (status.accuracy.failures, status.canary) == (0, None)
