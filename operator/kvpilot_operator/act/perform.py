"""Carries out one Decision: what must be kept first, then the status, then objects, then events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvpilot_operator.act.events import event_manifest
from kvpilot_operator.cluster.client import Cluster, Object
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes import codec
from kvpilot_operator.render.names import API_VERSION, KIND, REVISION_LABEL, deployment_name
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Decision, Manifest, Objects
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import dump_status

log = logging.getLogger(__name__)

# An object that was applied as it is is applied again after this long, to mend what others changed.
REAPPLY_SECONDS = 60.0
_REMOVED = ("", 0.0)


class Actor:
    """Writes to the cluster. Every write is idempotent, so a pass that is cut off is repeated whole."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._applied: dict[tuple[ServiceKey, str, str], tuple[str, float]] = {}

    async def perform(self, s: Snapshot, decision: Decision) -> None:
        """Raises Conflict where the service changed since it was observed; nothing but a baseline is written then."""
        if decision.baseline is not None:
            content = codec.encode(decision.baseline)
            await self._cluster.apply(baseline_config_map(s.key, s.uid, decision.baseline.identity, content))
        await self._write_status(s, decision)
        if decision.objects is not None:
            await self._place(s, decision.objects)
        for event in decision.events:
            await self._post(s, event_manifest(s, event))

    def forget(self, key: ServiceKey) -> None:
        """Forget what was applied for a deleted service."""
        for entry in [entry for entry in self._applied if entry[0] == key]:
            del self._applied[entry]

    async def _write_status(self, s: Snapshot, decision: Decision) -> None:
        status = dump_status(decision.status)
        if status == dump_status(s.status):
            return
        await self._cluster.apply(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {
                    "name": s.key.name,
                    "namespace": s.key.namespace,
                    "resourceVersion": s.raw["metadata"]["resourceVersion"],
                },
                "status": status,
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
                await self._apply(s.key, manifest, missing=_is_missing(s, manifest, present))
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

    async def _apply(self, key: ServiceKey, manifest: Manifest, *, missing: bool) -> None:
        entry = (key, manifest["kind"], manifest["metadata"]["name"])
        content = json.dumps(manifest, sort_keys=True)
        known = self._applied.get(entry)
        if known is not None and known[0] == content and not missing and self._clock() - known[1] < REAPPLY_SECONDS:
            return
        await self._cluster.apply(dict(manifest))
        self._applied[entry] = (content, self._clock())

    async def _remove(self, s: Snapshot, api_version: str, kind: str, name: str) -> None:
        """Delete what is ours, once for each life of the operator and again after it was applied."""
        entry = (s.key, kind, name)
        if self._applied.get(entry) == _REMOVED:
            return
        found = await self._cluster.find(api_version, kind, s.key.namespace, name)
        owners = found["metadata"].get("ownerReferences") or () if found is not None else ()
        if any(owner.get("uid") == s.uid for owner in owners):
            await self._cluster.delete(api_version, kind, s.key.namespace, name)
        self._applied[entry] = _REMOVED

    async def _post(self, s: Snapshot, manifest: Object) -> None:
        try:
            await self._cluster.create(manifest)
        except ClusterError as error:
            # The journal in the status has the decision; an event is for people who watch.
            log.warning("event not posted: %s", error, extra={"service": str(s.key)})


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
