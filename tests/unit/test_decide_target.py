"""A policy decision becomes a target dtype, a replica count and a journal entry, or no change."""

from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

from kvpilot_operator.decide import decide
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.step_rules import policy_input
from kvpilot_operator.state.decision import Capture, Captured, ProbeResult
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_operator.state.status import Canary, Denied, KVCache, Status
from kvpilot_probes.codec import Baseline, Control
from support.model_cluster import ModelCluster
from support.services import NOW, PROBES, manifest, pod, revision_of, running, samples

LADDER = ["fp8", "k8v4", "k4v4"]


def auto(**changes):
    return manifest(**{"kvCache": {"mode": "Auto", "ladder": LADDER}} | changes)


def serving(obj, dtype="auto", *, usage=0.97, waiting=3.0, count=1, status=None, **changes):
    name = revision_of(obj, dtype)
    pods = tuple(replace(pod(name), name=f"{name}-{i}") for i in range(count))
    window = tuple(
        replace(s, pods=count, capacity_tokens=3000 * count)
        for s in samples(usage=usage, waiting=waiting, seconds=600, dtype=dtype)
    )
    base = running(
        obj, dtype, status=status, pods=pods, deployments={name: DeploymentView(name, dtype, count)},
        samples={name: window}, **changes,
    )  # fmt: skip
    kept = (status or Status()).scaling
    return replace(base, status=msgspec.structs.replace(base.status, scaling=kept))


def denied(dtype, reason):
    return Denied(
        dtype=dtype, model="hf://Qwen/Qwen3-8B", image="kvpilot/runtime:1", gpu="cpu", reason=reason, message="worse",
        until=NOW + timedelta(days=7),
    )  # fmt: skip


def again(s, decision, seconds=5):
    """Return the snapshot of the next reconcile: the status is written, and the load is unchanged."""
    later = NOW + timedelta(seconds=seconds)
    window = {n: tuple(replace(x, time=x.time + timedelta(seconds=seconds)) for x in w) for n, w in s.samples.items()}
    return replace(s, now=later, status=decision.status, samples=window)


def test_a_dtype_step_starts_a_canary_and_journals_the_compared_options():
    decision = decide(serving(auto()))
    assert decision.status.canary is not None
    assert decision.status.canary.dtype == "fp8"
    entry = decision.status.decisions[0]
    assert (entry.action, entry.to_dtype) == ("StartCanary", "fp8")
    assert entry.options[0].outcome == "Chosen"
    assert {o.action for o in entry.options} == {"DtypeDown", "ScaleOut", "Stay"}


def test_the_compared_options_stay_with_the_canary_if_a_baseline_is_captured_in_the_same_reconcile():
    s = serving(auto())
    idle = replace(s, samples={name: window[-1:] for name, window in s.samples.items()})
    asked = decide(idle).probe
    assert isinstance(asked, Capture)
    answers = Baseline(PROBES, "m", "auto", (), control=Control(NOW, 8, 256, 100, 1000, 1000))
    decision = decide(replace(s, probe_result=ProbeResult(asked, Captured(answers))))
    weighed = {entry.action: {o.action for o in entry.options} for entry in decision.status.decisions}
    assert weighed == {"KeepBaseline": set(), "StartCanary": {"DtypeDown", "ScaleOut", "Stay"}}


def test_a_scale_out_changes_the_replicas_and_is_journalled_with_its_options():
    status = Status(kv_cache=KVCache(changed_time=NOW - timedelta(minutes=1)))
    decision = decide(serving(auto(), status=status))
    assert decision.status.scaling.desired_replicas == 2
    entry = decision.status.decisions[0]
    assert (entry.action, entry.reason) == ("ScaleOut", "MemoryBound")
    assert {o.outcome for o in entry.options if o.action == "DtypeDown"} == {"CoolingDown"}
    assert decision.objects is not None
    assert [m["spec"]["replicas"] for m in decision.objects.apply if m["kind"] == "Deployment"] == [2]


