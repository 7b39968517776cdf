"""Carries out one Decision: what must be kept first, then the status, then objects, then events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from kvpilot_operator.act.events import event_manifest
from kvpilot_operator.cluster.client import Cluster, Object
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes import codec
from kvpilot_operator.render.names import API_VERSION, KIND, deployment_name
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Decision, Manifest, Objects
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import dump_status

log = logging.getLogger(__name__)

# An object that was applied as it is is applied again after this long, to mend what others changed.
REAPPLY_SECONDS = 60.0


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
        for manifest in objects.apply:
            await self._apply(s.key, manifest, missing=_is_missing(s, manifest, present))
        for revision, replicas in objects.scale.items():
            view = s.deployments.get(revision)
            if view is not None and view.replicas != replicas:
                name = deployment_name(s.key.name, revision)
                await self._cluster.merge(
                    "apps/v1", "Deployment", s.key.namespace, name, {"spec": {"replicas": replicas}}
                )
        for revision in s.deployments:
            if revision not in objects.keep:
                await self._cluster.delete(
                    "apps/v1", "Deployment", s.key.namespace, deployment_name(s.key.name, revision)
                )

    async def _apply(self, key: ServiceKey, manifest: Manifest, *, missing: bool) -> None:
        entry = (key, manifest["kind"], manifest["metadata"]["name"])
        content = json.dumps(manifest, sort_keys=True)
        known = self._applied.get(entry)
        if known is not None and known[0] == content and not missing and self._clock() - known[1] < REAPPLY_SECONDS:
            return
        await self._cluster.apply(dict(manifest))
        self._applied[entry] = (content, self._clock())

    async def _post(self, s: Snapshot, manifest: Object) -> None:
        try:
            await self._cluster.create(manifest)
        except ClusterError as error:
            # The journal in the status has the decision; an event is for people who watch.
            log.warning("event not posted: %s", error, extra={"service": str(s.key)})


def _is_missing(s: Snapshot, manifest: Manifest, deployments: set[str]) -> bool:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if kind == "Deployment":
        return name not in deployments
    if kind == "Service":
        selector: dict[str, Any] = manifest["spec"]["selector"]
        return s.traffic not in selector.values()
    return False
