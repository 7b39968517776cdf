"""A decision's writes have an order that survives a crash at any point, and never override a user's edit."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvpilot_operator.act.perform import FIGURES_SECONDS, REAPPLY_SECONDS, Actor
from kvpilot_operator.api.names import HTTP_ROUTE_API, REVISION_LABEL
from kvpilot_operator.api.words import ConditionType
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import Conflict
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import disruption_budget, route_rules, service, workload
from kvpilot_operator.state.decision import Decision, Event, Objects
from kvpilot_operator.state.objects import DeploymentView, ObjectView, RouteView
from kvpilot_operator.state.status import Condition, KVCache, Status
from support.services import KEY, NOW, manifest, snapshot, spec_of

OBJ = manifest()
OLD, NEW = pod_template(KEY.name, spec_of(OBJ), "auto"), pod_template(KEY.name, spec_of(OBJ), "k4v4")
ROUTE = RouteView("web", "41", ({"backendRefs": [{"name": "chat"}]},))


class Recorder:
    """API server that records every write. It can read back written objects and those in `there`."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, ...]] = []
        self.patches: list[dict[str, Any]] = []
        self.route_version = "41"
        self.there: set[tuple[str, str]] = set()

    async def apply(self, manifest: Any, *, subresource: str = "") -> dict[str, Any]:
        self.writes.append(("apply", manifest["kind"], manifest["metadata"]["name"]))
        self.there.add((manifest["kind"], manifest["metadata"]["name"]))
        return {"metadata": {"uid": "o-1", "generation": 1, "resourceVersion": "10"}}

    async def merge(self, ref: Ref, patch: Any) -> None:
        if ref.kind == "HTTPRoute" and patch["metadata"]["resourceVersion"] != self.route_version:
            raise Conflict("PATCH", ref.name, 409, "changed")
        self.writes.append(("merge", ref.kind, ref.name))
        self.patches.append(patch)

    async def find(self, ref: Ref) -> dict[str, Any] | None:
        ours = {"metadata": {"name": ref.name, "uid": "o-1", "ownerReferences": [{"uid": "u-1"}]}}
        return ours if (ref.kind, ref.name) in self.there else None

    async def delete(self, ref: Ref, *, uid: str = "") -> None:
        self.writes.append(("delete", ref.kind, ref.name))
        self.there.discard((ref.kind, ref.name))

    async def create(self, manifest: Any) -> dict[str, Any]:
        self.writes.append(("create", manifest["kind"], manifest["metadata"].get("name", "")))
        return {"metadata": {"name": "e1", "uid": "o-1"}}


def made(template, replicas):
    return workload(KEY, "u-1", template, replicas, 600)


def observed(**replicas: int):
    views = {name: DeploymentView(name, "auto", count) for name, count in replicas.items()}
    objects = {("Deployment", f"chat-{name}"): ObjectView(f"d-{name}", True, "1") for name in replicas}
    objects["Service", "chat"] = ObjectView("s-1", True, "10", revision(OLD))
    return snapshot(OBJ, deployments=views, objects=objects, traffic=revision(OLD), route=ROUTE)


async def performed(objects: Objects, s=None, recorder: Recorder | None = None, clock=lambda: 0.0) -> Recorder:
    recorder = recorder or Recorder()
    s = s or observed(**{revision(OLD): 1})
    await Actor(recorder, clock).perform(s, Decision(s.status, objects))
    return recorder


async def test_engines_are_added_before_traffic_moves_and_removed_after_it():
    shared = service(KEY, "u-1", "chat", "")
    objects = Objects((made(NEW, 1), shared, made(OLD, 1)), {"up": 3, "down": 1}, frozenset({"up", "down"}))
    recorder = await performed(objects, observed(up=2, down=2, gone=1))
    new, old = (f"chat-{revision(template)}" for template in (NEW, OLD))
    assert [write[2] for write in recorder.writes] == ["chat-up", new, "chat", old, "chat-down", "chat-gone"]


async def test_only_the_rules_of_a_users_route_are_written_and_only_if_it_is_unchanged():
    rules = ({"backendRefs": [{"name": "chat", "weight": 95}, {"name": "chat-canary", "weight": 5}]},)
    objects = Objects((route_rules(KEY, ROUTE, rules),), {}, frozenset())
    recorder = await performed(objects)
    [patch] = recorder.patches
    assert patch == {
        "apiVersion": HTTP_ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": {"name": "web", "namespace": KEY.namespace, "resourceVersion": "41"},
        "spec": {"rules": list(rules)},
    }
    changed = Recorder()
    changed.route_version = "42"
    with pytest.raises(Conflict):
        await performed(objects, recorder=changed)
    assert changed.writes == []


def figures(number: int, *, status: str = "True") -> Status:
    """Return the status with every figure changed, as if the engines had reported other numbers."""
    said = f"KV capacity {number} tokens"
    kinds = (ConditionType.METRICS_AVAILABLE, ConditionType.MEMORY_PRESSURED, ConditionType.OBJECTIVES_HELD)
    return Status(
        kv_cache=KVCache(capacity_tokens=number, usage_percent=number % 100),
        conditions=tuple(
            Condition(
                type=kind, status=status, reason="R", message=said, last_transition_time=NOW, observed_generation=1
            )
            for kind in kinds
        ),
    )


