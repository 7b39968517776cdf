"""Carry out one Decision: write first the baseline, then the status, then objects and pods, and post events last.

If a quota, a webhook or a field check refuses an object, the next decision takes the refusal into account. Only
temporary errors, such as a conflict or an unreachable server, end the reconcile.
"""

import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvpilot_operator.act import events
from kvpilot_operator.act.gates import ungate
from kvpilot_operator.act.ownership import claim, hold, is_owned, own
from kvpilot_operator.act.rejections import Rejections
from kvpilot_operator.api.names import API_VERSION, KIND, REVISION_LABEL, SERVICE_LABEL, baseline_name, deployment_name
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref, version_of
from kvpilot_operator.errors import ClusterError, Conflict, NameTaken, NotFound, Rejected
from kvpilot_operator.render.objects import baseline_config_map, pod_admission
from kvpilot_operator.render.workloads import DEPLOYMENT, KINDS
from kvpilot_operator.state.decision import Decision, Manifest, Objects, Reference
from kvpilot_operator.state.objects import Rejection
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import without_figures
from kvpilot_probes import codec
from kvpilot_probes.codec import Baseline

log = logging.getLogger(__name__)

# Baselines to keep for each service, because a service may return to an earlier model or probe set.
MAX_KEPT = 4
# Read at most this many ConfigMaps, because anyone may put our label on any number of them.
MAX_SEEN = 64
# Apply even unchanged objects again, at the latest after this time and at the earliest after half of it, to undo
# changes by others. The cache reports a changed workload or Service at once, but not changed labels or a changed
# PodDisruptionBudget.
REAPPLY_SECONDS = 600.0
# If only figures of the status changed, write it at most once in this time. Metrics always have the newest figures.
FIGURES_SECONDS = 30.0
# Kinds that the snapshot lists. It finds pools by name, and the other kinds by the service's label.
_WATCHED = (*KINDS, "Service", "InferencePool")


class _Applied(NamedTuple):
    content: bytes
    """A hash of the manifest."""
    due: float
    uid: str
    version: str


