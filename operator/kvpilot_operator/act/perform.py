"""Carries out one Decision: what must be kept first, then the status, then objects and pods, then events."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvpilot_operator.act import baselines
from kvpilot_operator.act.events import Events
from kvpilot_operator.act.shelter import shelter
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, version_of
from kvpilot_operator.errors import NameTaken
from kvpilot_operator.render.names import API_VERSION, KIND, REVISION_LABEL, deployment_name
from kvpilot_operator.state.decision import Decision, Event, Manifest, Objects
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import dump_status

log = logging.getLogger(__name__)

# An object that was applied as it is is applied again after this long, or half of it, to mend what others changed: of a
# Deployment's spec and a Service the cache tells at once, of all else (labels, a budget) nobody does.
REAPPLY_SECONDS = 600.0


class _Applied(NamedTuple):
    content: bytes
    """A hash of the manifest."""
    due: float
    """When to apply it again, on the actor's clock."""
    version: str
    """That of the object as it was answered; another one means that somebody else has changed what it should be."""


class Actor:
    """Writes to the cluster. Every write is idempotent, so a pass that is cut off is repeated whole."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._events = Events(cluster)
        self._applied: dict[ServiceKey, dict[tuple[str, str], _Applied | None]] = {}

    async def perform(self, s: Snapshot, decision: Decision) -> None:
        """Raises Conflict where the service changed since it was observed; nothing but a baseline is written then."""
        if decision.baseline is not None:
            await baselines.keep(self._cluster, s, decision.baseline)
        await self._write_status(s, decision)
        if decision.objects is not None:
            await self._place(s, decision.objects)
        await shelter(self._cluster, s, decision.sheltered)
        for event in decision.events:
            await self._events.post(s, event)

    def forget(self, key: ServiceKey) -> None:
        """Forget what was applied for a deleted service."""
        self._applied.pop(key, None)
        self._events.forget(key)

    async def _write_status(self, s: Snapshot, decision: Decision) -> None:
        if decision.status == s.status:
            return
        await self._cluster.apply(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {
                    "name": s.key.name,
                    "namespace": s.key.namespace,
                    "resourceVersion": s.resource_version,
                },
                "status": dump_status(decision.status),
            },
            subresource="status",
        )

    async def _place(self, s: Snapshot, objects: Objects) -> None:
        present = {deployment_name(s.key.name, revision) for revision in s.deployments}
        await self._scale(s, {r: n for r, n in objects.scale.items() if n > _replicas(s, r)})
        for manifest in objects.apply:
            if manifest["kind"] == "HTTPRoute":
                await self._route(manifest)
            else:
                await self._apply(s, manifest, missing=_is_missing(s, manifest, present))
        await self._scale(s, {r: n for r, n in objects.scale.items() if n < _replicas(s, r)})
        for revision in s.deployments:
            if revision not in objects.keep:
                await self._cluster.delete(
                    "apps/v1", "Deployment", s.key.namespace, deployment_name(s.key.name, revision)
                )
        for api_version, kind, name in objects.absent:
            await self._remove(s, api_version, kind, name)

    async def _scale(self, s: Snapshot, wanted: Mapping[str, int]) -> None:
        for revision, replicas in wanted.items():
            if revision in s.deployments:
                name = deployment_name(s.key.name, revision)
                await self._cluster.merge(
                    "apps/v1", "Deployment", s.key.namespace, name, {"spec": {"replicas": replicas}}
                )

    async def _route(self, manifest: Manifest) -> None:
        """Conflict where the route has changed since it was observed: the next pass reads it again."""
        about = manifest["metadata"]
        patch = {"metadata": {"resourceVersion": about["resourceVersion"]}, "spec": manifest["spec"]}
        await self._cluster.merge(manifest["apiVersion"], manifest["kind"], about["namespace"], about["name"], patch)

    async def _apply(self, s: Snapshot, manifest: Manifest, *, missing: bool) -> None:
        known = self._applied.setdefault(s.key, {})
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        content = hashlib.blake2b(msgspec.json.encode(manifest, order="sorted"), digest_size=16).digest()
        last = known.get((kind, name))
        same = not missing and last is not None and last.content == content and self._clock() < last.due
        if last is not None and same and last.version == s.versions.get((kind, name), ""):
            return
        if (kind, name) not in known:
            await self._check_name(s, manifest)
        answer = await self._cluster.apply(dict(manifest))
        # What was applied together, at the operator's start, is not to be due together for ever after.
        due = self._clock() + REAPPLY_SECONDS * (1 + content[0] / 255) / 2
        known[kind, name] = _Applied(content, due, version_of(kind, answer))

    async def _check_name(self, s: Snapshot, manifest: Manifest) -> None:
        """Raises NameTaken where an object of this name is there and is not ours, which an apply would take over."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = await self._cluster.find(manifest["apiVersion"], kind, s.key.namespace, name)
        if found is None or _is_owned(found, s.uid):
            return
        error = NameTaken(kind, s.key.namespace, name)
        owners = found["metadata"].get("ownerReferences") or ()
        if not any((owner.get("kind"), owner.get("name")) == (KIND, s.key.name) for owner in owners):
            # Else it is an earlier service's of this name, and about to be collected.
            await self._events.post(s, Event("Warning", "NameTaken", error.message))
        raise error

    async def _remove(self, s: Snapshot, api_version: str, kind: str, name: str) -> None:
        """Delete what is ours, once for each life of the operator and again after it was applied."""
        known = self._applied.setdefault(s.key, {})
        if (kind, name) in known and known[kind, name] is None:
            return
        found = await self._cluster.find(api_version, kind, s.key.namespace, name)
        if found is not None and _is_owned(found, s.uid):
            await self._cluster.delete(api_version, kind, s.key.namespace, name)
        known[kind, name] = None


def _is_owned(obj: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def _replicas(s: Snapshot, revision: str) -> int:
    view = s.deployments.get(revision)
    return view.replicas if view is not None else 0


def _is_missing(s: Snapshot, manifest: Manifest, deployments: set[str]) -> bool:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if kind == "Deployment":
        return name not in deployments
    if kind == "Service" and name == s.key.name:
        selector: dict[str, Any] = manifest["spec"]["selector"]
        return (s.traffic or None) != selector.get(REVISION_LABEL)
    return False
