"""Engines that report a KV-cache dtype other than the requested one are neither probed nor promoted."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats import dtypes
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.accuracy.reported import same
from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import Capture, Decision, Measure
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Condition, Stable, Status
from support.model_cluster import ModelCluster
from support.services import NOW, baseline, manifest, pod, reporting, revision_of, running
from support.trials import NEW, OLD, ended, on_trial

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"}, replicas=2, scaling={"mode": "External"})
OURS, STABLE = revision_of(OBJ, "k4v4"), revision_of(OBJ, "auto")
KEPT = Accuracy(baseline=baseline())
NAMES = sorted({*dtypes.names(), "fp8_ds_mla", "fp8_inc", "auto+fp8", "banana"})
WHOLE = {"auto", "bfloat16", "float16"}


def told(decision: Decision, kind: str) -> Condition:
    found = decision.status.condition(kind)
    assert found is not None
    return found


def at_stage(stage: str, reported: str | None, accuracy: Accuracy = KEPT, stable: str = "auto") -> Snapshot:
    """Return a trial of k4v4 beside a 16-bit revision. They report the dtypes `reported` and `stable`."""
    canary = Canary(
        revision=OURS, dtype="k4v4", from_dtype="auto", stage=stage, started_time=NOW, stage_time=NOW, generation=1,
        verdict="Pending" if stage in ("Starting", "Probing") else "Passed",
        traffic_mode="ReplicaRatio" if stage == "Shifting" else None,
    )  # fmt: skip
    serves = Stable(revision=STABLE, dtype="auto", since=NOW - timedelta(days=1), ever_ready=True)
    pages = reporting((STABLE, stable), *([(OURS, reported)] if reported is not None else []))
    s = running(OBJ, "auto", pods=(pod(STABLE), pod(OURS)), samples=pages, rejections=())
    views = {STABLE: DeploymentView(STABLE, "auto", 2), OURS: DeploymentView(OURS, "k4v4", 1)}
    status = Status(stable=serves, canary=canary, accuracy=accuracy)
    return replace(s, status=status, deployments=views, traffic=STABLE)


@pytest.mark.parametrize("reported", ["auto", "fp8", "auto+k4v4"])
@pytest.mark.parametrize("stage", ["Starting", "Probing", "Shifting", "Promoting"])
def test_a_canary_that_reports_another_dtype_is_rolled_back_unprobed_and_undenied(stage, reported):
    decision = decide(at_stage(stage, reported))
    canary = decision.status.canary
    assert canary is not None
    assert (canary.stage, canary.verdict, canary.reason) == ("RollingBack", "Error", "DtypeMismatch")
    assert f"but they report {reported}. Find" in canary.message
    assert decision.status.kv_cache.denied == ()
    assert decision.probe is None
    assert decision.status.decisions[0].reason == "DtypeMismatch"


def test_one_pod_that_reports_another_dtype_rolls_a_canary_back():
    s = at_stage("Shifting", "k4v4")
    (sample,) = s.samples[OURS]
    odd = replace(sample, other_dtypes=(("odd", "auto"),))
    pods = (*s.pods, pod(OURS, name="odd"))
    canary = decide(replace(s, pods=pods, samples={**s.samples, OURS: (odd,)})).status.canary
    assert canary is not None
    assert (canary.stage, canary.reason) == ("RollingBack", "DtypeMismatch")
    assert "odd reports auto" in canary.message
    gone = decide(replace(s, samples={**s.samples, OURS: (odd,)})).status.canary
    assert gone is not None
    assert gone.stage != "RollingBack"


def test_a_canary_is_probed_only_after_it_has_reported_its_dtype():
    for reported in (None, ""):
        decision = decide(at_stage("Probing", reported))
        assert decision.probe is None
        canary = decision.status.canary
        assert canary is not None
        assert (canary.stage, canary.errors) == ("Probing", 0)
    assert isinstance(decide(at_stage("Probing", "k4v4")).probe, Measure)


def test_a_canary_that_never_reports_its_dtype_ends_at_its_deadline():
    s = at_stage("Probing", None)
    waits = told(decide(replace(s, now=NOW + timedelta(seconds=90))), "CanaryHealthy")
    assert "has not reported its dtype (vllm:cache_config_info on /metrics)" in waits.message
    canary = decide(replace(s, now=NOW + timedelta(days=1))).status.canary
    assert canary is not None
    assert (canary.stage, canary.reason) == ("RollingBack", "ProgressDeadlineExceeded")
    assert "has not reported its dtype" in canary.message


def test_a_16_bit_engine_that_reports_8_bits_gives_no_baseline():
    decision = decide(at_stage("Probing", "k4v4", Accuracy(), stable="fp8_e4m3"))
    canary = decision.status.canary
    assert canary is not None
    assert (canary.stage, canary.verdict, canary.reason) == ("RollingBack", "Inconclusive", "BaselineUnfit")
    for word in ("they report fp8_e4m3", "kvCache.baseline to bfloat16", "the same --dtype"):
        assert word in canary.message
    assert decision.status.kv_cache.denied == ()
    assert decision.probe is None


def test_answers_captured_earlier_from_an_engine_with_8_bits_are_not_used_as_baseline():
    canary = decide(at_stage("Probing", "k4v4", KEPT, stable="fp8")).status.canary
    assert canary is not None
    assert canary.reason == "BaselineUnfit"


@pytest.mark.parametrize("mode", [{"mode": "Auto"}, {"mode": "Fixed", "dtype": "k4v4"}])
def test_no_canary_starts_and_no_baseline_is_captured_if_the_16_bit_engine_reports_8_bits(mode):
    obj = manifest(kvCache=mode, replicas=2, scaling={"mode": "External"})
    name = revision_of(obj, "auto")
    decision = decide(running(obj, "auto", samples=reporting((name, "fp8")), rejections=()))
    assert decision.status.canary is None
    assert not isinstance(decision.probe, Capture)
    if mode["mode"] == "Fixed":
        assert told(decision, "Stalled").reason == "BaselineUnfit"


def test_a_capture_waits_until_its_pod_has_reported_its_dtype():
    auto = manifest()
    assert decide(running(auto, "auto")).probe is None
    found = decide(running(auto, "auto", samples=reporting((revision_of(auto, "auto"), "auto")))).probe
    assert isinstance(found, Capture)


@pytest.mark.parametrize(("dtype", "reported"), [("k4v4", "auto"), ("k4v4", "fp8"), ("auto", "fp8_e4m3")])
def test_a_serving_revision_with_another_dtype_is_reported_once_and_not_probed(dtype, reported):
    obj = manifest(kvCache={"mode": "Fixed", "dtype": dtype})
    name = revision_of(obj, dtype)
    accuracy = Accuracy(baseline=baseline(), checked_time=NOW - timedelta(days=1))
    s = running(obj, dtype, status=Status(accuracy=accuracy), samples=reporting((name, reported)), rejections=())
    decision = decide(s)
    verified = told(decision, "AccuracyVerified")
    assert (verified.status, verified.reason) == ("False", "DtypeMismatch")
    assert f"but they report {reported}." in verified.message
    assert "see AccuracyVerified" in told(decision, "Ready").message
    assert not isinstance(decision.probe, Measure)
    assert [event.reason for event in decision.events] == ["DtypeMismatch"]
    assert decide(replace(s, status=decision.status)).events == ()


def test_another_name_of_the_requested_dtype_is_not_a_mismatch():
    for asked, reported in (("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8"), ("bfloat16", "auto"), ("auto", "float16")):
        assert same(asked, reported)
    for asked, reported in (("auto", "fp8"), ("bfloat16", "float16"), ("fp8", "fp8_e5m2"), ("k4v4", "turboquant_k8v4")):
        assert not same(asked, reported)


@given(st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_equality_of_dtype_names_is_symmetric_and_needs_equal_widths(one, other):
    assert same(one, other) == same(other, one)
    assert same(one, one)
    if same(one, other):
        assert (one in WHOLE) == (other in WHOLE)


def _no_traffic(cluster: ModelCluster, revision: str) -> None:
    assert cluster.shares().get(revision, 0.0) == 0


def test_a_canary_that_serves_16_bits_instead_gets_no_requests_and_is_not_retried_at_once():
    cluster = on_trial(cluster={"reports": {NEW: "auto"}})
    cluster.watch = lambda world: _no_traffic(world, revision_of(cluster.obj, NEW))
    last = cluster.until(ended).last_trial
    assert last is not None
    assert last.reason == "DtypeMismatch"
    settled = cluster.settle()
    assert (settled.kv_cache.active_dtype, settled.canary, settled.kv_cache.denied) == (OLD, None, ())


def test_the_dtype_on_an_implausible_metrics_page_still_counts():
    s = at_stage("Probing", None)
    empty = Sample(NOW, 0, 0.0, 0, 0, 0, "auto", implausible=("p: held",))
    canary = decide(replace(s, samples={**s.samples, OURS: (empty,)})).status.canary
    assert canary is not None
    assert canary.reason == "DtypeMismatch"
