"""Builders that bring a service into every state in the table of docs/conditions.md."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec

from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.questions import Question, unanswered
from kvpilot_operator.state.status import Denied
from support.kstatus import seen
from support.model_cluster import ModelCluster
from support.services import manifest
from support.trials import NEW, OLD, ended, on_trial, service, stage

QUOTA = "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1"
STATES: dict[str, Callable[[], dict[str, Any]]] = {}
"""Functions that build a service's stored object, by the name of the row in the table."""


def state(name: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def add(made: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        STATES[name] = cache(made)
        return made

    return add


class Kubelet(ModelCluster):
    """Model cluster in which the test replaces what the kubelet reports for some pods."""

    says: Callable[[int], Mapping[str, Any]] = staticmethod(lambda number: {})

    def _pods(self) -> list[PodView]:
        return [replace(view, **self.says(number)) for number, view in enumerate(super()._pods())]


def settled(**cluster: Any) -> ModelCluster:
    made = ModelCluster(service(OLD, 2), **cluster)
    made.settle()
    return made


def after(cluster: ModelCluster, ticks: int = 3) -> dict[str, Any]:
    for _ in range(ticks):
        cluster.tick()
    return seen(cluster)


def of_an_engine(**changes: Any) -> dict[str, Any]:
    """Return a new service whose only pod does not start, with the reason that its kubelet reports."""
    cluster = Kubelet(service(OLD, 1), starts=False)
    cluster.says = lambda number: changes
    return after(cluster)


@state("no operator has seen it")
def _() -> dict[str, Any]:
    return service(OLD)


@state("its first engines start")
def _() -> dict[str, Any]:
    return after(ModelCluster(service(OLD, 2), starts=False))


@state("no node has room for an engine")
def _() -> dict[str, Any]:
    return of_an_engine(unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu")


@state("a claim has no volume")
def _() -> dict[str, Any]:
    return of_an_engine(unschedulable="0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")


@state("the image cannot be pulled")
def _() -> dict[str, Any]:
    return of_an_engine(waiting_reason="ImagePullBackOff", exit_message="no such image")


@state("a sidecar crashes before the engine answers")
def _() -> dict[str, Any]:
    return of_an_engine(
        waiting_reason="PodInitializing", held_up=("CrashLoopBackOff", "container proxy: no certificate")
    )


@state("the engine refuses to start")
def _() -> dict[str, Any]:
    said = json.dumps({"kvpilot": "refused", "reason": "DoesNotFit", "message": "weights need 14,904 MiB"})
    return of_an_engine(exit_message=said, restarts=1)


@state("it serves, and no change is in progress")
def _() -> dict[str, Any]:
    return seen(settled())


@state("the operator has not read the newest spec yet")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.edit(service(NEW, 2))
    return seen(cluster)


@state("the spec is refused")
def _() -> dict[str, Any]:
    cluster = settled()
    broken = copy.deepcopy(cluster.obj)
    broken["spec"]["kvCache"] = {**broken["spec"]["kvCache"], "dtype": None, "mode": "Sometimes"}
    cluster.edit(broken)
    return after(cluster)


def trial(where: str, **changes: Any) -> ModelCluster:
    cluster = on_trial(2, **changes)
    cluster.until(stage(where))
    return cluster


@state("a canary is being probed")
def _() -> dict[str, Any]:
    return seen(trial("Probing"))


@state("a canary has a share of the traffic")
def _() -> dict[str, Any]:
    return seen(trial("Shifting"))


@state("a canary is being promoted")
def _() -> dict[str, Any]:
    return seen(trial("Promoting"))


@state("a canary is being rolled back")
def _() -> dict[str, Any]:
    return seen(trial("RollingBack", cluster={"bad": frozenset([NEW])}))


@state("the canary has been promoted, and pods of the old revision shut down")
def _() -> dict[str, Any]:
    cluster = on_trial(2)
    cluster.until(ended)
    return seen(cluster)


@state("a canary is paused")
def _() -> dict[str, Any]:
    cluster = trial("Probing")
    cluster.edit(service(NEW, 2, paused=True))
    return after(cluster)


@state("a change of the spec waits for a pause to end")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(OLD, 2, paused=True))
    cluster.settle()
    cluster.edit(service(NEW, 2, paused=True))
    return after(cluster)


@state("answers have drifted, and the rollback is paused")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(NEW, 2, paused=True))
    cluster.settle()
    spec, status = cluster.snapshot().spec, cluster.parsed()
    assert spec is not None
    drifted = Denied(
        dtype=NEW, model=spec.model.source, image=spec.engine.image, gpu="cpu", reason="AccuracyDrifted",
        recent_tokens=spec.kv_cache.recent_tokens_of(NEW), message="worse", until=cluster.now + timedelta(days=7),
    )  # fmt: skip
    kept = msgspec.structs.replace(status.kv_cache, denied=(drifted,))
    cluster.status = msgspec.structs.replace(status, kv_cache=kept).as_written()
    return after(cluster)


@state("a Fixed dtype is denied, the last good one serves")
def _() -> dict[str, Any]:
    cluster = on_trial(2, cluster={"bad": frozenset([NEW])})
    cluster.until(ended)
    return after(cluster)


@state("a change of the spec was rolled back")
def _() -> dict[str, Any]:
    cluster = on_trial(2, cluster={"slow": {NEW: 1.6}})
    cluster.until(ended)
    return after(cluster)


@state("a step of mode Auto was rolled back")
def _() -> dict[str, Any]:
    ladder = {"mode": "Auto", "ladder": [NEW], "pressure": {"sustainedSeconds": 30}}
    replicas = {"mode": "External", "minReplicas": 1, "maxReplicas": 4}
    cluster = ModelCluster(manifest(kvCache=ladder, scaling=replicas), bad=frozenset([NEW]), demand=9000)
    cluster.until(ended)
    last = cluster.parsed().last_trial
    assert last is not None
    assert last.verdict != "Passed"
    return after(cluster)


@state("no canary can start")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(OLD, 2, routeRef={"name": "web"}))
    cluster.settle()
    cluster.edit(service(NEW, 2, routeRef={"name": "web"}))
    return after(cluster)


@state("the API server refuses an object")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.refuses = lambda one: QUOTA if one["kind"] == "Deployment" else None
    cluster.edit(service(OLD, 3))
    return after(cluster)


@state("a probe set is missing")
def _() -> dict[str, Any]:
    return after(settled(probe_fault="configmap/prompts does not exist"))


@state("a change of the spec waits for a probe set that is missing")
def _() -> dict[str, Any]:
    cluster = settled(probe_fault="configmap/prompts does not exist")
    cluster.edit(service(NEW, 2))
    return after(cluster)


@state("replicas are added")
def _() -> dict[str, Any]:
    cluster = settled(start_ticks=10)
    cluster.edit(service(OLD, 3))
    return after(cluster)


@state("a replica keeps crashing")
def _() -> dict[str, Any]:
    cluster = Kubelet(service(OLD, 2))
    cluster.settle()
    down = {
        "ready": False,
        "containers_ready": False,
        "restarts": 3,
        "exit_message": "CUDA error: uncorrectable ECC error",
    }
    cluster.says = lambda number: down if number else {}
    return after(cluster)


@state("it is scaled to 0")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.edit(service(OLD, 0))
    return after(cluster, 20)


@state("a part of the last reconcile failed")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.unread = (unanswered(Question.NODE, ClusterError("GET", "/x", 403, "forbidden")),)
    return after(cluster)


@state("it is being deleted")
def _() -> dict[str, Any]:
    obj = seen(settled())
    return {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": "2026-11-21T12:00:00Z"}}