class Written:
    """An actor, its clock and the status that it has written."""

    def __init__(self) -> None:
        self.now, self.recorder = 0.0, Recorder()
        self.actor = Actor(self.recorder, lambda: self.now)
        self.s = replace(observed(), status=figures(0))

    async def perform(self, status: Status, *events: Event) -> None:
        before = len(self.written)
        await self.actor.perform(self.s, Decision(status, events=events))
        if len(self.written) > before:
            self.s = replace(self.s, status=status)

    @property
    def written(self) -> list[tuple[str, ...]]:
        return [one for one in self.recorder.writes if one[1] == "QuantizedLLMService"]

    @property
    def posted(self) -> list[tuple[str, ...]]:
        return [one for one in self.recorder.writes if one[1] == "Event"]


async def test_new_figures_are_written_to_status_and_events_at_most_twice_a_minute():
    one = Written()
    for second in range(60):
        one.now = float(second)
        await one.perform(figures(second + 1), Event("Warning", "Said", f"figure {second}"))
    assert len(one.written) == len(one.posted) == 2
    one.now = 2 * FIGURES_SECONDS
    await one.perform(figures(100))
    assert one.s.status == figures(100)


async def test_a_decision_is_written_to_the_status_at_once_with_the_figures_of_its_moment():
    one = Written()
    await one.perform(figures(1))
    await one.perform(figures(2))
    assert one.s.status == figures(1)
    await one.perform(figures(3, status="False"), Event("Warning", "Pressured", "so"))
    assert one.s.status == figures(3, status="False")
    assert len(one.posted) == 1
    unknown = msgspec.structs.replace(one.s.status, kv_cache=KVCache())
    await one.perform(unknown)
    assert one.s.status == unknown


async def test_an_unwanted_object_is_deleted_once():
    recorder, budget = Recorder(), ("PodDisruptionBudget", "chat")
    recorder.there.add(budget)
    gone = Objects((), {}, frozenset(), (("policy/v1", *budget),))
    actor, s = Actor(recorder, lambda: 0.0), observed()
    for _ in range(3):
        await actor.perform(s, Decision(s.status, gone))
    assert recorder.writes == [("delete", *budget)]
    there = Objects((disruption_budget(KEY, "u-1", "x", 1),), {}, frozenset())
    await actor.perform(s, Decision(s.status, there))
    await actor.perform(s, Decision(s.status, gone))
    assert recorder.writes[1:] == [("create", *budget), ("apply", *budget), ("delete", *budget)]


async def test_an_unchanged_object_is_applied_again_only_after_some_time():
    now = [0.0]
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: now[0]), observed()
    shared = Objects((service(KEY, "u-1", "chat", revision(OLD)),), {}, frozenset())
    for now[0] in (0.0, 1.0, REAPPLY_SECONDS + 1):
        await actor.perform(s, Decision(s.status, shared))
    assert len(recorder.writes) == 2


async def test_a_kubernetes_service_changed_by_others_is_repaired_at_once():
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: 0.0), observed()
    mine = Decision(s.status, Objects((service(KEY, "u-1", "chat", revision(OLD)),), {}, frozenset()))
    await actor.perform(s, mine)
    changed = {**s.objects, ("Service", "chat"): ObjectView("s-1", True, "11", "other")}
    await actor.perform(replace(s, objects=changed), mine)
    assert recorder.writes == [("apply", "Service", "chat")] * 2


@pytest.mark.parametrize(("generation", "writes"), [(1, 1), (2, 2)])
async def test_a_deployment_changed_by_others_is_repaired_at_once(generation, writes):
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: 0.0), observed(**{revision(OLD): 1})
    mine = Objects((made(OLD, 1),), {}, frozenset({revision(OLD)}))
    await actor.perform(s, Decision(s.status, mine))
    name = made(OLD, 1)["metadata"]["name"]
    changed = {**s.objects, ("Deployment", name): ObjectView("d", True, str(generation))}
    await actor.perform(replace(s, objects=changed), Decision(s.status, mine))
    assert len(recorder.writes) == writes


def test_a_service_and_its_disruption_budget_select_one_revision_or_all():
    for name in ("abc", ""):
        selector = service(KEY, "u-1", "chat", name)["spec"]["selector"]
        assert selector.get(REVISION_LABEL, "") == name
        budget = disruption_budget(KEY, "u-1", name, 1)["spec"]
        assert budget["selector"]["matchLabels"] == selector
        assert budget["maxUnavailable"] == 1


def test_a_routes_patch_carries_the_version_that_it_was_computed_from():
    patch = route_rules(KEY, ROUTE, ROUTE.rules)
    assert (patch["apiVersion"], patch["kind"]) == (HTTP_ROUTE_API, "HTTPRoute")
    assert patch["metadata"] == {"name": "web", "namespace": KEY.namespace, "resourceVersion": "41"}
