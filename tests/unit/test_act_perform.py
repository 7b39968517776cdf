"""A decision is written in an order that survives a crash anywhere, and never over a user's head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.act.perform import REAPPLY_SECONDS, Actor
from kvpilot_operator.errors import Conflict, NameTaken
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.names import HTTP_ROUTE_API, REVISION_LABEL
from kvpilot_operator.render.objects import deployment, disruption_budget, route_rules, service
from kvpilot_operator.state.decision import Decision, Objects
from kvpilot_operator.state.snapshot import DeploymentView, RouteView
from support.services import KEY, manifest, snapshot, spec_of

OBJ = manifest()
OLD, NEW = pod_template(KEY.name, spec_of(OBJ), "auto"), pod_template(KEY.name, spec_of(OBJ), "k4v4")
ROUTE = RouteView("web", "41", ({"backendRefs": [{"name": "chat"}]},), {})


class Recorder:
    """Notes every write."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, ...]] = []
        self.patches: list[dict[str, Any]] = []
        self.route_version = "41"
        self.owner = "u-1"

    async def apply(self, manifest: Any, *, subresource: str = "") -> dict[str, Any]:
        self.writes.append(("apply", manifest["kind"], manifest["metadata"]["name"]))
        return {"metadata": {"generation": 1, "resourceVersion": "10"}}

    async def merge(self, api_version: str, kind: str, namespace: str, name: str, patch: Any) -> None:
        if kind == "HTTPRoute" and patch["metadata"]["resourceVersion"] != self.route_version:
            raise Conflict("PATCH", name, 409, "changed")
        self.writes.append(("merge", kind, name))
        self.patches.append(patch)

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "ownerReferences": [{"uid": self.owner}]}}

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        self.writes.append(("delete", kind, name))

    async def create(self, manifest: Any) -> dict[str, Any]:
        self.writes.append(("create", manifest["kind"], manifest.get("reason", "")))
        return {"metadata": {"name": "e1"}}


def made(template, replicas):
    return deployment(KEY, "u-1", template, replicas, 600)


def observed(**replicas: int):
    views = {name: DeploymentView(name, "auto", count) for name, count in replicas.items()}
    return snapshot(OBJ, deployments=views, traffic=revision(OLD), route=ROUTE)


async def performed(objects: Objects, s=None, recorder: Recorder | None = None, clock=lambda: 0.0) -> Recorder:
    recorder = recorder or Recorder()
    s = s or observed(**{revision(OLD): 1})
    await Actor(recorder, clock).perform(s, Decision(s.status, objects))
    return recorder


async def test_more_engines_come_before_traffic_and_fewer_after_it():
    shared = service(KEY, "u-1", "chat", "")
    objects = Objects((made(NEW, 1), shared, made(OLD, 1)), {"up": 3, "down": 1}, frozenset({"up", "down"}))
    recorder = await performed(objects, observed(up=2, down=2, gone=1))
    new, old = (f"chat-{revision(template)}" for template in (NEW, OLD))
    assert [write[2] for write in recorder.writes] == ["chat-up", new, "chat", old, "chat-down", "chat-gone"]


async def test_only_the_rules_of_a_users_route_are_written_and_only_as_they_were_read():
    rules = ({"backendRefs": [{"name": "chat", "weight": 95}, {"name": "chat-canary", "weight": 5}]},)
    objects = Objects((route_rules(KEY, ROUTE, rules),), {}, frozenset())
    recorder = await performed(objects)
    assert recorder.patches == [{"metadata": {"resourceVersion": "41"}, "spec": {"rules": list(rules)}}]
    changed = Recorder()
    changed.route_version = "42"
    with pytest.raises(Conflict):
        await performed(objects, recorder=changed)
    assert changed.writes == []


async def test_what_must_not_be_there_is_deleted_once():
    recorder, gone = Recorder(), Objects((), {}, frozenset(), (("v1", "Service", "chat-canary"),))
    actor, s = Actor(recorder, lambda: 0.0), observed()
    for _ in range(3):
        await actor.perform(s, Decision(s.status, gone))
    assert recorder.writes == [("delete", "Service", "chat-canary")]
    there = Objects((service(KEY, "u-1", "chat-canary", "x"),), {}, frozenset())
    await actor.perform(s, Decision(s.status, there))
    await actor.perform(s, Decision(s.status, gone))
    assert recorder.writes[1:] == [("apply", "Service", "chat-canary"), ("delete", "Service", "chat-canary")]


async def test_what_is_not_ours_is_never_deleted():
    recorder = Recorder()
    recorder.owner = "somebody else"
    await performed(Objects((), {}, frozenset(), (("v1", "Service", "chat-canary"),)), observed(), recorder)
    assert recorder.writes == []


async def test_an_object_of_the_name_that_is_somebody_elses_is_not_taken_over():
    recorder = Recorder()
    recorder.owner = "somebody else"
    objects = Objects((service(KEY, "u-1", "chat", ""),), {}, frozenset())
    with pytest.raises(NameTaken, match="Service models/chat exists and is not kvpilot's"):
        await performed(objects, observed(), recorder)
    assert recorder.writes == [("create", "Event", "NameTaken")]


async def test_an_object_that_is_as_it_should_be_is_applied_again_only_after_a_while():
    now = [0.0]
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: now[0]), replace(observed(), traffic=None)
    shared = Objects((service(KEY, "u-1", "chat", ""),), {}, frozenset())
    s = replace(s, versions={("Service", "chat"): "10"})
    for now[0] in (0.0, 1.0, REAPPLY_SECONDS + 1):
        await actor.perform(s, Decision(s.status, shared))
    assert len(recorder.writes) == 2


async def test_a_selector_that_is_not_what_it_should_be_is_mended_at_once():
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: 0.0), observed()
    shared = Objects((service(KEY, "u-1", "chat", ""),), {}, frozenset())
    for _ in range(2):
        await actor.perform(s, Decision(s.status, shared))
    assert len(recorder.writes) == 2


@pytest.mark.parametrize(("generation", "writes"), [(1, 1), (2, 2)])
async def test_a_deployment_that_somebody_else_has_changed_is_mended_at_once(generation, writes):
    recorder = Recorder()
    actor, s = Actor(recorder, lambda: 0.0), observed(**{revision(OLD): 1})
    mine = Objects((made(OLD, 1),), {}, frozenset({revision(OLD)}))
    await actor.perform(s, Decision(s.status, mine))
    name = made(OLD, 1)["metadata"]["name"]
    await actor.perform(replace(s, versions={("Deployment", name): str(generation)}), Decision(s.status, mine))
    assert len(recorder.writes) == writes


def test_a_service_and_its_budget_select_one_revision_or_every_one():
    for name in ("abc", ""):
        selector = service(KEY, "u-1", "chat", name)["spec"]["selector"]
        assert selector.get(REVISION_LABEL, "") == name
        budget = disruption_budget(KEY, "u-1", name, 1, evict_unready=True)["spec"]
        assert budget["selector"]["matchLabels"] == selector
        assert budget["minAvailable"] == 1


def test_a_routes_patch_carries_the_version_that_it_was_computed_from():
    patch = route_rules(KEY, ROUTE, ROUTE.rules)
    assert (patch["apiVersion"], patch["kind"]) == (HTTP_ROUTE_API, "HTTPRoute")
    assert patch["metadata"] == {"name": "web", "namespace": KEY.namespace, "resourceVersion": "41"}