class Actor:
    """The writer of one service's objects. Every write is idempotent."""

    __slots__ = ("_applied", "_clock", "_cluster", "_rejections", "_told")

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._rejections = Rejections(clock)
        self._applied: dict[tuple[str, str], _Applied | None] = {}
        self._told = -math.inf

    async def perform(self, s: Snapshot, decision: Decision) -> None:
        """Carry out a decision. Stop if the API server refuses the baseline, because the status would refer to it."""
        if decision.baseline is not None and not await self._keep(s, decision.baseline):
            return
        waits = self._waits(s, decision)
        if not waits:
            await self._write_status(s, decision)
        await self._set_gates(s, decision.gates, admitted=True)
        if decision.objects is not None:
            await self._place(s, decision.objects)
        await self._set_gates(s, decision.gates, admitted=False)
        if decision.ungating is not None:
            about = (DEPLOYMENT.pods_owner, deployment_name(s.key.name, decision.ungating.revision))
            await self._attempt(s, about, b"", partial(ungate, self._cluster, s, decision.ungating))
        # Events report changes of the status. If the write of the status waits, post none: a later reconcile makes the
        # same events again.
        for event in () if waits else decision.events:
            await events.post(self._cluster, s, event)

    @property
    def rejections(self) -> tuple[Rejection, ...] | None:
        """Objects that the API server refused at the last write, or None before the first write."""
        return self._rejections.now()

    async def _keep(self, s: Snapshot, baseline: Baseline) -> bool:
        """Write a captured baseline. Return False if the API server refuses it."""
        await prune(self._cluster, s, baseline)
        manifest = baseline_config_map(s.key, s.uid, baseline.identity, codec.encode(baseline))
        about = ("ConfigMap", manifest["metadata"]["name"])
        content = _hash(manifest)
        # A capture means that no baseline is stored. Forget an earlier write, so that `_apply` does not skip this one.
        self._applied.pop(about, None)
        return await self._attempt(s, about, content, partial(self._apply, s, manifest, content))

    def _waits(self, s: Snapshot, decision: Decision) -> bool:
        """Return True if the status was written a short time ago, and since then only figures in it have changed.

        A figure is a number that changes all the time, such as the KV cache use.
        """
        return (
            self._clock() - self._told < FIGURES_SECONDS
            and decision.status != s.status
            and without_figures(decision.status) == without_figures(s.status)
        )

    async def _write_status(self, s: Snapshot, decision: Decision) -> None:
        if decision.status == s.status:
            return
        self._told = self._clock()
        metadata = {**s.key._asdict(), "resourceVersion": s.resource_version}
        status = decision.status.as_written()
        service = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
        await self._cluster.apply(service, subresource="status")

    async def _set_gates(self, s: Snapshot, gates: Mapping[str, bool], *, admitted: bool) -> None:
        """With `admitted`, open the gates that are True in `gates`; without it, close the others. Skip deleted pods."""
        for pod in (one for one in s.pods if gates.get(one.name) is admitted):
            manifest = pod_admission(s.key, pod, admitted, s.now)
            write = partial(self._cluster.apply, manifest, subresource="status")
            try:
                await self._attempt(s, ("Pod", pod.name), bytes([admitted]), write)
            except (NotFound, Conflict) as error:
                log.info("gate not set: %s", error, extra={"service": str(s.key), "pod": pod.name})

    async def _place(self, s: Snapshot, objects: Objects) -> None:
        asked = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in objects.apply}
        asked |= {_workload(s, revision) for revision in s.deployments}
        asked |= {(kind, name) for _, kind, name in objects.absent}
        asked |= {("Pod", pod.name) for pod in s.pods}
        asked |= {(DEPLOYMENT.pods_owner, deployment_name(s.key.name, revision)) for revision in s.deployments}
        self._rejections.keep(asked)
        self._applied = {what: one for what, one in self._applied.items() if what in asked}
        await self._scale(s, {r: n for r, n in objects.scale.items() if n > _replicas(s, r)}, objects.named)
        fewer = [manifest for manifest in objects.apply if _growth(s, manifest) < 0]
        for manifest in objects.apply:
            if manifest not in fewer:
                await self._write(s, manifest, objects)
        if any(s.rejection(one.kind, one.name) is None for one in self.rejections or ()):
            # Do not scale down yet: fewer replicas may rely on an object that the server has just refused.
            return
        for manifest in fewer:
            await self._write(s, manifest, objects)
        await self._scale(s, {r: n for r, n in objects.scale.items() if n < _replicas(s, r)})
        for revision in s.deployments:
            if revision not in objects.keep:
                kind, name = _workload(s, revision)
                await self._remove(s, "v1", "Service", name)
                await self._remove(s, KINDS[kind].api_version, kind, name)
        for api_version, kind, name in objects.absent:
            await self._remove(s, api_version, kind, name)

    async def _attempt(
        self, s: Snapshot, what: tuple[str, str], content: bytes, write: Callable[[], Awaitable[object]]
    ) -> bool:
        """Try one write. Return False if the server refuses it, or refused it before and no retry is due.

        Content with another hash (`content`) is written at once, even if the old content was refused.
        """
        if self._rejections.waits(what, content):
            return False
        try:
            await write()
        except Rejected as refusal:
            kind, name = what
            # A Deployment's selector is immutable, so an object of this name with another selector belongs to others.
            theirs = kind == "Deployment" and any(field == "spec.selector" for field, _ in refusal.causes)
            error = NameTaken(kind, s.key.namespace, name) if theirs else refusal
            if self._rejections.note(what, content, error):
                log.warning("refused: %s", error, extra={"service": str(s.key)})
            return False
        except Conflict:
            # The object was replaced: look up its owner again.
            self._applied.pop(what, None)
            raise
        self._rejections.accepted(what)
        return True

    async def _write(self, s: Snapshot, manifest: Manifest, objects: Objects) -> None:
        what, content = (manifest["kind"], manifest["metadata"]["name"]), _hash(manifest)
        if "resourceVersion" in manifest["metadata"]:
            # Patch a user's route. The API server refuses the patch if the route has changed since it was observed.
            await self._attempt(s, what, content, partial(self._cluster.merge, Ref.to(manifest), dict(manifest)))
            return
        apply = partial(self._apply, s, manifest, content, objects.removed.get(what))
        start = partial(self._start, s, objects.named, what, apply)
        await self._attempt(s, what, content, start if _growth(s, manifest) > 0 else apply)

    async def _start(
        self, s: Snapshot, named: Sequence[Reference], what: tuple[str, str], write: Callable[[], Awaitable[object]]
    ) -> None:
        await hold(self._cluster, s, named, *what)
        await write()

    async def _scale(self, s: Snapshot, wanted: Mapping[str, int], named: Sequence[Reference] = ()) -> None:
        for revision, replicas in wanted.items():
            if revision in s.deployments:
                what = _workload(s, revision)
                seen, api_version = s.objects.get(what), KINDS[what[0]].api_version
                patch = {"metadata": {"uid": seen.uid} if seen is not None else {}, "spec": {"replicas": replicas}}
                write = partial(self._cluster.merge, Ref(api_version, what[0], s.key.namespace, what[1]), patch)
                start = partial(self._start, s, named, what, write)
                await self._attempt(s, what, _hash(patch), start if replicas > _replicas(s, revision) else write)

    async def _apply(self, s: Snapshot, manifest: Manifest, content: bytes, removed: Manifest | None = None) -> None:
        """Apply a manifest, unless it was applied not long ago and the object has not changed since.

        First, send `removed` as a merge patch of the object's spec, to delete fields that an apply would keep.
        """
        kind, _ = what = manifest["kind"], manifest["metadata"]["name"]
        seen, last = s.objects.get(what), self._applied.get(what)
        there = kind not in _WATCHED or (seen is not None and seen.owned)
        same = last is not None and last.content == content and self._clock() < last.due
        if there and last is not None and same and last.version == (seen.version if seen is not None else ""):
            return
        uid = await self._uid(s, manifest)
        if removed is not None:
            await self._cluster.merge(Ref.to(manifest), {"metadata": {"uid": uid}, "spec": removed})
        pinned = {**manifest, "metadata": {**manifest["metadata"], **({"uid": uid} if uid else {})}}
        answer = await self._cluster.apply(pinned)
        # Spread the next writes. Otherwise, objects applied together at startup would all be due at the same time.
        due = self._clock() + REAPPLY_SECONDS * (1 + content[0] / 255) / 2
        self._applied[what] = _Applied(content, due, answer["metadata"]["uid"], version_of(kind, answer))

    async def _uid(self, s: Snapshot, manifest: Manifest) -> str:
        """Return the uid of the service's own object of this name. If no such object exists, claim the name."""
        kind, _ = what = manifest["kind"], manifest["metadata"]["name"]
        seen, last = s.objects.get(what), self._applied.get(what)
        if seen is not None and seen.owned:
            return seen.uid
        if kind not in _WATCHED and last is not None:
            return last.uid
        found = await self._cluster.find(Ref.to(manifest))
        if found is not None:
            return own(s, kind, found)
        claimed = claim(manifest)
        return "" if claimed is None else str((await self._cluster.create(claimed))["metadata"]["uid"])

    async def _remove(self, s: Snapshot, api_version: str, kind: str, name: str) -> None:
        """Delete the service's own object. If no watch covers its kind, look it up once, and again after an apply."""
        what, ref = (kind, name), Ref(api_version, kind, s.key.namespace, name)
        if kind in _WATCHED:
            seen = s.objects.get(what)
            uid = seen.uid if seen is not None and seen.owned else ""
        elif what in self._applied and self._applied[what] is None:
            return
        else:
            found = await self._cluster.find(ref)
            uid = found["metadata"]["uid"] if found is not None and is_owned(found, s.uid) else ""
        delete = partial(self._cluster.delete, ref, uid=uid)
        if not uid or await self._attempt(s, what, b"", delete):
            self._applied[what] = None


