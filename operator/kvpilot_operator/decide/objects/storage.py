"""Decide the PersistentVolumeClaim for the model's weights, and explain pods that wait for a volume or a scheduler."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from kvpilot_operator.api.names import weights_claim
from kvpilot_operator.api.words import Reason
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import pending_reason
from kvpilot_operator.render.objects import claim
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.status import clip
from kvpilot_operator.times import utc

_UNHEARD = timedelta(seconds=60)


def keep(c: Context) -> Context:
    """Render the claim. If the spec no longer asks for it, do not delete it: pods may use it."""
    s, asked = c.snapshot, c.spec.cache.weights
    return c if asked is None else replace(c, storage=(claim(s.key, s.uid, asked),))


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
            return Cause(Reason.UNSCHEDULABLE, f"the scheduler says {text}: check that the pod's scheduler runs")
    return None


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
    name = weights_claim(c.snapshot.key.name)
    return (
        f"{text} PersistentVolumeClaim {name} asks for {asked.size} as {asked.access_mode} of {of}: there is no such "
        f"class, or {wrong}. A claim cannot change either: remove {field} from the spec, delete the claim, and add "
        f"{field} again with the storageClassName of {'a shared file system' if many else 'another class'}{or_else}."
    )