def test_mode_recommend_writes_a_recommendation_once_and_changes_nothing():
    s = serving(auto(kvCache={"mode": "Recommend", "ladder": LADDER}))
    decision = decide(s)
    assert decision.status.canary is None
    assert decision.status.kv_cache.recommended_dtype == "fp8"
    assert [e.action for e in decision.status.decisions] == ["Recommend"]
    assert decision.status.decisions[0].options
    assert [e.action for e in decide(again(s, decision)).status.decisions] == ["Recommend"]


def test_a_recorded_rate_is_written_with_the_step_that_follows_from_it():
    flows = Flows(seconds=5, prompt_tokens=500, generation_tokens=500, finished=5, decode_seconds=60)
    for mode, kept in (("Auto", 1), ("Recommend", 0)):
        s = serving(auto(kvCache={"mode": mode, "ladder": LADDER}))
        s = replace(s, samples={n: tuple(replace(x, flows=flows) for x in w) for n, w in s.samples.items()})
        assert len(decide(s).status.scaling.saturations) == kept


def test_mode_recommend_recommends_replicas_and_does_not_change_them():
    only = auto(kvCache={"mode": "Recommend", "ladder": ["fp8"]}, replicas=2)
    decision = decide(serving(only, "fp8", count=2))
    assert decision.status.scaling.recommended_replicas == 4
    assert decision.status.scaling.desired_replicas == 2


def test_an_autoscalers_replicas_are_recommended_and_not_written():
    decision = decide(serving(auto(scaling={"mode": "External"}, replicas=2), "k4v4", count=2))
    assert decision.status.scaling.recommended_replicas == 4
    assert decision.objects is not None
    assert [m["spec"]["replicas"] for m in decision.objects.apply if m["kind"] == "Deployment"] == [2]


def test_a_delayed_step_is_reported_once_with_the_compared_options():
    s = serving(auto(scaling={"maxReplicas": 1}), status=Status(kv_cache=KVCache(changed_time=NOW)))
    decision = decide(s)
    assert [(e.action, e.reason) for e in decision.status.decisions] == [("Hold", "CoolingDown")]
    assert decision.status.decisions[0].options
    assert decision.status.kv_cache.recommended_dtype == "fp8"
    assert len(decide(again(s, decision)).status.decisions) == 1


@pytest.mark.parametrize(
    ("obj", "dtype", "load"),
    [
        (auto(), "auto", {"usage": 0.3, "waiting": 0.0}),
        (auto(), "auto", {"usage": 0.97, "waiting": 0.0}),
        (auto(scaling={"maxReplicas": 1}), "k4v4", {"usage": 0.97, "waiting": 5.0}),
        (auto(kvCache={"mode": "Recommend", "ladder": LADDER}), "auto", {"usage": 0.97, "waiting": 5.0}),
        (auto(scaling={"mode": "External"}), "auto", {"usage": 0.4, "waiting": 50.0}),
        (manifest(kvCache={"mode": "Fixed", "dtype": "fp8"}), "fp8", {"usage": 0.6, "waiting": 0.2}),
    ],
)
def test_a_constant_load_writes_nothing_after_the_first_reconcile(obj, dtype, load):
    s = serving(obj, dtype, **load)
    first = decide(s)
    s = again(s, first)
    second = decide(s)
    s = again(s, second, 10)
    third = decide(s)
    assert third.status == second.status
    assert not third.events


def test_a_figure_that_hardly_changes_does_not_change_the_status():
    s = serving(auto(), usage=0.30, waiting=0.0)
    s = again(s, decide(s))
    second = decide(s)
    moved = {n: tuple(replace(x, usage=0.32) for x in w) for n, w in s.samples.items()}
    assert decide(replace(again(s, second, 10), samples=moved)).status == second.status


@pytest.mark.parametrize("reason", ["AccuracyDrifted", "AccuracyRegressed"])
def test_a_serving_dtype_denied_for_its_answers_is_replaced_even_within_min_dwell_seconds(reason):
    status = Status(kv_cache=KVCache(changed_time=NOW, denied=(denied("k4v4", reason),)))
    decision = decide(serving(auto(), "k4v4", usage=0.5, waiting=0, status=status))
    assert decision.status.canary is not None
    assert (decision.status.canary.dtype, decision.status.canary.reason) == ("k8v4", "AccuracyDrifted")


