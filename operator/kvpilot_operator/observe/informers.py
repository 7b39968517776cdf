"""The informer cache of all services and their objects, from which reconciles read.

kopf's watch supplies the services, and our own watches supply their objects (docs/decisions/0012). The cache also
stores the API server's answer to each write, so no reconcile sees a state from before our own writes.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from kvpilot_operator.api.engine_defaults import NO_DEFAULTS, EngineDefaults
from kvpilot_operator.api.faults import Fault, judge
from kvpilot_operator.api.names import CANARY_ANNOTATION, GROUP_LABEL, KIND, SERVICE_LABEL
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.cache import Store
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, version_of
from kvpilot_operator.cluster.watch import Reflector
from kvpilot_operator.errors import places
from kvpilot_operator.observe.views import deployment_view, is_ours, leader_name, pod_view, traffic_of
from kvpilot_operator.render.workloads import KINDS, LEADER_WORKER_SET
from kvpilot_operator.state.objects import DeploymentView, ObjectView, PodView
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.state.status import Status, parse_status


class ServiceFeed:
    """A feed that keeps a Store equal to the services of some namespaces. `filled` is set once all are listed."""

    def __init__(self, store: Store[Any, Any], namespaces: Sequence[str]) -> None:
        self._store = store
        self.take = store.take
        self._unlisted = set(namespaces)
        self.filled = asyncio.Event()

    def listed(self, namespace: str, services: Sequence[Object], version: str) -> None:
        """Store a complete list of a namespace, and drop objects that are missing from it."""
        for one in services:
            self._store.put(one)
        names = {(one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in services}
        self._store.keep_only(namespace, names, version)
        self._unlisted.discard(namespace)
        if not self._unlisted:
            self.filled.set()


V = TypeVar("V")

_WORKERS = f"{GROUP_LABEL},!{SERVICE_LABEL}"
"""The label selector of worker pods: pods of a LeaderWorkerSet's group that are not its leader."""


@dataclass(frozen=True, slots=True)
class ServiceView:
    """One QuantizedLLMService in the cache: its parsed spec, or the spec's faults."""

    uid: str
    generation: int
    version: str
    """The object's resourceVersion."""
    faults: tuple[Fault, ...]
    spec: Spec | None
    """The parsed spec. None if the spec has faults."""
    status: Status
    canary_annotation: str


@dataclass(frozen=True, slots=True)
class Owned(Generic[V]):
    """The view of a workload or a Service, and the identity of the object."""

    view: V
    kind: str
    name: str
    uid: str
    owners: frozenset[str]
    """The uids of the object's owner references."""
    version: str
    """A version that changes with the desired state (`version_of`)."""


