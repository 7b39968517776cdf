"""The API server of a model cluster: the real Actor writes through it, and can be killed at any of its writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvpilot_operator.api.names import DO_NOT_EVICT_ANNOTATION, DTYPE_LABEL, REVISION_LABEL
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import Conflict, NotFound, Rejected
from kvpilot_operator.render.workloads import KINDS
from kvpilot_operator.state.objects import ObjectView
from support.services import KEY

if TYPE_CHECKING:
    from support.model_cluster import ModelCluster

Json = dict[str, Any]


class Killed(BaseException):
    """The operator's process has ended before this write."""


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run what never waits for anything."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


class ModelApi:
    """What `act` asks of a Cluster. Objects lie in the model; their uids follow from their names."""

    def __init__(self, model: ModelCluster) -> None:
        self._model = model
        self.left: int | None = None
        """Writes until the operator is killed; None is any number."""

    def views(self) -> dict[tuple[str, str], ObjectView]:
        """The workloads, Services, pools and the route of our own as observe would show them."""
        found = {}
        for revision, one in self._model.deployments.items():
            kind, name = self._model.kind(revision), f"{KEY.name}-{revision}"
            found[kind, name] = ObjectView(_uid(kind, name), True, str(one))
        for name, selector in self._model.services.items():
            selects = selector.get(REVISION_LABEL, "") if selector else None
            found["Service", name] = ObjectView(_uid("Service", name), True, _version(selector), selects)
        for name, selector in self._model.pools.items():
            selects = selector.get(REVISION_LABEL, "")
            found["InferencePool", name] = ObjectView(_uid("InferencePool", name), True, _version(selector), selects)
        if self._model.route_name == KEY.name:
            view = ObjectView(_uid("HTTPRoute", KEY.name), True, _version(self._model.rules))
            found["HTTPRoute", KEY.name] = view
        return found

    async def find(self, ref: Ref) -> Json | None:
        revision = ref.name.removeprefix(f"{KEY.name}-")
        if ref.kind in KINDS:
            there = revision in self._model.deployments and self._model.kind(revision) == ref.kind
            return {"metadata": _metadata(ref.kind, ref.name)} if there else None
        there = {
            "Service": ref.name in self._model.services,
            "InferencePool": ref.name in self._model.pools,
            "HTTPRoute": ref.name == self._model.route_name,
            "PodDisruptionBudget": self._model.budget is not None,
            "ConfigMap": self._model.keeps(ref.name),
        }[ref.kind]
        return {"metadata": _metadata(ref.kind, ref.name)} if there else None

    async def metadata(
        self, api_version: str, kind: str, namespace: str, selector: str, *, most: int
    ) -> AsyncIterator[Json]:
        """Old baselines are no part of the model."""
        baselines: list[Json] = []
        for one in baselines:
            yield one

    async def create(self, manifest: Json) -> Json:
        """A name is claimed: it is there, and does nothing yet."""
        kind, name = manifest["kind"], manifest["metadata"].get("name", "event")
        refused = self._model.refuses(manifest) if kind == "InferencePool" else None
        if refused is not None:
            raise Rejected("POST", name, 422, refused, "Invalid")
        if kind in KINDS:
            self._write(lambda: self._put(kind, name, manifest))
        elif kind == "Service":
            self._write(lambda: self._model.services.update({name: {}}))
        elif kind == "InferencePool":
            self._write(lambda: self._model.pools.update({name: manifest["spec"]["selector"]["matchLabels"]}))
        elif kind == "HTTPRoute":
            self._write(lambda: self._own_route(name, []))
        elif kind == "PodDisruptionBudget":
            self._write(lambda: setattr(self._model, "budget", {"minAvailable": 0, "selector": {"matchLabels": {}}}))
        return {"metadata": _metadata(kind, name)}

    async def apply(self, manifest: Json, *, subresource: str = "") -> Json:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        refused = self._model.refuses(manifest)
        if refused is not None:
            raise Rejected("PATCH", name, 422, refused, "Invalid")
        if kind == "Pod" and subresource:
            self._write(lambda: self._admit(name, manifest["status"]["conditions"]))
        elif subresource:
            self._write(lambda: setattr(self._model, "status", manifest["status"]))
        else:
            self._write(lambda: self._put(kind, name, manifest))
        return {"metadata": self._answer(kind, name)}

    async def merge(self, ref: Ref, patch: Json) -> Json:
        model, revision = self._model, ref.name.removeprefix(f"{KEY.name}-")
        if ref.kind == "HTTPRoute":
            if patch["metadata"]["resourceVersion"] != model.route_version:
                raise Conflict("PATCH", ref.name, 409, "changed")
            self._write(lambda: model.edit_route(patch["spec"]["rules"]))
        elif ref.kind in KINDS:
            if revision not in model.deployments or model.kind(revision) != ref.kind:
                raise NotFound("PATCH", ref.name, 404, "gone")
            scaled = (model.deployments[revision][0], patch["spec"]["replicas"])
            self._write(lambda: model.deployments.update({revision: scaled}))
        elif ref.kind == "Service":
            self._write(lambda: model.services.update({ref.name: {}}))
        return {"metadata": self._answer(ref.kind, ref.name)}

    async def delete(self, ref: Ref, *, uid: str = "") -> None:
        assert uid == _uid(ref.kind, ref.name)
        if ref.kind in KINDS:
            self._write(lambda: self._model.deployments.pop(ref.name.removeprefix(f"{KEY.name}-"), None))
        elif ref.kind == "Service":
            self._write(lambda: self._model.services.pop(ref.name, None))
        elif ref.kind == "InferencePool":
            self._write(lambda: self._model.pools.pop(ref.name, None))
        elif ref.kind == "HTTPRoute":
            self._write(lambda: self._own_route("web", None))
        elif ref.kind == "PodDisruptionBudget":
            self._write(lambda: setattr(self._model, "budget", None))

    def _write(self, change: Callable[[], object]) -> None:
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= 1
        change()
        self._model.happened()

    def _put(self, kind: str, name: str, manifest: Json) -> None:
        model, about = self._model, manifest["metadata"]
        if kind in KINDS:
            labels, spec = about["labels"], manifest["spec"]
            model.nodes[labels[REVISION_LABEL]] = spec.get("leaderWorkerTemplate", {}).get("size", 1)
            model.deployments[labels[REVISION_LABEL]] = (labels[DTYPE_LABEL], manifest["spec"]["replicas"])
        elif kind == "Service":
            model.services[name] = manifest["spec"]["selector"]
        elif kind == "InferencePool":
            model.pools[name] = manifest["spec"]["selector"]["matchLabels"]
        elif kind == "HTTPRoute":
            self._own_route(name, manifest["spec"]["rules"])
        elif kind == "PodDisruptionBudget":
            model.budget = manifest["spec"]
        elif kind == "ConfigMap":
            model.keep(name)
        elif kind == "Pod":
            # The annotation lives on the pod: a pod that is gone has none, nor has a new one of its name.
            marked = DO_NOT_EVICT_ANNOTATION in about["annotations"] and name in model.pod_names(workers=True)
            model.do_not_evict = model.do_not_evict | {name} if marked else model.do_not_evict - {name}

    def _own_route(self, name: str, rules: list[Json] | None) -> None:
        self._model.route_name = name
        self._model.edit_route(rules)

    def _admit(self, name: str, conditions: list[Json]) -> None:
        """The condition lives on the pod: a pod that is gone has none."""
        engines, admitted = self._model.engines, conditions[0]["status"] == "True"
        engines.admitted = engines.admitted | {name} if admitted else engines.admitted - {name}
        engines.admitted &= self._model.pod_names()

    def _answer(self, kind: str, name: str) -> Json:
        """Metadata with what tells that an object has changed."""
        about = _metadata(kind, name)
        if kind in KINDS:
            about["generation"] = str(self._model.deployments[name.removeprefix(f"{KEY.name}-")])
        elif kind == "Service":
            about["resourceVersion"] = _version(self._model.services[name])
        elif kind == "InferencePool":
            about["generation"] = _version(self._model.pools[name])
        elif kind == "HTTPRoute":
            about["generation"] = _version(self._model.rules)
        return about


def _uid(kind: str, name: str) -> str:
    return f"{kind}/{name}"


def _metadata(kind: str, name: str) -> Json:
    return {"name": name, "uid": _uid(kind, name), "ownerReferences": [{"uid": "u-1"}]}


def _version(content: Any) -> str:
    return json.dumps(content, sort_keys=True)