def test_a_serving_dtype_denied_for_a_lack_of_capacity_stays():
    status = Status(kv_cache=KVCache(denied=(denied("k4v4", "ProgressDeadlineExceeded"),)))
    assert decide(serving(auto(), "k4v4", usage=0.5, waiting=0, status=status)).status.canary is None


def test_after_a_drift_other_denied_dtypes_are_skipped():
    gone = tuple(denied(d, "AccuracyDrifted") for d in ("k4v4", "k8v4", "fp8"))
    status = Status(kv_cache=KVCache(denied=gone))
    decision = decide(serving(auto(), "k4v4", usage=0.5, waiting=0, status=status))
    assert decision.status.canary is not None
    assert decision.status.canary.dtype == "auto"


def test_a_fixed_dtype_that_drifts_gives_way_to_the_baseline():
    status = Status(kv_cache=KVCache(denied=(denied("k4v4", "AccuracyDrifted"),)))
    fixed = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"})
    decision = decide(serving(fixed, "k4v4", usage=0.5, waiting=0, status=status))
    assert decision.status.canary is not None
    assert decision.status.canary.dtype == "auto"


def test_a_denied_dtype_is_not_tried_while_the_gpu_is_unknown():
    """The only node is drained. The pod waits for another node, most likely with the same GPU."""
    on_h200 = msgspec.structs.replace(denied("k4v4", "AccuracyDrifted"), gpu="NVIDIA-H200")
    fixed = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"})
    s = serving(fixed, "auto", usage=0.5, waiting=0, status=Status(kv_cache=KVCache(denied=(on_h200,))))
    assert decide(replace(s, node=NodeFacts("NVIDIA-H200"))).status.canary is None
    waits = replace(s.pods[0], node=None, ip=None, ready=False, unschedulable="0/1 nodes are available")
    drained = decide(replace(s, pods=(waits,), node=NodeFacts()))
    assert drained.status.canary is None
    assert drained.status.condition("Stalled").reason == "DtypeDenied"
    another = decide(replace(s, node=NodeFacts("NVIDIA-H100")))
    assert another.status.canary is not None


def test_a_fixed_dtype_denied_only_with_another_image_keeps_serving():
    """The canary with the new image failed its probe; the serving revision still has the old image."""
    old, new = (
        manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"}, engine={"image": f"kvpilot/runtime:{tag}"})
        for tag in (1, 2)
    )
    k8v4 = {"kvCache": {"mode": "Fixed", "dtype": "k8v4"}, "engine": {"image": "kvpilot/runtime:2"}}
    refused = msgspec.structs.replace(denied("k4v4", "AccuracyRegressed"), image="kvpilot/runtime:2")
    s = serving(old, "k4v4", usage=0.5, waiting=0, status=Status(kv_cache=KVCache(denied=(refused,))))
    s = replace(s, spec=serving(new, "k4v4").spec)
    views = {name: replace(view, image="kvpilot/runtime:1") for name, view in s.deployments.items()}
    decision = decide(replace(s, deployments=views))
    assert decision.status.canary is None
    stalled = decision.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "DtypeDenied")
    assert "kvpilot/runtime:2" in stalled.message
    other = replace(s, deployments=views, spec=serving(manifest(**k8v4), "k4v4").spec)
    tried = decide(other).status.canary
    assert tried is not None
    assert tried.dtype == "k8v4"
    fallen = {name: replace(view, image="kvpilot/runtime:2") for name, view in s.deployments.items()}
    left = decide(replace(s, deployments=fallen)).status.canary
    assert left is not None
    assert left.dtype == "auto"


