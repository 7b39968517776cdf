"""In-memory API server that checks UIDs and resource versions, and an operator (cache, decide, Actor) that uses it."""

import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.names import KIND, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError, Conflict, NotFound
from kvpilot_operator.observe.gather import Observations, Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.observe.views import deployment_view, named_view, pool_view, traffic_of
from kvpilot_operator.render.workloads import KINDS
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.objects import DeploymentView, ObjectView
from kvpilot_operator.state.snapshot import ServerFacts
from kvpilot_operator.state.status import Condition, parse_status
from support.services import KEY, NOW

T = TypeVar("T")
What = tuple[str, str]


class Killed(BaseException):
    """Exception that simulates the operator's death before a write."""


class MemoryApi:
    """Objects by kind and name. The server checks UIDs like a real one; `refuses` may reject a write.

    Attributes:
        asked: method, kind and name of each request.
        left: number of writes until the operator is killed; None means any number.
        on_change: callback with a written object, or with (kind, name) of a deleted one.
    """

    def __init__(self) -> None:
        self.objects: dict[What, Object] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.left: int | None = None
        self.refuses: Callable[[Object], ClusterError | None] = lambda _: None
        self.before_write: Callable[[str, What], None] = lambda *_: None
        self.on_change: Callable[[Object | What], None] = lambda _: None
        self._seen: dict[What, tuple[Object, DeploymentView]] = {}
        self._numbers = itertools.count(100)

    async def serves(self, api_version: str) -> bool:
        return True

    def writes(self) -> list[tuple[str, str, str]]:
        """Return (method, kind, name) of each request that was a write."""
        return [one for one in self.asked if one[0] not in ("find", "list")]

    def put(self, obj: Object) -> Object:
        """Create or replace an object, as a client other than the operator."""
        what = (obj["kind"], obj["metadata"]["name"])
        number = str(next(self._numbers))
        about = {"namespace": KEY.namespace, "uid": f"uid-{number}", **obj["metadata"], "resourceVersion": number}
        known = self.objects.get(what)
        changed = known is not None and known.get("spec") != obj.get("spec")
        about["generation"] = (known["metadata"].get("generation", 1) if known else 1) + changed
        written = self.objects[what] = {**obj, "metadata": about}
        self.on_change(_copied(written))
        return _copied(written)

    def drop(self, *what: str) -> None:
        """Delete an object, as a client other than the operator."""
        del self.objects[what[0], what[1]]
        self.on_change((what[0], what[1]))

    def run_engines(self) -> None:
        """Act as a cluster: create the pods that every Deployment requests, all of them ready."""
        for (kind, name), obj in list(self.objects.items()):
            for n in range(obj["spec"]["replicas"] if kind == "Deployment" else 0):
                self.put(_pod(name, obj["spec"]["selector"]["matchLabels"], n))

    def of_kind(self, kind: str) -> list[Object]:
        """Return the objects of a kind. The caller must not change them."""
        return [obj for (known, _), obj in self.objects.items() if known == kind]

    def workloads(self) -> dict[str, DeploymentView]:
        """Return the view of each revision's workload."""
        found = {}
        for what, obj in self.objects.items():
            if what[0] in KINDS:
                if what not in self._seen or self._seen[what][0] is not obj:
                    self._seen[what] = obj, deployment_view(obj, what[0])
                view = self._seen[what][1]
                found[view.revision] = view
        return found

    def views(self) -> dict[What, ObjectView]:
        """Return the views of the objects that belong to the service, as the operator's cache has them."""
        uid = self.objects[KIND, KEY.name]["metadata"]["uid"]
        found = {}
        for (kind, name), obj in self.objects.items():
            if kind in KINDS:
                found[kind, name] = named_view(kind, obj, uid)
            elif kind == "Service":
                found[kind, name] = replace(named_view(kind, obj, uid), selects=traffic_of(obj))
            elif kind == "InferencePool":
                found[kind, name] = pool_view(obj, uid)
        return found

    async def find(self, ref: Ref) -> Object | None:
        self.asked.append(("find", ref.kind, ref.name))
        return _copied(self.objects.get((ref.kind, ref.name)))

    async def first(self, api_version: str, kind: str, namespace: str, *, fields: str = "", limit: int) -> list[Object]:
        self.asked.append(("list", kind, fields))
        assert not fields, "this API has no field selectors"
        return _copied([obj for what, obj in self.objects.items() if what[0] == kind][:limit])

    async def list(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Object]:
        self.asked.append(("list", kind, selector))
        wanted = dict(one.split("=") for one in selector.split(","))
        return _copied([obj for obj in self.of_kind(kind) if wanted.items() <= obj["metadata"]["labels"].items()])

    async def metadata(
        self, api_version: str, kind: str, namespace: str, selector: str, *, most: int
    ) -> AsyncIterator[Object]:
        for obj in [obj for (known, _), obj in self.objects.items() if known == kind][:most]:
            yield _copied(obj["metadata"])

    async def create(self, manifest: Object) -> Object:
        if manifest["kind"] == "Event":
            return {"metadata": {"name": "event"}}
        what = self._begin("create", manifest["kind"], manifest["metadata"]["name"], manifest)
        if what in self.objects:
            raise Conflict("POST", what[1], 409, "already exists")
        return self.put(_copied(manifest))

    async def apply(self, manifest: Object, *, subresource: str = "") -> Object:
        what = self._begin(f"apply {subresource}".strip(), manifest["kind"], manifest["metadata"]["name"], manifest)
        known = self.objects.get(what)
        self._same(known, manifest["metadata"].get("uid"))
        if known is not None and subresource:
            # Only the operator writes its applied objects, so a field that it leaves out disappears.
            known = {key: value for key, value in known.items() if key != subresource}
        if known is not None and "selector" in known.get("spec", {}):
            # Server-side apply treats a selector as a single value, even if another manager wrote its labels.
            known = {**known, "spec": {key: value for key, value in known["spec"].items() if key != "selector"}}
        return self.put(_merged(known or {}, manifest))

    async def merge(self, ref: Ref, patch: Object) -> Object:
        what = self._begin("merge", ref.kind, ref.name, patch)
        known = self.objects.get(what)
        if known is None:
            raise NotFound("PATCH", ref.name, 404, "not found")
        self._same(known, patch["metadata"].get("uid"))
        version = known["metadata"]["resourceVersion"]
        if patch["metadata"].get("resourceVersion", version) != version:
            raise Conflict("PATCH", ref.name, 409, "changed")
        return self.put(_merged(known, patch))

    async def delete(self, ref: Ref, *, uid: str = "") -> None:
        what = self._begin("delete", ref.kind, ref.name, {})
        if what in self.objects:
            self._same(self.objects[what], uid)
            self.drop(*what)

    def _begin(self, method: str, kind: str, name: str, written: Object) -> What:
        self.asked.append((method, kind, name))
        self.before_write(method, (kind, name))
        refused = self.refuses(written)
        if refused is not None:
            raise refused
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= 1
        return kind, name

    @staticmethod
    def _same(known: Object | None, uid: str | None) -> None:
        if uid and (known is None or known["metadata"]["uid"] != uid):
            raise Conflict("PATCH", "", 409, "uid mismatch")


