"""Replicas over several nodes: revisions are LeaderWorkerSets, only leaders are engines, and trials stay the same."""

import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.act.ownership import claim
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import GROUP_LABEL, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.decide import decide
from kvpilot_operator.observe.api_reads import not_served
from kvpilot_operator.observe.views import deployment_view, is_ours, leader_name, pod_view
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import workload
from kvpilot_operator.render.workloads import KINDS, LEADER_WORKER_SET, worker_template
from kvpilot_operator.state.objects import DeploymentView
from support.crd import apply_defaults
from support.model_cluster import ModelCluster
from support.observed import OURS, World
from support.services import KEY, manifest, pod, revision_of, running, spec_of
from support.trials import (
    BUSY,
    NEW,
    OLD,
    STEPS,
    at_every_moment,
    edit,
    ended,
    killed_before_each_write,
    on_trial,
    service,
    stage,
)

OBJ = manifest(
    engine={
        "nodes": 2,
        "tensorParallelSize": 8,
        "podTemplate": {"spec": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}},
    }
)


def template(obj=OBJ, dtype="auto"):
    return pod_template(KEY.name, spec_of(obj), dtype)


def engine_of(made):
    return next(one for one in made["spec"]["containers"] if one["name"] == "engine")


def grouped(replicas=2, *, cluster=None, steps=()):
    """Return a trial of a service whose replicas are groups of two pods."""
    made = ModelCluster(over(2, service(OLD, replicas, steps=list(steps))), **{"start_ticks": 2, **(cluster or {})})
    made.settle()
    edit(made, kvCache={"mode": "Fixed", "dtype": NEW})
    return made


def over(nodes, obj):
    engine = {**obj["spec"]["engine"], "nodes": nodes}
    return apply_defaults({**obj, "spec": {**obj["spec"], "engine": engine}})


def kinds(cluster):
    return {one.kind for one in cluster.api.workloads().values()}


