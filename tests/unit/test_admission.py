"""Only pods of the serving revision, and of a canary that has passed its probes, may get requests."""

import asyncio
from dataclasses import replace

import pytest

from kvpilot_operator.act.gates import ungate
from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.names import ADMITTED
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import Conflict, NotFound, Rejected
from kvpilot_operator.observe.views import deployment_view, pod_view
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.decision import Decision, Ungating
from kvpilot_operator.state.objects import DeploymentView, ObjectView, Rejection
from kvpilot_operator.state.status import Canary, Status
from support.memory_api import MemoryApi
from support.services import KEY, NOW, manifest, pod, revision_of, running, snapshot, spec_of
from support.trials import NEW as ON_TRIAL
from support.trials import copied, ended, killed_before_each_write, on_trial, stage

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"}, replicas=2, scaling={"mode": "External"})
OLD, NEW = revision_of(OBJ, "auto"), revision_of(OBJ, "k4v4")
BAD = revision_of(OBJ, "k8v4")


def gates(at, *pods, traffic=OLD):
    trial = {"revision": NEW, "dtype": "k4v4", "from_dtype": "auto", "started_time": NOW, "stage_time": NOW}
    canary = Canary(**trial, stage=at) if at else None
    deployments = {name: DeploymentView(name, dtype, 2) for name, dtype in ((OLD, "auto"), (NEW, "k4v4"))}
    s = running(OBJ, "auto", status=Status(canary=canary), pods=pods, traffic=traffic, deployments=deployments)
    return dict(decide(s).gates)


def closed(revision, **changes):
    return pod(revision, ready=False, containers_ready=True, admitted=False, **changes)


def opened(revision, **changes):
    return pod(revision, containers_ready=True, admitted=True, **changes)


def test_a_pod_of_the_revision_that_serves_is_admitted_before_its_engine_answers():
    starting = replace(closed(OLD), ip=None, containers_ready=False)
    assert gates(None, starting) == {f"pod-{OLD}": True}


@pytest.mark.parametrize("stage", ["Starting", "Probing"])
def test_a_canarys_pod_is_not_admitted_before_its_probes_have_passed(stage):
    assert gates(stage, opened(OLD), closed(NEW)) == {}
    assert gates(stage, opened(OLD), opened(NEW)) == {f"pod-{NEW}": False}


@pytest.mark.parametrize("stage", ["Shifting", "Promoting"])
def test_a_canarys_pods_are_admitted_once_its_probes_have_passed(stage):
    assert gates(stage, opened(OLD), closed(NEW)) == {f"pod-{NEW}": True}


def test_a_rolled_back_canary_gets_no_requests_once_stable_pods_can_take_them():
    both = (opened(OLD, name="a"), opened(OLD, name="b"), opened(NEW))
    assert gates("RollingBack", *both, traffic="") == {f"pod-{NEW}": False}
    too_few = (replace(opened(OLD), ready=False, containers_ready=False), opened(NEW), closed(NEW, name="later"))
    assert gates("RollingBack", *too_few, traffic="") == {}


def test_gates_of_borrowed_and_terminating_pods_are_not_changed():
    assert gates("Probing", opened(OLD), closed(BAD), closed(NEW, terminating=True)) == {}


def test_a_pod_without_the_gate_is_never_written_to():
    assert gates("Shifting", pod(OLD), pod(NEW)) == {}


def test_without_a_serving_revision_no_gate_changes():
    paused = manifest(rollout={"paused": True})
    s = snapshot(paused, pods=(closed("strange"), opened("other")))
    assert dict(decide(s).gates) == {}


def test_an_answering_engine_is_probed_before_it_is_admitted():
    cluster = on_trial()
    canary = cluster.until(stage("Probing")).canary
    assert cluster.engines.answering(canary.revision) == 1
    assert cluster.engines.ready(canary.revision) == 0
    assert cluster.until(lambda status: status.accuracy.last is not None)


def test_the_gate_is_in_the_pods_and_not_in_the_revision():
    template = pod_template(KEY.name, spec_of(OBJ), "auto")
    made, bare = (workload(KEY, "u-1", template, 1, 600, has_gate=has_gate) for has_gate in (True, False))
    assert made["spec"]["template"]["spec"]["readinessGates"] == [{"conditionType": ADMITTED}]
    assert "readinessGates" not in bare["spec"]["template"]["spec"]
    assert revision(made["spec"]["template"]) == revision(bare["spec"]["template"]) == revision(template)
    assert (deployment_view(made).has_gate, deployment_view(bare).has_gate) == (True, False)


def test_only_a_canarys_pods_have_the_gate_from_the_start():
    cluster = on_trial()
    canary = cluster.until(stage("Starting")).canary
    views = cluster.api.workloads()
    assert {name: view.has_gate for name, view in views.items()} == {cluster.traffic: False, canary.revision: True}


