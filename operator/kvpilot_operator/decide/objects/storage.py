"""Decide the PersistentVolumeClaim for the model's weights, and the Job that fills it before engines start.

`status.cache` goes from Pending to Prefetching (the Job's pod reports its progress) to Ready. If the spec asks for
other weights, their identity is new, so they need a new Job. Jobs are immutable, so the older one is deleted first.
Engines that need the new weights wait for their Job.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from kvpilot_operator.api.names import prefetch_job
from kvpilot_operator.api.words import CachePhase, Reason
from kvpilot_operator.decide.context import Context, Placed
from kvpilot_operator.decide.diagnosis import pending_reason, refusal
from kvpilot_operator.render.objects import claim
from kvpilot_operator.render.prefetch import claim_name, identity, job
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import WeightsCache, clip
from kvpilot_operator.times import utc

_KIND = ("batch/v1", "Job")
_UNHEARD = timedelta(seconds=60)


class Wait(NamedTuple):
    """The cause that keeps engines of the present spec from starting."""

    cause: Cause
    stuck: bool
    """True if a person has to change something first."""


def keep(c: Context) -> Context:
    """Render the claim and the Job. If the spec no longer asks for the claim, do not delete it: pods may use it."""
    s, asked = c.snapshot, c.spec.cache.weights
    if asked is not None:
        c = replace(c, storage=Placed((claim(s.key, s.uid, asked),)))
    return _fill(c) if c.spec.cache.prefetch else _leave(c)


def ready(c: Context) -> bool:
    """Return True if engines find their weights on the claim, or download them themselves."""
    kept = c.status.cache
    if not c.spec.cache.prefetch or kept is None:
        return not c.spec.cache.prefetch
    return (kept.phase, kept.identity) == (CachePhase.READY, identity(c.snapshot.key.name, c.spec))


def wait(c: Context) -> Wait | None:
    """Return the cause if engines must wait for their weights, else None."""
    if ready(c):
        return None
    view, kept, name = c.snapshot.prefetch, c.status.cache, prefetch_job(c.snapshot.key.name)
    claimed = f"PersistentVolumeClaim {claim_name(c.snapshot.key.name, c.spec)}"
    if view is None:
        return Wait(Cause(Reason.PREFETCHING, f"Job {name} will fill {claimed} before an engine starts"), False)
    if view.failure is not None:
        text = f"Job {name} has failed: {view.failure}. Delete it, and kvpilot creates it again"
        return Wait(Cause(Reason.PREFETCH_FAILED, clip(text)), True)
    there, total, amount = view.downloaded_bytes, view.total_bytes, ""
    # If the container has stopped and waits for its next attempt, report why it stopped.
    stopped = next((cause for pod in view.pods if (cause := refusal(pod.exit_message)) is not None), None)
    if stopped is not None and there is None:
        way = "or set spec.cache.prefetch to false, and engines download for themselves"
        return Wait(stopped._replace(message=clip(f"Job {name}: {stopped.message} ({way})")), True)
    if kept is not None and kept.phase == CachePhase.PREFETCHING:
        # Use whole percent, so that the status is not written for each downloaded byte.
        amount = f": {100 * there // total}% of {total / 1e9:.1f} GB" if there is not None and total else ""
    elif (pending := held_up(c, view.pods)) is not None:
        return Wait(pending._replace(message=clip(f"Job {name}: {pending.message}")), False)
    elif not view.pods:
        text = f"Job {name} has no pod yet; if it persists, `kubectl describe job {name}` says why"
        return Wait(Cause(Reason.PREFETCHING, text), False)
    return Wait(Cause(Reason.PREFETCHING, f"Job {name} fills {claimed}{amount}"), False)


def held_up(c: Context, pods: Sequence[PodView]) -> Cause | None:
    """Return the cause that keeps pods from starting, with the remedy for a claim without a volume."""
    found = pending_reason(pods) or _unheard(c, pods)
    if found is None or found.reason != Reason.CLAIM_NOT_BOUND:
        return found
    return found._replace(message=clip(f"{_unbound(c)} The scheduler says: {found.message}"))


def _unheard(c: Context, pods: Sequence[PodView]) -> Cause | None:
    """Return the cause if no scheduler has reported on one of these pods for a minute, else None."""
    for pod in (one for leader in pods for one in leader.group):
        if pod.unheard_since is not None and c.now - pod.unheard_since >= _UNHEARD:
            text = f"nothing about pod {pod.name}, which was created at {utc(pod.unheard_since)}"
            if any(one.startswith("PersistentVolumeClaim ") for one in pod.needs or ()):
                return Cause(Reason.CLAIM_NOT_BOUND, f"{text}: it waits for a volume, or the scheduler does not run.")
            return Cause(Reason.UNSCHEDULABLE, f"the scheduler says {text}: check that its schedulerName runs")
    return None


def _fill(c: Context) -> Context:
    s, kept = c.snapshot, c.status.cache
    wanted = identity(s.key.name, c.spec)
    if ready(c):
        return c
    if kept is None or kept.identity != wanted:
        c = c.set(cache=WeightsCache(identity=wanted, phase=CachePhase.PENDING))
    if s.unread(Question.PREFETCH) is not None:
        return c
    manifest = job(s.key, s.uid, c.spec, assigned_user=s.server.assigns_users)
    view, content = s.prefetch, next(iter(manifest["metadata"]["annotations"].values()))
    if view is not None and view.done and view.content.startswith(f"{wanted}-"):
        c = c.set(cache=WeightsCache(identity=wanted, phase=CachePhase.READY))
        name = claim_name(s.key.name, c.spec)
        return c.event("WeightsPrefetched", f"PersistentVolumeClaim {name} is filled")
    if view is not None and view.content != content:
        return replace(c, storage=c.storage._replace(absent=((*_KIND, prefetch_job(s.key.name)),)))
    c = replace(c, storage=c.storage._replace(apply=(*c.storage.apply, manifest)))
    begun = view is not None and view.total_bytes is not None
    return c.set(cache=WeightsCache(identity=wanted, phase=CachePhase.PREFETCHING)) if begun else c


def _leave(c: Context) -> Context:
    """Delete the Job if no claim has to be filled. Once it is gone, clear `status.cache`."""
    s = c.snapshot
    if c.status.cache is None or s.unread(Question.PREFETCH) is not None:
        return c
    if s.prefetch is None:
        return c.set(cache=None)
    return replace(c, storage=c.storage._replace(absent=((*_KIND, prefetch_job(s.key.name)),)))


def _unbound(c: Context) -> str:
    """Explain an unbound claim. The scheduler does not name the claim, and no API lists a class's access modes, so the
    text gives the likely causes."""
    text = "a claim of its pods has no volume: `kubectl get pvc` shows which, and `kubectl describe pvc` why."
    asked = c.spec.cache.weights
    if asked is None:
        return f"{text} Repair that claim, or name one that is Bound."
    named = asked.storage_class_name
    of = f"StorageClass {named}" if named is not None else "the cluster's default StorageClass"
    field, many = "spec.cache.weights", asked.access_mode == "ReadWriteMany"
    wrong = "its volumes cannot be shared (disks cannot)" if many else "it cannot provision one where the pods may run"
    or_else = ", or with accessMode ReadWriteOnce, which keeps all pods on one node" if many else ""
    name = claim_name(c.snapshot.key.name, c.spec)
    return (
        f"{text} PersistentVolumeClaim {name} asks for {asked.size} as {asked.access_mode} of {of}: there is no such "
        f"class, or {wrong}. A claim keeps both: take {field} out of the spec, delete the claim, and put {field} back "
        f"with the storageClassName of {'a shared file system' if many else 'another class'}{or_else}."
    )
