"""The operator never writes or deletes objects that the service does not own, even if they existed first."""

from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.names import KIND, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.errors import Conflict, Rejected
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.decision import Decision, Objects
from kvpilot_operator.state.objects import DeploymentView, ObjectView
from support.memory_api import MemoryApi, Operator
from support.services import KEY, manifest, revision_of, snapshot, spec_of

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "auto"})
REVISION = revision_of(OBJ, "auto")
DEPLOYMENT = f"chat-{REVISION}"
CANARY = "chat-canary"


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    one = Operator(MemoryApi(), OBJ)
    yield one
    await one.close()


async def served(operator: Operator) -> None:
    for _ in range(3):
        await operator.reconcile()
        operator.api.run_engines()
    await operator.reconcile()
    assert operator.condition("Ready").status == "True"


def users(kind: str, name: str, **labels: str) -> dict[str, Any]:
    """Return a user's own object, which may carry our label."""
    spec = {"selector": {"app": "shop"}, "ports": [{"port": 8080}]}
    return {"kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


async def test_every_object_has_the_services_uid_as_its_owner(operator: Operator) -> None:
    await served(operator)
    made = {what: obj for what, obj in operator.api.objects.items() if what[0] not in ("Pod", KIND)}
    budget = ("PodDisruptionBudget", "chat")
    assert set(made) == {("Deployment", DEPLOYMENT), ("Service", "chat"), budget}
    assert all([owner["uid"] for owner in obj["metadata"]["ownerReferences"]] == ["u-1"] for obj in made.values())
    assert made["Service", "chat"]["spec"]["selector"] == {SERVICE_LABEL: "chat", REVISION_LABEL: REVISION}


async def test_a_reconcile_without_changes_sends_no_request(operator: Operator) -> None:
    await served(operator)
    await operator.reconcile()
    operator.api.asked.clear()
    for _ in range(20):
        await operator.reconcile()
    assert operator.api.asked == []


@pytest.mark.parametrize("labels", [{}, {SERVICE_LABEL: "chat"}], ids=["seen by no watch", "with our label"])
@pytest.mark.parametrize(("kind", "name"), [("Service", "chat"), ("Deployment", DEPLOYMENT)])
async def test_an_older_object_with_our_name_is_not_changed_and_ready_gives_the_reason(
    operator: Operator, kind: str, name: str, labels: dict[str, str]
) -> None:
    before = operator.api.put(users(kind, name, **labels))
    for _ in range(4):
        await operator.reconcile()
        if kind == "Service":
            operator.api.run_engines()
    assert operator.api.objects[kind, name] == before
    for condition in map(operator.condition, ("Ready", "Serving", "Stalled")):
        assert condition.reason == "NameTaken"
        assert f"{kind} models/{name} exists" in condition.message
        assert "rename the QuantizedLLMService" in condition.message


async def test_a_kubernetes_service_recreated_by_another_owner_keeps_its_selector(
    operator: Operator,
) -> None:
    await served(operator)
    operator.api.drop("Service", "chat")
    theirs = operator.api.put(users("Service", "chat"))
    for _ in range(4):
        await operator.reconcile()
    assert operator.api.objects["Service", "chat"] == theirs
    assert operator.condition("Ready").reason == "NameTaken"
    operator.api.drop("Service", "chat")
    for _ in range(30):
        await operator.reconcile()
    assert operator.condition("Ready").status == "True"
    assert operator.condition("Stalled").status == "False"


async def test_a_users_canary_service_is_neither_taken_over_nor_deleted(operator: Operator) -> None:
    await served(operator)
    theirs = operator.api.put(users("Service", CANARY, **{SERVICE_LABEL: "chat"}))
    edited = manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, canary={"routeRef": {"name": "web"}})
    operator.edit(edited)
    rules = [{"backendRefs": [{"name": "chat", "weight": 95}, {"name": CANARY, "weight": 5}]}]
    for route in ({"kind": "HTTPRoute", "metadata": {"name": "web"}, "spec": {"rules": rules}}, None):
        if route is None:
            operator.api.drop("HTTPRoute", "web")
        else:
            operator.api.put(route)
        for _ in range(3):
            await operator.reconcile()
        assert operator.api.objects["Service", CANARY] == theirs


@pytest.mark.parametrize("kind", ["Service", "Deployment"])
async def test_another_owner_who_creates_the_object_just_before_our_write_keeps_the_name(
    operator: Operator, kind: str
) -> None:
    """Check that the server itself refuses to merge into a Deployment whose immutable selector differs."""
    name = {"Service": "chat", "Deployment": DEPLOYMENT}[kind]
    theirs: list[Any] = []

    def quicker(method: str, what: tuple[str, str]) -> None:
        if what == (kind, name) and not theirs:
            theirs.append(operator.api.put(users(*what)))
            if kind == "Deployment":
                immutable = (("spec.selector", "Invalid value: {}: field is immutable"),)
                raise Rejected("PATCH", name, 422, "invalid", "Invalid", immutable)

    operator.api.before_write = quicker
    with pytest.raises(Conflict) if kind == "Service" else nullcontext():
        for _ in range(2):
            await operator.reconcile()
    for _ in range(3):
        await operator.reconcile()
    assert operator.api.objects[kind, name] == theirs[0]
    assert operator.condition("Stalled").reason == "NameTaken"