def _hash(manifest: Manifest) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(manifest, order="sorted"), digest_size=16).digest()


def _workload(s: Snapshot, revision: str) -> tuple[str, str]:
    """Return kind and name of the existing workload of a revision."""
    return s.deployments[revision].kind, deployment_name(s.key.name, revision)


def _replicas(s: Snapshot, revision: str) -> int:
    view = s.deployments.get(revision)
    return view.replicas if view is not None else 0


def _growth(s: Snapshot, manifest: Manifest) -> int:
    """Return how many replicas a workload gains by this manifest; 0 if the object is not a workload."""
    if manifest["kind"] not in KINDS:
        return 0
    replicas: int = manifest["spec"]["replicas"]
    return replicas - _replicas(s, manifest["metadata"]["labels"][REVISION_LABEL])


async def prune(cluster: Cluster, s: Snapshot, but: Baseline) -> None:
    """Delete the service's oldest baselines, so that `MAX_KEPT` remain, including the new baseline `but`.

    Only log a failure, because it must not prevent the write of the new baseline.
    """
    kept = baseline_name(s.key.name, but.identity)
    selector, beginning = f"{SERVICE_LABEL}={s.key.name}", baseline_name(s.key.name, "")
    ours: list[Object] = []
    try:
        async for metadata in cluster.metadata("v1", "ConfigMap", s.key.namespace, selector, most=MAX_SEEN):
            name = metadata["name"]
            if name.startswith(beginning) and name != kept and is_owned({"metadata": metadata}, s.uid):
                ours.append(metadata)
        ours.sort(key=lambda metadata: (metadata.get("creationTimestamp") or "", metadata["name"]), reverse=True)
        for metadata in ours[MAX_KEPT - 1 :]:
            await cluster.delete(Ref("v1", "ConfigMap", s.key.namespace, metadata["name"]), uid=metadata["uid"])
    except ClusterError as error:
        log.warning("old baselines are not deleted: %s", error, extra={"service": str(s.key)})
