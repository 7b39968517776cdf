"""Find faults of engines: causes that keep them from starting, and calibration factors that differ between pods."""

import json
import re
from collections.abc import Sequence

from kvpilot_operator.api.words import Reason
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import ON_ITS_WAY, PodView
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import clip

# A busy node may kill an engine once or twice, so only a third restart counts as a failure.
MAX_RESTARTS = 3
# A container may write any text as its reason, so accept only the form that a condition's reason must have.
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Scheduler messages about a PersistentVolumeClaim without a volume. The last two texts count only if the message lacks
# "Insufficient". Otherwise the pod also waits for resources.
_UNBOUND = re.compile(
    r'unbound immediate PersistentVolumeClaims|persistentvolumeclaim "[^"]*" not found|VolumeBinding'
    r"|^(?!.*Insufficient).*(?:didn't find available persistent volumes to bind|did not have enough free storage)"
)
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# Kubelet messages about a Secret or ConfigMap that a container's variables use: it does not exist, or lacks the key.
_NOT_THERE = re.compile(
    r'(?P<kind>secret|configmap) "(?P<name>[^"]*)" not found'
    r"|couldn't find key (?P<key>\S+) in (?P<kind_of_key>Secret|ConfigMap) [^/\s]*/(?P<holder>\S+)",
    re.IGNORECASE,
)
_MISSING = {"secret": "Secret", "configmap": "ConfigMap"}


def refusal(exit_message: str | None) -> Cause | None:
    """Return the cause from the JSON line that kvpilot-serve writes when it refuses to start, or None."""
    for line in reversed((exit_message or "").splitlines()):
        if '"kvpilot"' not in line:
            continue
        try:
            record = json.loads(line[line.index("{") :])
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kvpilot") == "refused":
            said = record.get("message")
            # JSON can escape lone surrogates, but a status cannot hold them, so replace them.
            text = said.encode("utf-8", "replace").decode() if isinstance(said, str) else ""
            return Cause(_reason(record.get("reason"), Reason.ENGINE_CRASHED), clip(text))
    return None


def _reason(said: object, otherwise: str) -> str:
    return said if isinstance(said, str) and _REASON.fullmatch(said) else otherwise


def engine_failure(pods: Sequence[PodView]) -> Cause | None:
    """Return a failure that waiting cannot cure (the engine refused to start, or keeps crashing), or None."""
    for pod in (one for leader in pods if not (leader.ready or leader.containers_ready) for one in leader.group):
        refused = refusal(pod.exit_message)
        if refused is not None:
            return refused
        if pod.restarts >= MAX_RESTARTS:
            tail = (pod.exit_message or "no message").strip().splitlines()[-3:]
            return Cause(Reason.ENGINE_CRASHED, clip(f"{pod.restarts} restarts; last words: {' | '.join(tail)}"))
    return None


def made_anew(s: Snapshot, revision: str) -> list[PodView]:
    """Return the terminating leader pods of a revision that runs on several nodes; empty for other revisions.

    If one pod of a multi-node group fails, the whole group is deleted. So only terminating pods have the last messages
    of its engine.
    """
    view = s.deployments.get(revision)
    groups = view is not None and view.nodes > 1
    return [pod for pod in s.pods if groups and pod.terminating and pod.revision == revision]


def pending_reason(pods: Sequence[PodView]) -> Cause | None:
    """Return the first cause that keeps one of these pods from starting, such as no node or no image; or None."""
    for pod in (one for leader in pods for one in leader.group):
        if pod.unschedulable:
            known = Reason.CLAIM_NOT_BOUND if waits_for_volume(pod) else Reason.UNSCHEDULABLE
            return Cause(known, clip(pod.unschedulable))
        # Report a waiting init container first, because the engine's container then waits only for it.
        reason, message = pod.held_up or (pod.waiting_reason, pod.exit_message)
        if reason in _IMAGE_REASONS:
            return Cause(Reason.IMAGE_UNAVAILABLE, clip(f"{reason}: {message or ''}"))
        missing = _missing(message or "") if reason == "CreateContainerConfigError" else None
        if missing is not None:
            return missing
        if reason in ON_ITS_WAY and pod.needs is not None:
            return Cause(reason, clip(not_started(pod)))
        if reason:
            return Cause(_reason(reason, Reason.ENGINES_STARTING), clip((message or "").strip()[-600:]))
    return None


def _missing(message: str) -> Cause | None:
    found = _NOT_THERE.search(message)
    if found is None:
        return None
    kind = _MISSING[(found["kind"] or found["kind_of_key"]).lower()]
    text = f"{kind} {found['holder']} has no key {found['key']}: add it, or name another one in spec.engine.env"
    if not found["key"]:
        remedy = "create it in the namespace of the service, or name another one in the spec"
        text = f"{kind} {found['name']} does not exist: {remedy}"
    return Cause(Reason.CONFIG_MISSING, clip(f"{text} ({message.strip()})"))


def waits_for_volume(pod: PodView) -> bool:
    """Return True if no node takes this pod because a claim has no volume, so that free capacity does not help."""
    return pod.unschedulable is not None and _UNBOUND.search(pod.unschedulable) is not None


def not_started(pod: PodView) -> str:
    """Return the advice to look up the kubelet's reason in Events, which the operator has no right to read."""
    volumes = f" It needs {', '.join(pod.needs)}." if pod.needs else ""
    return (
        f"pod {pod.name} has a node, but none of its containers has started yet.{volumes} If that persists, `kubectl "
        "describe pod` shows what the kubelet waits for (an image, a volume)"
    )


def mixed_factors(s: Snapshot, revision: str) -> str | None:
    """Name pods whose calibration factors differ from those of most pods, and the remedy; None if there are none."""
    sample, there = s.last_sample(revision), {pod.name for pod in s.pods_of(revision)}
    others = [] if sample is None else [f"{pod} has {factors}" for pod, factors in sample.mixed if pod in there]
    if sample is None or not others:
        return None
    return (
        f"the calibration factors of revision {revision} differ: {', '.join(others)}, where others have "
        f"{sample.factors}. If the model's files have changed meanwhile, delete these pods. Otherwise keep all engines "
        "on one kind of GPU (spec.engine.podTemplate.spec.nodeSelector), or give all the same file with factors "
        "(KVPILOT_CALIBRATION in spec.engine.env)"
    )