def test_an_existing_workloads_template_neither_gains_nor_loses_the_gate():
    def decided(**view):
        there = {OLD: DeploymentView(OLD, "auto", 1, **view)}
        decision = decide(running(manifest(), "auto", deployments=there))
        made = next(one for one in decision.objects.apply if one["metadata"]["name"].endswith(OLD))
        return "readinessGates" in made["spec"]["template"]["spec"], decision.ungating

    assert decided(has_gate=False) == (False, None)
    assert decided(has_gate=True) == (True, Ungating(OLD, paused=True))
    assert decided(has_gate=False, paused=True, in_step=False) == (False, Ungating(OLD, paused=None))
    assert decided(has_gate=False, paused=True, in_step=True) == (False, Ungating(OLD, paused=False))


def test_a_deployment_is_in_step_once_its_controller_has_seen_that_all_pods_come_from_its_template():
    def view(paused, generation, **status):
        metadata = {"labels": {}, "generation": generation}
        return deployment_view({"metadata": metadata, "spec": {"paused": paused}, "status": status})

    seen = {"observedGeneration": 2, "replicas": 2}
    assert not view(True, 2, **seen).in_step
    assert not view(True, 3, **seen, updatedReplicas=2).in_step
    assert view(True, 2, **seen, updatedReplicas=2).in_step
    assert (view(True, 2).paused, view(False, 2).paused) == (True, False)


GATE = [{"conditionType": ADMITTED}]


