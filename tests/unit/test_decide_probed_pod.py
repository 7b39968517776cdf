"""A probe's result counts only for the pod that was probed, even if pods come and go meanwhile."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.api.names import engine_url
from kvpilot_operator.decide import decide
from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import Capture, Decision, Measure, ProbeFailed, ProbeResult
from kvpilot_operator.state.status import Status
from support.model_cluster import ModelCluster
from support.services import NOW, baseline, manifest, measurement, reporting, revision_of, running
from support.trials import on_trial


def asked_by(cluster: ModelCluster, decision: Decision) -> set[str]:
    """Return the name of the pod that has the probed address."""
    url = decision.probe.url if isinstance(decision.probe, Measure | Capture) else None
    return {p.name for p in cluster.snapshot().pods if p.ip and engine_url(p.ip, p.mesh) == url}


@pytest.mark.parametrize("drain_ticks", [0, 3])
def test_a_canary_passes_only_by_a_pod_that_was_probed(drain_ticks):
    cluster = on_trial(2, cluster={"start_ticks": 0, "drain_ticks": drain_ticks}, steps=[])
    asked: set[str] = set()
    for _ in range(40):
        decision = cluster.tick()
        if isinstance(decision.probe, Measure):
            asked |= asked_by(cluster, decision)
        if len(asked) == 1 and not cluster.engines.evicted:
            cluster.engines.evict(cluster.parsed().canary.revision)  # the operator has not read the answer yet
        if cluster.parsed().accuracy.last is not None:
            break
    last = cluster.parsed().accuracy.last
    assert len(cluster.engines.evicted) == 1
    assert len(asked) == 2
    assert last.verdict == "Passed"
    assert last.pod in asked
    assert (last.revision, int(last.pod.rpartition("-")[2])) not in cluster.engines.evicted


def test_a_capture_continues_on_its_pod_if_replicas_are_added():
    s = running(manifest(), "auto", samples=reporting((revision_of(manifest(), "auto"), "auto")))
    (first,) = s.pods
    request = decide(s).probe
    assert isinstance(request, Capture)
    assert request.pod == first.name
    newer = replace(first, name="a-newer-pod", ip="10.0.0.9")
    later = replace(s, pods=(newer, first), probe_result=ProbeResult(request, None))
    assert decide(later).probe == request
    assert decide(replace(later, pods=(newer,))).probe.pod == newer.name


def test_a_periodic_probe_continues_on_its_replica_if_replicas_are_added():
    obj = manifest(kvCache={"mode": "Fixed", "dtype": "k8v4"})
    accuracy = Accuracy(baseline=baseline(), checked_time=NOW - timedelta(days=1))
    told = reporting((revision_of(obj, "k8v4"), "k8v4"))
    s = running(obj, "k8v4", status=Status(accuracy=accuracy), samples=told)
    (first,) = s.pods
    request = decide(s).probe
    assert isinstance(request, Measure)
    newer = replace(first, name="a-newer-pod", ip="10.0.0.9")
    for outcome in (None, measurement()):
        later = decide(replace(s, pods=(newer, first), probe_result=ProbeResult(request, outcome)))
        if outcome is None:
            assert later.probe == request
        else:
            assert later.status.accuracy.last.pod == first.name
    gone = decide(replace(s, pods=(newer,), probe_result=ProbeResult(request, measurement())))
    assert gone.status.accuracy.last is None
    assert gone.probe.pod == newer.name


def test_a_probe_error_of_an_evicted_pod_does_not_count_for_its_successor():
    cluster = on_trial(2, cluster={"start_ticks": 0}, steps=[])
    for _ in range(40):
        decision = cluster.tick()
        if isinstance(decision.probe, Measure):
            break
    cluster.engines.evict(cluster.parsed().canary.revision)
    cluster.probe = ProbeResult(decision.probe, ProbeFailed("EngineUnreachable", "connection refused"))
    cluster.tick()
    assert cluster.parsed().canary.errors == 0
