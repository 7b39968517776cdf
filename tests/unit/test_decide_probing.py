"""Sources of 16-bit answers: stored answers are found again, and new answers come only from the right replica."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.api.names import baseline_name
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.accuracy import baseline as borrowing
from kvpilot_operator.decide.context import Context
from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import (
    Capture,
    Captured,
    Decision,
    Find,
    Measure,
    NothingKept,
    ProbeFailed,
    ProbeResult,
)
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.snapshot import ProbePlan, Snapshot
from kvpilot_operator.state.status import Canary, Status, parse_status
from kvpilot_probes.codec import Baseline, Control
from support.model_cluster import ModelCluster
from support.services import KEY, NOW, PROBES, baseline, manifest, measurement, pod, reporting, revision_of, running

AUTO = manifest()
CONTROL = Control(NOW, 8, 256, 100, 1000, 1000)


@dataclass
class Archive(ModelCluster):
    """Cluster whose baselines are named after model and probe sets, so that the operator finds them again."""

    kept: set[str] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    captures: list[tuple[str, str]] = field(default_factory=list)
    """Captures as pairs (identity, dtype of the captured revision)."""
    borrowed: set[str] = field(default_factory=set)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), probes=ProbePlan(identity=self.identity))

    @property
    def identity(self) -> str:
        spec = self.obj["spec"]
        return f"{spec['model']['source'][-4:]}-{len(spec['accuracy']['probeSets'])}"

    def keep(self, config_map: str) -> None:
        identity = config_map.removeprefix(baseline_name(KEY.name, ""))
        self.kept.add(identity)
        self.written.append(identity)

    def _answer(self, decision: Decision) -> None:
        request = decision.probe
        self.borrowed |= set(self.deployments)
        if not isinstance(request, Capture | Find):
            super()._answer(decision)
            return
        there = request.baseline in self.kept
        if isinstance(request, Find) and not there:
            self.probe = ProbeResult(request, NothingKept())
            return
        if isinstance(request, Capture) and not there:
            self.captures.append((request.baseline, self.traffic or ""))
        found = Baseline(request.baseline, "m", "auto", (), control=CONTROL)
        self.probe = ProbeResult(request, Captured(found, adopted=there))


def fixed(dtype: str, **spec: Any) -> dict[str, Any]:
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype}, **spec)


def served(cluster: Archive, dtype: str) -> Status:
    status = cluster.settle()
    assert status.kv_cache.active_dtype == dtype
    return status


def test_a_lost_status_finds_the_kept_baseline_again_and_captures_nothing():
    cluster = Archive(fixed("auto"))
    served(cluster, "auto")
    cluster.edit(fixed("k8v4"))
    before = served(cluster, "k8v4").accuracy.baseline
    cluster.status.pop("accuracy")
    deployments = set(cluster.deployments)
    cluster.borrowed = set()
    after = cluster.settle()
    assert before is not None
    assert after.accuracy.baseline == before
    assert len(cluster.captures) == len(cluster.written) == 1
    assert cluster.borrowed == deployments
    assert "BaselineAdopted" in [entry.reason for entry in after.decisions]


def test_after_a_lost_status_a_16_bit_service_adopts_its_kept_baseline():
    cluster = Archive(manifest())
    before = served(cluster, "auto").accuracy.baseline
    cluster.status.pop("accuracy")
    assert served(cluster, "auto").accuracy.baseline == before
    assert len(cluster.captures) == 1


def test_a_return_to_former_probe_sets_finds_their_baseline():
    sets = {"probeSets": ["builtin/general"]}
    cluster = Archive(manifest())
    first = served(cluster, "auto").accuracy.baseline
    cluster.edit(manifest(accuracy=sets))
    second = served(cluster, "auto").accuracy.baseline
    cluster.edit(manifest())
    third = served(cluster, "auto").accuracy.baseline
    assert first is not None and second is not None
    assert first == third != second
    assert [identity for identity, _ in cluster.captures] == [first.identity, second.identity]


def test_a_new_model_is_never_judged_by_the_old_models_baseline():
    """Do not capture from the old replicas: they are ready and serve in 16 bits, but with another model."""
    cluster = Archive(fixed("auto"))
    served(cluster, "auto")
    old = revision_of(cluster.obj, "auto")
    changed = fixed("auto", model={"source": "hf://Qwen/Qwen3-14B"})
    cluster.edit(changed)
    urls: list[str] = []
    for _ in range(60):
        decision = cluster.tick()
        assert decision is not None
        if isinstance(decision.probe, Capture):
            stable = decision.status.stable
            assert stable is not None
            assert stable.revision == old
            urls.append(decision.probe.url)
            assert not decision.probe.serving
    assert urls
    assert parse_status(cluster.status).stable is not None
    assert served(cluster, "auto").accuracy.baseline is not None
    assert cluster.traffic == revision_of(changed, "auto")


def test_a_16_bit_replica_of_the_new_model_is_borrowed_even_if_the_old_model_serves_in_16_bits():
    cluster = Archive(fixed("auto"))
    served(cluster, "auto")
    changed = fixed("k8v4", model={"source": "hf://Qwen/Qwen3-14B"})
    cluster.edit(changed)
    status = served(cluster, "k8v4")
    assert revision_of(changed, "auto") in cluster.borrowed
    assert list(cluster.deployments) == [revision_of(changed, "k8v4")]
    assert status.accuracy.last is not None
    assert status.accuracy.last.verdict == "Passed"


def test_a_new_image_is_judged_by_the_baseline_of_the_old_one():
    """To judge the new image, the operator neither captures answers again nor uses another GPU."""
    cluster = Archive(fixed("auto"))
    served(cluster, "auto")
    cluster.edit(fixed("k8v4"))
    served(cluster, "k8v4")
    captures = len(cluster.captures)
    cluster.borrowed = set()
    upgraded = fixed("k8v4", engine={"image": "kvpilot/runtime:2"})
    cluster.edit(upgraded)
    served(cluster, "k8v4")
    assert cluster.traffic == revision_of(upgraded, "k8v4")
    assert len(cluster.captures) == captures
    assert revision_of(upgraded, "auto") not in cluster.borrowed


def test_with_a_kept_baseline_no_replica_is_borrowed():
    cluster = Archive(fixed("k8v4"))
    cluster.kept.add(cluster.identity)
    served(cluster, "k8v4")
    cluster.edit(fixed("k4v4"))
    served(cluster, "k4v4")
    assert revision_of(cluster.obj, "auto") not in cluster.borrowed
    assert cluster.captures == []


def test_mode_auto_captures_a_baseline_on_a_serving_pod_and_the_request_says_so():
    s = running(AUTO, "auto", samples=reporting((revision_of(AUTO, "auto"), "auto")))
    decision = decide(s)
    assert isinstance(decision.probe, Capture)
    assert decision.probe.serving
    assert decision.probe.config_map == "chat-baseline-abcdef01"


def test_a_fixed_16_bit_service_is_not_probed_before_its_first_canary():
    assert decide(running(fixed("auto"), "auto")).probe is None


def test_for_a_serving_small_dtype_the_operator_only_searches_a_kept_baseline():
    s = running(fixed("k8v4"), "k8v4")
    first = decide(s)
    assert isinstance(first.probe, Find)
    after = decide(replace(s, status=first.status, probe_result=ProbeResult(first.probe, NothingKept())))
    assert after.probe == first.probe
    assert after.status == first.status
    assert after.status.accuracy.baseline is None


def on_trial(**changes: Any) -> Snapshot:
    """Return a snapshot in which k8v4 serves, k4v4 is on trial and no baseline exists."""
    obj = fixed("k4v4")
    base = running(obj, "k8v4")
    name = revision_of(obj, "k4v4")
    canary = Canary(revision=name, dtype="k4v4", from_dtype="k8v4", stage="Probing", started_time=NOW, stage_time=NOW)
    views = {**base.deployments, name: DeploymentView(name, "k4v4", 1)}
    pods = (*base.pods, pod(name, ip="10.0.0.2"))
    accuracy = changes.pop("accuracy", Accuracy())
    return replace(
        base,
        status=Status(stable=base.status.stable, canary=canary, accuracy=accuracy),
        deployments=changes.pop("deployments", views),
        pods=pods,
        **changes,
    )


def borrowed(s: Snapshot) -> str | None:
    assert s.spec is not None
    return borrowing.borrowed(Context.of(s, s.spec))


def test_a_replica_is_borrowed_only_after_the_search_has_found_nothing():
    s = on_trial()
    assert borrowed(s) is None
    request = decide(s).probe
    assert isinstance(request, Find)
    assert borrowed(replace(s, probe_result=ProbeResult(request, NothingKept()))) == revision_of(fixed("k4v4"), "auto")
    assert (
        borrowed(replace(s, probe_result=ProbeResult(replace(request, identity="find/another"), NothingKept()))) is None
    )


def test_a_borrowed_replica_is_removed_after_its_capture():
    s = on_trial()
    name = revision_of(fixed("k4v4"), "auto")
    there = replace(s, deployments={**s.deployments, name: DeploymentView(name, "auto", 1)})
    assert borrowed(there) == name
    told = reporting((name, "auto"))
    ready = replace(there, pods=(*there.pods, pod(name, ip="10.0.0.3")), samples=told)
    request = decide(ready).probe
    assert isinstance(request, Capture)
    assert request.url == "http://10.0.0.3:8000"
    assert borrowed(replace(ready, status=replace_accuracy(ready.status))) is None


def replace_accuracy(status: Status) -> Status:
    return Status(stable=status.stable, canary=status.canary, accuracy=Accuracy(baseline=baseline()))


def test_the_canary_is_measured_on_its_own_address_once_the_baseline_is_known():
    told = reporting((revision_of(fixed("k4v4"), "k4v4"), "k4v4"))
    decision = decide(replace(on_trial(accuracy=Accuracy(baseline=baseline())), samples=told))
    assert isinstance(decision.probe, Measure)
    assert (decision.probe.url, decision.probe.serving) == ("http://10.0.0.2:8000", False)


def test_the_result_of_another_request_is_ignored():
    s = on_trial(accuracy=Accuracy(baseline=baseline()))
    stray = Captured(Baseline("another", "m", "auto", (), control=CONTROL))
    for identity in ("capture/another/0", f"find/{PROBES}", "measure/x/y/0"):
        for outcome in (stray, measurement(), ProbeFailed("EngineUnreachable", "gone")):
            decision = decide(replace(s, probe_result=ProbeResult(Find(identity, PROBES, "c"), outcome)))
            assert decision.baseline is None
            assert decision.status.accuracy.baseline == s.status.accuracy.baseline
            assert decision.status.accuracy.last is None
            assert decision.status.canary == s.status.canary


@given(cuts=st.dictionaries(st.integers(0, 50), st.integers(0, 5), max_size=12))
@settings(max_examples=20)
def test_a_baseline_named_in_the_status_is_stored_even_if_a_reconcile_is_interrupted(cuts):
    cluster = Archive(fixed("k8v4"))
    cluster.settle()
    cluster.edit(fixed("k4v4"))
    for tick in range(50):
        cluster.tick(cut_after=cuts.get(tick))
        named = parse_status(cluster.status).accuracy.baseline
        assert named is None or named.identity in cluster.kept
    assert served(cluster, "k4v4").accuracy.baseline is not None
    assert list(cluster.deployments) == [revision_of(cluster.obj, "k4v4")]


def test_a_canary_that_failed_during_a_pause_is_probed_once_and_rolled_back_afterwards():
    cluster = Archive(fixed("auto"), bad=frozenset({"k4v4"}))
    served(cluster, "auto")
    cluster.edit(fixed("k4v4"))
    decision = cluster.tick()
    while decision is not None and not isinstance(decision.probe, Measure):
        decision = cluster.tick()
    cluster.edit(fixed("k4v4", rollout={"paused": True}))
    asked = set()
    for _ in range(60):
        decision = cluster.tick()
        assert decision is not None
        assert decision.status.canary is not None
        if isinstance(decision.probe, Measure):
            asked.add(decision.probe.identity)
    assert asked == set()
    paused = parse_status(cluster.status)
    assert paused.canary is not None
    assert (paused.canary.failures, paused.kv_cache.denied) == (1, ())
    cluster.edit(fixed("k4v4"))
    status = cluster.settle()
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [("k4v4", "AccuracyRegressed")]
