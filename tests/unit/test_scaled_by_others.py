"""An HPA or KEDA scales a service through /scale, down to zero and back, and the operator follows."""

from collections import Counter

import pytest

from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.decide import decide
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import KEY, manifest, revision_of, running
from support.trials import BUSY, NEW, OLD, end_of, ended, on_trial, service, stage


def scale(cluster: ModelCluster) -> tuple[int, str]:
    """Return status.replicas and status.selector, as /scale shows them."""
    status = parse_status(cluster.status)
    return status.replicas, status.selector


def selected(cluster: ModelCluster) -> Counter[str]:
    """Return the ready pods, by revision, over which an autoscaler would average."""
    wanted = dict(pair.split("=") for pair in scale(cluster)[1].split(","))
    assert wanted[SERVICE_LABEL] == KEY.name
    one = wanted.get(REVISION_LABEL)
    pods = [p for p in cluster.engines.pods if p.leaves_in is None and p.ready]
    return Counter(p.revision for p in pods if one in (None, p.revision))


@pytest.mark.parametrize(("bad", "end"), [((), "Promoted"), ((NEW,), "RolledBack")])
@pytest.mark.parametrize("policy", ["Surge", "ReplaceOne"])
@pytest.mark.parametrize("replicas", [2, 10])
def test_a_trial_does_not_make_an_autoscaler_change_the_replicas(replicas, policy, bad, end):
    cluster = on_trial(replicas, capacityPolicy=policy, cluster={"bad": frozenset(bad)})
    seen: Counter[int] = Counter()
    for _ in range(300):
        cluster.tick()
        seen[scale(cluster)[0]] += 1
        if ended(parse_status(cluster.status)):
            break
    assert end_of(cluster.parsed()) == end
    for _ in range(5):
        cluster.tick()
        seen[scale(cluster)[0]] += 1
    assert set(seen) == {replicas}


def test_an_autoscaler_averages_over_the_pods_that_get_requests_and_no_others():
    cluster = on_trial(3)
    old, new = revision_of(cluster.obj, OLD), revision_of(cluster.obj, NEW)
    cluster.until(stage("Probing"))
    assert selected(cluster) == {old: 3}
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    cluster.tick()
    assert set(selected(cluster)) == {old, new} == set(cluster.shares())
    cluster.until(ended)
    cluster.settle()
    assert selected(cluster) == {new: 3}


def test_replicas_that_still_start_count_as_replicas_for_an_autoscaler():
    cluster = ModelCluster(service(OLD, 1), start_ticks=10)
    cluster.settle()
    cluster.edit(service(OLD, 4))
    cluster.tick()
    cluster.tick()
    assert scale(cluster)[0] == 4
    assert cluster.answering() == 1


def test_scaling_to_0_stops_all_engines_and_scaling_up_restores_the_same_revision():
    cluster = ModelCluster(service(OLD, 2))
    cluster.settle()
    before = parse_status(cluster.status).stable
    cluster.edit(service(OLD, 0))
    cluster.settle()
    status = parse_status(cluster.status)
    assert (cluster.engines.pods, status.replicas) == ((), 0)
    assert status.condition("Serving").reason == "ScaledToZero"
    assert status.canary is None
    assert cluster.services[KEY.name][REVISION_LABEL] == before.revision
    cluster.edit(service(OLD, 2))
    status = cluster.settle()
    assert (cluster.answering(), status.stable, status.replicas) == (2, before, 2)
    assert status.last_trial is None


@pytest.mark.parametrize("where", ["Starting", "Probing", "Shifting", "Promoting"])
def test_scaling_to_0_during_a_trial_leaves_no_pod_and_denies_no_dtype(where):
    cluster = on_trial(3)
    cluster.until(stage(where))
    cluster.edit(service(NEW, 0))
    for _ in range(10):
        cluster.tick()
    assert cluster.status.get("canary") is None
    assert cluster.engines.pods == ()
    assert "denied" not in cluster.status["kvCache"]
    cluster.edit(service(NEW, 3))
    cluster.settle()
    assert set(cluster.shares()) == {revision_of(cluster.obj, NEW)}


def test_a_change_at_0_replicas_waits_and_then_starts_as_a_canary():
    cluster = ModelCluster(service(OLD, 2), requests=BUSY)
    cluster.settle()
    cluster.edit(service(OLD, 0))
    cluster.settle()
    cluster.edit(service(NEW, 0))
    status = cluster.settle()
    assert (status.canary, cluster.engines.pods) == (None, ())
    assert status.condition("Stalled").reason == "ScaledToZero"
    cluster.edit(service(NEW, 2))
    cluster.until(stage("Probing"))
    assert set(cluster.shares()) == {revision_of(cluster.obj, OLD)}
    cluster.settle()
    assert set(cluster.shares()) == {revision_of(cluster.obj, NEW)}
    assert cluster.answering() == 2


def test_at_0_replicas_the_recommendation_is_0_and_at_1_it_is_never_0():
    cluster = ModelCluster(service(OLD, 1))
    assert cluster.settle().scaling.recommended_replicas == 1
    cluster.edit(service(OLD, 0))
    assert cluster.settle().scaling.recommended_replicas == 0


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    ("scaler", "remedy"),
    [("HorizontalPodAutoscaler web", "delete the HorizontalPodAutoscaler"),
     ("ScaledObject web", "delete the ScaledObject")],
)  # fmt: skip
def test_an_autoscaler_beside_kvpilot_is_named_with_the_remedy(scaler, remedy, paused):
    ready = told(autoscaler=scaler, rollout={"paused": paused})
    assert scaler in ready
    assert "spec.scaling.mode to External" in ready
    assert remedy in ready


@pytest.mark.parametrize("mode", ["Operator", "External"])
@pytest.mark.parametrize(("replicas", "kept"), [(2, 3), (50, 8), (0, 3)])
def test_replicas_outside_the_limits_are_reported_with_the_effective_number(mode, replicas, kept):
    ready = told(replicas=replicas, scaling={"mode": mode, "minReplicas": 3, "maxReplicas": 8})
    assert f"spec.replicas is {replicas}, but kvpilot runs {kept}," in ready
    assert "minReplicas 3 and maxReplicas 8" in ready


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_replicas_within_the_limits_are_not_reported(replicas):
    assert "spec.replicas" not in told(replicas=replicas, scaling={"minReplicas": 3, "maxReplicas": 8})


def told(*, autoscaler: str | None = None, **spec) -> str:
    """Return the message of the condition Ready."""
    ready = decide(running(manifest(**spec), "auto", autoscaler=autoscaler)).status.condition("Ready")
    assert ready is not None
    return ready.message