def test_a_fixed_dtype_denied_only_with_another_model_keeps_serving():
    fixed = {"mode": "Fixed", "dtype": "k4v4"}
    refused = msgspec.structs.replace(denied("k4v4", "AccuracyRegressed"), model="hf://Qwen/Qwen3-4B")
    s = serving(
        manifest(kvCache=fixed), "k4v4", usage=0.5, waiting=0, status=Status(kv_cache=KVCache(denied=(refused,)))
    )
    s = replace(s, spec=serving(manifest(kvCache=fixed, model={"source": "hf://Qwen/Qwen3-4B"}), "k4v4").spec)
    views = {name: replace(view, model="Qwen/Qwen3-8B") for name, view in s.deployments.items()}
    decision = decide(replace(s, deployments=views))
    assert decision.status.canary is None
    stalled = decision.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "DtypeDenied")
    assert "Qwen3-4B" in stalled.message
    fallen = {name: replace(view, model="Qwen/Qwen3-4B") for name, view in s.deployments.items()}
    left = decide(replace(s, deployments=fallen)).status.canary
    assert left is not None
    assert left.dtype == "auto"


def test_a_canary_with_a_smaller_dtype_ends_when_the_serving_dtype_drifts():
    obj = auto()
    trial = Canary(
        revision=revision_of(obj, "k4v4"), dtype="k4v4", from_dtype="k8v4", stage="Probing", started_time=NOW,
        stage_time=NOW, reason="MemoryPressured",
    )  # fmt: skip
    status = Status(kv_cache=KVCache(denied=(denied("k8v4", "AccuracyDrifted"),)), canary=trial)
    decision = decide(serving(obj, "k8v4", status=status))
    assert decision.status.canary is not None
    assert (decision.status.canary.stage, decision.status.canary.reason) == ("RollingBack", "Superseded")


def test_a_fixed_dtype_that_the_hardware_cannot_compute_is_served_with_a_warning():
    fixed = manifest(kvCache={"mode": "Fixed", "dtype": "fp8"})
    turing = NodeFacts("Tesla-T4", (7, 5))
    decision = decide(serving(fixed, "auto", usage=0.5, waiting=0, node=turing))
    assert decision.status.canary is not None
    assert decision.status.canary.dtype == "fp8"
    assert any(e.reason == "PreflightWarning" and "8.0" in e.message for e in decision.events)


def test_a_fixed_dtype_still_gets_the_replicas_that_it_needs():
    decision = decide(serving(manifest(kvCache={"mode": "Fixed", "dtype": "fp8"}), "fp8"))
    assert decision.status.canary is None
    assert decision.status.scaling.desired_replicas == 2


def test_no_dtype_changes_together_with_another_change_of_the_spec():
    obj = auto()
    edited = auto(engine={"image": "kvpilot/runtime:2"})
    s = serving(obj)
    s = replace(s, spec=serving(edited).spec)
    assert s.spec is not None
    asked = policy_input(Context.of(s, s.spec))
    assert asked.no_canary == "the change of the spec is rolled out first"
    decision = decide(s)
    assert decision.status.canary is not None
    assert decision.status.canary.dtype == "auto"


def test_pressure_within_min_dwell_seconds_adds_a_replica_that_is_removed_after_the_pressure():
    obj = manifest(
        kvCache={
            "mode": "Auto", "ladder": ["k8v4", "k4v4"], "pressure": {"sustainedSeconds": 30}, "minDwellSeconds": 21_600,
        },
        scaling={"scaleDownStabilizationSeconds": 60},
    )  # fmt: skip
    cluster = ModelCluster(obj, demand=5000)
    assert cluster.settle().kv_cache.active_dtype == "k8v4"
    cluster.demand = 10_000
    status = cluster.settle()
    assert (status.kv_cache.active_dtype, status.scaling.desired_replicas) == ("k8v4", 2)
    cluster.demand = 2000
    status = cluster.settle()
    assert (status.kv_cache.active_dtype, status.scaling.desired_replicas) == ("k8v4", 1)
    actions = [e.action for e in reversed(status.decisions) if e.action.startswith("Scale")]
    assert actions == ["ScaleOut", "ScaleIn"]