def test_a_worker_has_no_label_by_which_it_would_get_requests():
    leader = template()
    worker = worker_template(leader)
    assert leader["metadata"]["labels"][SERVICE_LABEL] == KEY.name
    assert SERVICE_LABEL not in worker["metadata"]["labels"]
    assert {one["metadata"]["labels"][GROUP_LABEL] for one in (leader, worker)} == {KEY.name}
    assert {one["metadata"]["labels"][REVISION_LABEL] for one in (leader, worker)} == {revision(leader)}
    asked, led = engine_of(leader), engine_of(worker)
    assert set(asked) - set(led) == {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    both = {"--tensor-parallel-size=8", "--pipeline-parallel-size=2", "--nnodes=2"}
    both |= {"--master-addr=$(LWS_LEADER_ADDRESS)", "--distributed-executor-backend=mp"}
    assert both <= set(asked["args"]) & set(led["args"])
    assert set(asked["args"]) - set(led["args"]) == {"--node-rank=0"}
    assert set(led["args"]) - set(asked["args"]) == {"--node-rank=$(LWS_WORKER_INDEX)", "--headless"}
    assert asked["resources"] == led["resources"]
    assert worker["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == {GROUP_LABEL: KEY.name}


def test_a_replica_on_one_node_is_a_plain_deployment():
    one = pod_template(KEY.name, spec_of(manifest()), "auto")
    assert GROUP_LABEL not in one["metadata"]["labels"]
    assert not any("node" in argument for argument in engine_of(one)["args"])


def test_a_multi_node_revision_is_a_leader_worker_set_that_recreates_whole_groups():
    made = workload(KEY, "u-1", template(), 3, 600, nodes=2)
    assert (made["apiVersion"], made["kind"]) == (LEADER_WORKER_SET.api_version, "LeaderWorkerSet")
    parts = made["spec"]["leaderWorkerTemplate"]
    assert (made["spec"]["replicas"], parts["size"]) == (3, 2)
    assert parts["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert parts["leaderTemplate"]["spec"]["readinessGates"] == [{"conditionType": "kvpilot.io/admitted"}]
    assert "readinessGates" not in parts["workerTemplate"]["spec"]
    # No other pod may match the selector of a Service, a pool or a scrape.
    assert json.dumps(parts["workerTemplate"]).count(SERVICE_LABEL) == 0
    assert claim(made)["spec"] == made["spec"]


OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "controller": True}


@given(st.sampled_from(["chat-r1", "chat-r1-0", "chat-r1-5d9", "chat-r2", "chatter-r1", ""]), st.booleans())
def test_the_owning_stateful_set_decides_the_group_of_a_pod(name, controller):
    owner = {**OWNER, "name": name, "controller": controller}
    one = {"metadata": {"labels": {REVISION_LABEL: "r1"}, "ownerReferences": [owner]}}
    assert is_ours(one, "chat") == (controller and name == "chat-r1")
    leads = controller and name.startswith("chat-r1-")
    assert leader_name(one, "chat") == (name if leads else None)


def of_group(name, owner, labels, **status):
    about = {"name": name, "namespace": KEY.namespace, "ownerReferences": [{**OWNER, "name": owner}]}
    return {"kind": "Pod", "metadata": {**about, "labels": {**labels, REVISION_LABEL: "r2"}}, "status": status}


async def test_workers_appear_only_with_their_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    labels = {SERVICE_LABEL: KEY.name, GROUP_LABEL: KEY.name}
    about = {"name": "chat-r2", "namespace": KEY.namespace, "labels": {**labels, REVISION_LABEL: "r2"}, **OURS}
    made = workload(KEY, "u-1", template(), 3, 600, nodes=2)
    world.put({**made, "metadata": {**about, "generation": 4}})
    world.put(of_group("chat-r2-0", "chat-r2", labels), of_group("chat-r2-1", "chat-r2", labels))
    waits = [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no node"}]
    worker = of_group("chat-r2-0-1", "chat-r2-0", {GROUP_LABEL: KEY.name}, conditions=waits)
    stranger = of_group("odd", "odd", {GROUP_LABEL: KEY.name})
    for one in (worker, stranger):
        world.cache._workers.put(one)
    found = await world.snapshot()
    assert {one.name: [w.name for w in one.workers] for one in found.pods} == {
        "a": [], "chat-r2-0": ["chat-r2-0-1"], "chat-r2-1": [],
    }  # fmt: skip
    assert next(one for one in found.pods if one.workers).workers[0].unschedulable == "no node"
    view = found.deployments["r2"]
    assert (view.kind, view.nodes, view.replicas, view.has_gate) == ("LeaderWorkerSet", 2, 3, True)
    assert found.objects["LeaderWorkerSet", "chat-r2"].version == "4"


def test_nodes_above_1_are_refused_without_the_leader_worker_set_crd():
    spec = spec_of(OBJ)
    [told] = not_served(spec, False)
    assert told.field == "spec.engine.nodes"
    assert "install LeaderWorkerSet" in told.message
    assert "set nodes to 1" in told.message
    assert not not_served(spec, True)
    assert not not_served(spec_of(manifest()), False)
    assert not faults(OBJ)


@pytest.mark.parametrize(("bad", "end"), [(frozenset(), "Promoted"), (frozenset({NEW}), "RolledBack")])
def test_a_trial_of_groups_ends_the_same_even_if_the_operator_is_killed(bad, end):
    def always(cluster):
        at_every_moment(cluster)
        assert kinds(cluster) == {"LeaderWorkerSet"}

    killed_before_each_write(lambda: grouped(cluster={"bad": bad}), lambda: always, end)


@pytest.mark.parametrize("steps", [[], STEPS])
def test_a_canarys_group_starts_again_without_a_gate_before_it_gets_requests(steps):
    cluster = grouped(3, cluster={"requests": BUSY, "demand": 1}, steps=steps)
    gates, asked, removed = [], [], []

    def watch(cluster):
        at_every_moment(cluster)
        removed.append(decide(cluster.snapshot()).objects.removed)
        canary = cluster.parsed().canary
        view = cluster.api.workloads().get(canary.revision) if canary is not None else None
        if view is not None:
            gates.append((view.has_gate, canary.stage in ("Shifting", "Promoting")))
            pods = [one for one in cluster.engines.pods if one.revision == canary.revision]
            asked.extend(one.gated for one in pods if one.name in {p.name for p in cluster.snapshot().pods if p.ready})

    cluster.watch = watch
    cluster.until(ended)
    serves = cluster.settle().stable.revision
    assert serves == cluster.status["history"][0]["revision"]
    # A server-side apply cannot remove the readiness gate, because another field manager has set it, too.
    name = ("LeaderWorkerSet", f"chat-{serves}")
    without = {"leaderTemplate": {"spec": {"readinessGates": None}}}
    assert next(filter(None, removed)) == {name: {"leaderWorkerTemplate": without}}
    # The template changes once, after the status says that the probes have passed.
    assert [one for one, before in pairwise(gates) if one[0] != before[0]] == [(True, True)]
    assert asked
    assert not any(asked)
    view = cluster.api.workloads()[serves]
    assert not view.has_gate
    # No operator runs from here on.
    for _ in range(view.replicas):
        cluster.engines.evict(serves)
        cluster.engines.reconcile({serves: view.replicas}, {serves: view.has_gate})
        for _ in range(5):
            cluster.engines.tick()
        assert cluster.engines.ready(serves) == view.replicas


def test_a_refused_spec_opens_no_gate_of_a_group_that_must_restart():
    cluster = grouped(2)
    canary = cluster.until(stage("Probing")).canary
    view = cluster.api.workloads()[canary.revision]
    assert view.has_gate
    passed = msgspec.structs.replace(canary, stage="Promoting")
    waits = pod(canary.revision, ready=False, containers_ready=True, admitted=False)
    s = cluster.snapshot()
    status = msgspec.structs.replace(s.status, canary=passed)
    for spec in (s.spec, None):
        told = decide(replace(s, status=status, spec=spec, pods=(*s.pods_of(s.traffic), waits)))
        assert waits.name not in told.gates


def test_a_route_over_pools_gives_a_canary_of_groups_its_share():
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": KEY.name}
    cluster = grouped(3, cluster={"requests": BUSY, "rules": [{"backendRefs": [pool]}]})
    canary = {**cluster.obj["spec"]["canary"], "steps": STEPS, "routeRef": {"name": "web"}}
    edit(cluster, inferencePool={}, canary=canary, kvCache={"mode": "Fixed", "dtype": OLD})
    cluster.settle()
    cluster.watch = at_every_moment
    edit(cluster, kvCache={"mode": "Fixed", "dtype": NEW})
    revision = cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None).canary.revision
    assert kinds(cluster) == {"LeaderWorkerSet"}
    assert cluster.pools[f"{KEY.name}-canary"] == {SERVICE_LABEL: KEY.name, REVISION_LABEL: revision}
    assert {ref["name"]: ref["weight"] for ref in cluster.rules[0]["backendRefs"]} == {"chat": 75, "chat-canary": 25}
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"


def test_leaders_and_workers_load_the_adapters_that_the_status_names():
    obj = manifest(engine={"nodes": 2}, model={"adapters": [{"name": "sql", "source": "hf://acme/sql"}]})
    leader = template(obj)
    for made in (leader, worker_template(leader)):
        arguments = engine_of(made)["args"]
        assert arguments[arguments.index("--enable-lora") - 1] == "sql=acme/sql"
    view = deployment_view(workload(KEY, "u-1", leader, 1, 600, nodes=2), "LeaderWorkerSet")
    assert view.adapters == ("sql",)


def test_a_service_can_change_between_one_node_and_several_by_trials():
    cluster = on_trial(2, steps=[])
    cluster.until(ended)
    cluster.settle()
    cluster.watch = at_every_moment
    seen = set()
    for nodes in (2, 1):
        edit(cluster, engine={**cluster.obj["spec"]["engine"], "nodes": nodes})
        for _ in range(300):
            cluster.tick()
            seen.add(frozenset(kinds(cluster)))
            if {one.nodes for one in cluster.api.workloads().values()} == {nodes}:
                break
        cluster.settle()
    assert frozenset({"Deployment", "LeaderWorkerSet"}) in seen
    assert kinds(cluster) == {"Deployment"}


@given(nodes=st.integers(2, 8), replicas=st.integers(2, 6), most=st.sampled_from([0, 1, 3, "25%", "100%"]))
def test_the_budget_of_groups_allows_as_many_missing_pods_as_groups(nodes, replicas, most):
    obj = manifest(engine={"nodes": nodes}, replicas=replicas, disruption={"maxUnavailable": most},
                   scaling={"mode": "External"}, kvCache={"mode": "Fixed", "dtype": "auto"})  # fmt: skip
    name = revision_of(obj, "auto")
    view = DeploymentView(name, "auto", replicas, kind="LeaderWorkerSet", nodes=nodes)
    told = decide(running(obj, "auto", deployments={name: view}))
    budgets = [one["spec"] for one in told.objects.apply if one["kind"] == "PodDisruptionBudget"]
    [budget] = budgets
    assert budget["maxUnavailable"] == {"25%": -(-replicas // 4), "100%": replicas}.get(most, most)
    assert budget["selector"]["matchLabels"] == {GROUP_LABEL: KEY.name, REVISION_LABEL: name}


def test_an_unschedulable_worker_delays_its_group_and_its_refusal_is_reported():
    cluster = grouped()
    cluster.until(stage("Starting"))
    canary = cluster.parsed().canary.revision
    refused = '{"kvpilot": "refused", "reason": "DoesNotFit", "message": "too large"}'
    s = cluster.snapshot()
    leader = pod(canary, ready=False, name=f"chat-{canary}-0")
    for changes in ({"terminating": False}, {"terminating": True}):
        worker = replace(leader, name=f"{leader.name}-1", exit_message=refused, **changes)
        group = replace(leader, workers=(worker,), **changes)
        told = decide(replace(s, pods=(*s.pods_of(s.traffic), group)))
        assert (told.status.canary.stage, told.status.canary.reason) == ("RollingBack", "DoesNotFit")


def test_every_kind_of_workload_can_be_rendered_and_viewed():
    for kind in KINDS.values():
        made = workload(KEY, "u-1", template(), 1, 600, nodes=1 if kind.name == "Deployment" else 2)
        assert made["kind"] == kind.name
        assert kind.pod_template(made)["spec"]["containers"]
        assert pod_view({"metadata": {"name": "p", **kind.pod_template(made)["metadata"]}}).revision
    assert msgspec.structs.asdict(spec_of(OBJ).engine)["nodes"] == 2