class InformerCache:
    """The informer cache. It calls `on_change` with a service whenever the service or its objects change.

    `host_access` and `engines` have the values of `--allow-host-access` and `--engine-defaults`. With `mesh`, the
    operator reaches engines in a mesh by the mesh's mutual TLS.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        host_access: Collection[str] = (),
        *,
        mesh: bool = False,
        engines: EngineDefaults = NO_DEFAULTS,
    ) -> None:
        self._host_access = host_access
        self.engines = engines
        self.on_change: Callable[[ServiceKey], None] = lambda _: None

        def changed(key: ServiceKey) -> None:
            self.on_change(key)

        self.services: Store[ServiceKey, ServiceView] = Store(self._service_view, _key, changed)
        self._workloads: dict[str, Store[ServiceKey, Owned[DeploymentView]]] = {
            kind: Store(partial(_placed, kind, partial(deployment_view, kind=kind)), _owner, changed) for kind in KINDS
        }
        self.pods: Store[ServiceKey, PodView] = Store(partial(_pod, mesh), _owner, changed)
        self._workers: Store[ServiceKey, tuple[str, PodView]] = Store(_worker, _group, changed)
        self.traffic: Store[ServiceKey, Owned[str | None]] = Store(
            partial(_placed, "Service", traffic_of), _owner, changed
        )
        self._stores: dict[str, Store[Any, Any]] = {
            KIND: self.services,
            **self._workloads,
            "Pod": self.pods,
            "Service": self.traffic,
        }
        watched = [("v1", "Pod", False), ("v1", "Service", False)]
        watched += [(kind.api_version, kind.name, kind.optional) for kind in KINDS.values()]
        self._reflectors = [
            Reflector(cluster, api_version, kind, namespace, SERVICE_LABEL, self._stores[kind], optional)
            for namespace in namespaces or ("",)
            for api_version, kind, optional in watched
        ] + [Reflector(cluster, "v1", "Pod", namespace, _WORKERS, self._workers) for namespace in namespaces or ("",)]
        self.feed = ServiceFeed(self.services, namespaces or ("",))

    async def run(self) -> None:
        """Follow services and their objects until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    async def filled(self) -> None:
        """Wait until all watched objects have been read once."""
        await self.feed.filled.wait()
        for reflector in self._reflectors:
            await reflector.filled.wait()

    def wrote(self, kind: str, namespace: str, name: str, obj: Object | None) -> None:
        """Store the result of one of our own writes: the object, or None if it was deleted."""
        store = self._stores.get(kind)
        if store is None:
            return
        if obj is None:
            store.forget(namespace, name)
        else:
            store.put(obj)

    def serves_groups(self, namespace: str) -> bool:
        """Return True if the API server lets us list LeaderWorkerSets in this namespace."""
        kind, everywhere = LEADER_WORKER_SET.name, ("", namespace)
        return any(one.served for one in self._reflectors if one.kind == kind and one.namespace in everywhere)

    def workloads(self, key: ServiceKey) -> list[Owned[DeploymentView]]:
        """Return the workloads of all kinds that carry a service's label."""
        return [one for store in self._workloads.values() for one in store.of(key)]

    def replicas(self, key: ServiceKey) -> tuple[PodView, ...]:
        """Return the pods of a service that take requests, each with its group's workers."""
        workers: dict[str, tuple[PodView, ...]] = {}
        for leader, view in self._workers.of(key):
            workers[leader] = (*workers.get(leader, ()), view)
        pods = self.pods.of(key)
        return tuple(replace(one, workers=workers[one.name]) if one.name in workers else one for one in pods)

    def objects(self, key: ServiceKey, uid: str) -> dict[tuple[str, str], ObjectView]:
        """Return the workloads and Services that carry a service's label, by kind and name; `uid` is the service's."""
        placed = [(one, None) for one in self.workloads(key)] + [(one, one.view) for one in self.traffic.of(key)]
        return {
            (one.kind, one.name): ObjectView(one.uid, uid in one.owners, one.version, selects)
            for one, selects in placed
        }

    def _service_view(self, obj: Object) -> ServiceView | None:
        metadata = obj["metadata"]
        if metadata.get("deletionTimestamp"):
            return None
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        known = self.services.get(metadata["namespace"], metadata["name"])
        if known is not None and (known.uid, known.generation) == (uid, generation):
            broken, spec = known.faults, known.spec
        else:
            broken, spec = _judged(obj, self._host_access, self.engines)
        status = parse_status(obj.get("status"))
        request = str((metadata.get("annotations") or {}).get(CANARY_ANNOTATION, ""))[:100]
        return ServiceView(uid, generation, metadata["resourceVersion"], broken, spec, status, request)


def _judged(
    obj: Object, host_access: Collection[str], engines: EngineDefaults
) -> tuple[tuple[Fault, ...], Spec | None]:
    """Return the spec or its faults. An unexpected error counts as a fault, too."""
    try:
        judged = judge(engines.fill(obj), host_access)
        return ((), judged) if isinstance(judged, Spec) else (judged, None)
    except Exception as error:
        where = "".join(f" in {place}" for place in places(error)[-1:])
        text = (
            f"cannot be read by this operator ({type(error).__name__}{where}): go back to the last one, and report this"
        )
        return (Fault("spec", text),), None


def _key(obj: Object) -> ServiceKey:
    return ServiceKey(obj["metadata"]["namespace"], obj["metadata"]["name"])


def _labelled(label: str, obj: Object) -> ServiceKey | None:
    name = (obj["metadata"].get("labels") or {}).get(label)
    return ServiceKey(obj["metadata"]["namespace"], name) if name else None


_owner, _group = partial(_labelled, SERVICE_LABEL), partial(_labelled, GROUP_LABEL)


def _placed(kind: str, view: Callable[[Object], V], obj: Object) -> Owned[V]:
    metadata = obj["metadata"]
    owners = frozenset(str(owner.get("uid")) for owner in metadata.get("ownerReferences") or ())
    return Owned(view(obj), kind, metadata["name"], metadata.get("uid", ""), owners, version_of(kind, obj))


def _pod(mesh: bool, obj: Object) -> PodView | None:
    service = obj["metadata"]["labels"][SERVICE_LABEL]
    # Skip an evicted pod, which may remain for hours next to its replacement.
    over = (obj.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return pod_view(obj, mesh) if is_ours(obj, service) and not over else None


def _worker(obj: Object) -> tuple[str, PodView] | None:
    """Return the name of a worker's leader, and the view of the worker."""
    leader = leader_name(obj, obj["metadata"]["labels"][GROUP_LABEL])
    return (leader, pod_view(obj)) if leader is not None else None