def with_gate(kind, name, uid, owner):
    labels = {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": OLD}
    about = {"name": name, "uid": uid, "labels": labels, "ownerReferences": [{"uid": owner}]}
    pods = {"metadata": {"labels": labels}, "spec": {"readinessGates": GATE, "containers": []}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": about, "spec": {"replicas": 1, "template": pods}}


def test_a_gate_is_removed_from_a_paused_deployment_and_its_replica_set_before_it_continues():
    api, deployment = MemoryApi(), f"{KEY.name}-{OLD}"
    api.put(with_gate("Deployment", deployment, "d", "u-1"))
    api.put(with_gate("ReplicaSet", f"{deployment}-5d9", "r", "d"))
    api.put(with_gate("ReplicaSet", "theirs", "t", "somebody-else"))

    def step(paused):
        objects = {("Deployment", deployment): ObjectView("d", True, "1")}
        asyncio.run(ungate(api, snapshot(OBJ, objects=objects), Ungating(OLD, paused)))
        spec = api.objects["Deployment", deployment]["spec"]
        return spec["paused"], "readinessGates" in spec["template"]["spec"]

    def gated(name):
        return "readinessGates" in api.objects["ReplicaSet", name]["spec"]["template"]["spec"]

    assert step(True) == (True, False)
    assert (gated(f"{deployment}-5d9"), gated("theirs")) == (False, True)
    assert step(None) == (True, False)
    assert step(False) == (False, False)
    order = [kind for method, kind, _ in api.asked if method == "merge"]
    assert order == ["Deployment", "ReplicaSet", "Deployment"]


def test_pods_of_a_promoted_revision_need_no_operator_even_if_it_was_killed_after_any_write():
    cluster = on_trial()
    before = cluster
    while not ended(cluster.parsed()):
        before = copied(cluster)
        cluster.tick()
    for writes in range(cluster.writes - before.writes + 1):
        killed = copied(before)
        killed.tick(cut_after=writes)
        serves = killed.settle().stable.revision
        view = killed.api.workloads()[serves]
        assert (view.has_gate, view.paused) == (False, False)
        killed.engines.evict(serves)
        killed.engines.reconcile({serves: view.replicas}, {serves: view.has_gate})
        for _ in range(5):
            killed.engines.tick()
        assert killed.engines.ready(serves) == view.replicas


def test_a_formerly_serving_revision_starts_its_new_trial_with_the_gate():
    cluster = on_trial(cluster={"bad": frozenset({ON_TRIAL})})
    canary = cluster.until(stage("Starting")).canary.revision
    found = cluster.api.objects["Deployment", f"{KEY.name}-{canary}"]
    template = found["spec"]["template"]
    ungated = {name: value for name, value in template["spec"].items() if name != "readinessGates"}
    cluster.api.put({**found, "spec": {**found["spec"], "template": {**template, "spec": ungated}}})
    assert not cluster.api.workloads()[canary].has_gate
    cluster.tick()
    assert canary not in cluster.deployments
    cluster.tick()
    assert cluster.api.workloads()[canary].has_gate


def test_an_operator_that_may_not_change_replica_sets_reports_it():
    words = 'replicasets.apps is forbidden: User "x" cannot list resource "replicasets" in API group "apps"'
    refused = Rejection("ReplicaSet", f"{KEY.name}-{OLD}", "Forbidden", words)
    told = decide(running(manifest(), "auto", rejections=(refused,))).status.condition("Stalled")
    assert (told.status, told.reason) == ("True", "Forbidden")
    assert "give the operator this right" in told.message


def test_a_pods_view_distinguishes_open_closed_and_missing_gates():
    def view(gate, *conditions):
        gate = {"readinessGates": [{"conditionType": ADMITTED}]} if gate else {}
        told = [{"type": kind, "status": status} for kind, status in conditions]
        status = {"podIP": "10.0.0.1", "conditions": told}
        return pod_view({"metadata": {"name": "a"}, "spec": gate, "status": status})

    answers = ("ContainersReady", "True")
    assert view(False, answers, ("Ready", "True")).admitted is None
    waiting = view(True, answers, ("Ready", "False"))
    assert (waiting.admitted, waiting.ready, waiting.answers) == (False, False, True)
    assert view(True, answers, (ADMITTED, "False")).admitted is False
    assert view(True, answers, (ADMITTED, "True"), ("Ready", "True")).admitted is True
    assert not view(True, ("ContainersReady", "False"), (ADMITTED, "True")).answers


class Recorder:
    """API server that records the order of writes. A write to the pod `bad` raises an error."""

    def __init__(self, error=None):
        self.written, self._error = [], error

    async def apply(self, manifest, subresource=""):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Pod" and name == "bad" and self._error is not None:
            raise self._error
        condition = (manifest.get("status") or {}).get("conditions", [{}])[0]
        self.written.append((manifest["kind"], name, condition.get("status") if manifest["kind"] == "Pod" else None))
        return {"metadata": {"name": name, "uid": name}}

    async def find(self, *about):
        return None

    async def delete(self, *about, uid=""):
        raise AssertionError(f"unexpected deletion: {about}")

    async def create(self, manifest):
        return {"metadata": {"name": manifest["metadata"].get("name", "event"), "uid": "u"}}


def performed(gates, error=None):
    obj = manifest()
    s = running(obj, "auto", pods=tuple(closed(OLD, name=name) for name in ("bad", "good")))
    placed = decide(s)
    api = Recorder(error)
    actor = Actor(api)
    asyncio.run(actor.perform(s, Decision(placed.status, objects=placed.objects, gates=gates)))
    return api.written, actor.rejections


def test_gates_are_opened_after_the_status_and_closed_after_the_traffic_has_moved():
    written, _ = performed({"good": True, "bad": False})
    kinds = [kind for kind, _, _ in written]
    assert kinds[0] == "QuantizedLLMService"
    assert written[1] == ("Pod", "good", "True")
    assert written[-1] == ("Pod", "bad", "False")
    assert "Service" in kinds[2:-1]


@pytest.mark.parametrize("error", [NotFound("PATCH", "bad", 404, "gone"), Conflict("PATCH", "bad", 409, "another uid")])
def test_a_pod_that_was_just_deleted_does_not_block_the_admission_of_others(error):
    written, refused = performed({"bad": True, "good": True}, error)
    assert ("Pod", "good", "True") in written
    assert refused == ()


def test_an_operator_that_may_not_write_a_pods_status_reports_it():
    words = 'pods "bad" is forbidden: User "x" cannot patch resource "pods/status" in API group ""'
    _, refused = performed({"bad": True, "good": True}, Rejected("PATCH", "bad", 403, words, "Forbidden"))
    assert [(one.kind, one.name) for one in refused] == [("Pod", "bad")]
    s = running(manifest(), "auto", pods=(closed(OLD, name="bad"),), rejections=refused)
    told = decide(s).status.condition("Stalled")
    assert (told.status, told.reason) == ("True", "Forbidden")
    assert "give the operator this right" in told.message


class Everybody:
    """Check after every write: only pods of a revision that serves, or has passed its probes, are ready."""

    def __init__(self):
        self.passed: set[str] = set()
        self.served = False

    def __call__(self, cluster):
        status = cluster.parsed()
        self.passed |= {status.stable.revision} if status.stable is not None else set()
        if status.canary is not None and status.canary.stage in ("Shifting", "Promoting"):
            self.passed.add(status.canary.revision)
        ready = {one.revision for one in cluster.engines.views() if one.ready}
        assert ready <= self.passed, (ready, self.passed, status.canary)
        assert ready or not self.served, "nobody answers any more"
        self.served = bool(ready)


@pytest.mark.parametrize("bad", [frozenset(), frozenset({ON_TRIAL})])
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_unprobed_pod_is_never_ready_even_if_the_operator_is_killed_after_any_write(bad, replicas):
    end = "RolledBack" if bad else "Promoted"
    killed_before_each_write(lambda: on_trial(replicas, cluster={"bad": bad, "drain_ticks": 1}), Everybody, end)


@pytest.mark.parametrize("where", ["Probing", "Promoting"])
def test_replaced_pods_of_the_serving_revision_are_admitted_while_the_spec_is_refused(where: str) -> None:
    cluster = on_trial()
    cluster.until(stage(where))
    if where == "Promoting":
        cluster.until(lambda _: cluster.traffic == cluster.status["canary"]["revision"])
    serves, waits = cluster.traffic, cluster.status["canary"]["revision"]
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    for name, (_, replicas) in cluster.deployments.items():
        for _ in range(replicas):
            cluster.engines.evict(name)
    for _ in range(10):
        cluster.tick()
    s = cluster.snapshot()
    assert len(s.ready_pods(serves)) == cluster.deployments[serves][1]
    assert len(s.answering_pods(waits)) == cluster.deployments[waits][1]
    assert where == "Promoting" or not s.ready_pods(waits)