DELETED = Objects((), {}, frozenset())
SCALED = Objects((), {REVISION: 2}, frozenset({REVISION}))
APPLIED = Objects(
    (workload(KEY, "u-1", pod_template(KEY.name, spec_of(OBJ), "auto"), 2, 600),), {}, frozenset({REVISION})
)


@pytest.mark.parametrize("objects", [DELETED, SCALED, APPLIED], ids=["delete", "scale", "apply"])
async def test_a_write_changes_only_the_object_that_was_observed(objects: Objects) -> None:
    api = MemoryApi()
    theirs = api.put(users("Deployment", DEPLOYMENT))
    s = snapshot(
        OBJ,
        deployments={REVISION: DeploymentView(REVISION, "auto", 1)},
        objects={("Deployment", DEPLOYMENT): ObjectView("the one that was seen", True, "1")},
    )
    with pytest.raises(Conflict):
        await Actor(api).perform(s, Decision(s.status, objects))  # type: ignore[arg-type]
    assert api.objects["Deployment", DEPLOYMENT] == theirs


async def test_labels_that_another_writer_adds_to_our_selector_are_removed(operator: Operator) -> None:
    await served(operator)
    mixed = operator.api.objects["Service", "chat"]
    operator.api.put({**mixed, "spec": {**mixed["spec"], "selector": {**mixed["spec"]["selector"], "app": "shop"}}})
    decision = await operator.reconcile()
    available = decision.status.condition("Serving")
    assert available is not None
    assert (available.status, available.reason) == ("False", "TrafficMoving")
    assert operator.api.objects["Service", "chat"]["spec"]["selector"] == {
        SERVICE_LABEL: "chat",
        REVISION_LABEL: REVISION,
    }
    await operator.reconcile()
    assert operator.condition("Ready").status == "True"


async def test_a_service_waits_until_objects_of_its_predecessor_are_deleted(operator: Operator) -> None:
    earlier = users("Service", "chat", **{SERVICE_LABEL: "chat"})
    earlier["metadata"]["ownerReferences"] = [{"kind": KIND, "name": "chat", "uid": "u-0"}]
    operator.api.put(earlier)
    with pytest.raises(Conflict, match="belongs to an earlier service"):
        await operator.reconcile()
    operator.api.drop("Service", "chat")
    await served(operator)


GROUPS = manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, engine={"nodes": 2})
SET = f"chat-{revision_of(GROUPS, 'auto')}"


@pytest.fixture
async def groups(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    monkeypatch.setattr(InformerCache, "serves_groups", lambda *_: True)
    one = Operator(MemoryApi(), GROUPS)
    yield one
    await one.close()


def is_there(operator: Operator) -> set[tuple[str, str]]:
    return {what for what in operator.api.objects if what[0] in ("LeaderWorkerSet", "Service")}


async def test_the_headless_service_is_claimed_before_its_group_and_deleted_with_it(groups: Operator) -> None:
    await groups.reconcile()
    names = groups.api.objects["Service", SET]
    assert [owner["uid"] for owner in names["metadata"]["ownerReferences"]] == ["u-1"]
    assert names["spec"]["selector"] == {"leaderworkerset.sigs.k8s.io/name": SET}
    writes = [what for method, *what in groups.api.writes() if method in ("create", "apply")]
    assert writes.index(["Service", SET]) < writes.index(["LeaderWorkerSet", SET])
    groups.api.asked.clear()
    for _ in range(5):
        await groups.reconcile()
    assert {method for method, *_ in groups.api.writes()} <= {"apply status"}
    groups.edit(manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, engine={"nodes": 3}))
    for _ in range(5):
        await groups.reconcile()
    assert ("LeaderWorkerSet", SET) not in is_there(groups)
    assert ("Service", SET) not in is_there(groups)


async def test_no_group_starts_if_another_owner_has_its_headless_service(groups: Operator) -> None:
    theirs = groups.api.put(users("Service", SET))
    for _ in range(3):
        await groups.reconcile()
    assert ("LeaderWorkerSet", SET) not in is_there(groups)
    assert groups.api.objects["Service", SET] == theirs
    for condition in map(groups.condition, ("Ready", "Stalled")):
        assert condition.reason == "NameTaken"
        assert f"it needs Service models/{SET}, which exists" in condition.message
    groups.api.drop("Service", SET)
    await groups.reconcile(90)
    assert ("LeaderWorkerSet", SET) in is_there(groups)


async def test_a_group_whose_headless_service_belongs_to_its_set_can_grow(groups: Operator) -> None:
    await groups.reconcile()
    groups.api.drop("Service", SET)
    made = groups.api.objects["LeaderWorkerSet", SET]["metadata"]["uid"]
    names = users("Service", SET)
    names["metadata"]["ownerReferences"] = [{"kind": "LeaderWorkerSet", "name": SET, "uid": made}]
    before = groups.api.put(names)
    groups.edit(manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, engine={"nodes": 2}, replicas=3))
    await groups.reconcile()
    assert groups.api.objects["LeaderWorkerSet", SET]["spec"]["replicas"] == 3
    assert groups.api.objects["Service", SET] == before