def tell(cache: InformerCache, change: Object | What) -> None:
    """Pass a change to the operator's cache if its watches would report it. Pass on all deletions."""
    if isinstance(change, tuple):
        cache.wrote(change[0], KEY.namespace, change[1], None)
    elif change["kind"] == KIND or SERVICE_LABEL in change["metadata"].get("labels", {}):
        cache.wrote(change["kind"], KEY.namespace, change["metadata"]["name"], change)


class Operator:
    """The operator's cache, decide and Actor over a MemoryApi with one service."""

    def __init__(self, api: MemoryApi, obj: Object) -> None:
        self.api = api
        self.now = NOW
        self.cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
        server = ServerFacts()
        self._scraper = Scraper()
        self._observer = Observer(
            api,  # type: ignore[arg-type]
            self.cache,
            self._scraper,
            server,
            lambda: self.now,
            lambda _: None,
        )
        api.on_change = partial(tell, self.cache)
        api.put(obj)
        self.restart()

    def restart(self) -> None:
        """End the operator's process and start another one."""
        self._known = Observations(KEY, self.api.objects[KIND, KEY.name]["metadata"]["uid"])
        self.actor = Actor(self.api, lambda: (self.now - NOW).total_seconds())  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._scraper.close()

    async def reconcile(self, seconds: float = 5) -> Decision:
        """Run one reconcile, `seconds` after the last one, and return its decision."""
        self.now += timedelta(seconds=seconds)
        observed = await self._observer.snapshot(self._known, None)
        assert observed is not None
        snapshot = replace(observed, rejections=self.actor.rejections)
        decision = decide(snapshot)
        await self.actor.perform(snapshot, decision)
        return decision

    def edit(self, obj: Object) -> None:
        """Replace the service's spec, as its user would."""
        known = self.api.objects[KIND, KEY.name]
        self.api.put({**known, "spec": obj["spec"]})

    def condition(self, kind: str) -> Condition:
        found = parse_status(self.api.objects[KIND, KEY.name]["status"]).condition(kind)
        assert found is not None
        return found


def _copied(obj: T) -> T:
    """Return a deep copy of JSON. This takes a tenth of the time of `copy.deepcopy`."""
    made: T = msgspec.json.decode(msgspec.json.encode(obj))
    return made


def _merged(known: Any, new: Any) -> Any:
    if not isinstance(known, dict) or not isinstance(new, dict):
        return _copied(new)
    merged = {**known, **{key: _merged(known.get(key), value) for key, value in new.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _pod(deployment: str, labels: dict[str, str], n: int) -> Object:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{deployment}-5d9", "controller": True}
    about = {"name": f"{deployment}-{n}", "labels": labels, "ownerReferences": [owner]}
    assert REVISION_LABEL in labels
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"kind": "Pod", "metadata": about, "spec": {}, "status": status}


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends, such as one that awaits this API alone."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine suspended")
