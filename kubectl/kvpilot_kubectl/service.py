"""Tell which of a service's conditions need attention, and read facts that its status only implies. No I/O.

Modules that show other fields read them directly (`fields`).
"""

from collections.abc import Mapping
from datetime import datetime

from kvpilot_kubectl.fields import Json, at, items, moment, text, whole
from kvpilot_operator.api.words import ConditionType, Reason, Stage, Verdict, WorkloadKind

# (condition, reason) pairs that need attention at any status.
_TOLD_BY_REASON = (
    (ConditionType.RECONCILING, Reason.RECONCILE_INCOMPLETE),
    (ConditionType.METRICS_AVAILABLE, WorkloadKind.ENGINES_STALLED),
    (ConditionType.MEMORY_PRESSURED, WorkloadKind.IMBALANCED),
)
# Reasons why pods of a canary do not start. Show them at once, because they may last until the progress deadline.
_HELD_UP = (
    Reason.UNSCHEDULABLE, Reason.CLAIM_NOT_BOUND, Reason.IMAGE_UNAVAILABLE, Reason.CONFIG_MISSING,
    "CreateContainerConfigError", "CreateContainerError", "CrashLoopBackOff",
)  # fmt: skip


def is_calm(condition: Json) -> bool:
    """Return True if the condition needs no attention. A condition of an unknown type never needs attention."""
    kind, status, reason = (text(condition, field) for field in ("type", "status", "reason"))
    if kind == ConditionType.SERVING and reason == Reason.SCALED_TO_ZERO:
        return True
    if kind == ConditionType.CANARY_HEALTHY and reason in _HELD_UP:
        return False
    if (kind, reason) in _TOLD_BY_REASON:
        return False
    return status in {str(one): one.calm for one in ConditionType}.get(kind, (status,))


def condition(obj: Json, kind: str) -> Json:
    """Return a service's condition of that type, or None."""
    return next((one for one in items(obj, "status", "conditions") if text(one, "type") == kind), None)


def load(obj: Json) -> str:
    """Return the resource that limits the engines, as the operator judges it; empty without a judgement."""
    return text(condition(obj, ConditionType.MEMORY_PRESSURED), "reason")


def is_written(obj: Json) -> bool:
    """Return True if an operator has written a status."""
    status = at(obj, "status")
    return isinstance(status, Mapping) and bool(status)


def is_behind(obj: Json) -> bool:
    """Return True if the conditions do not describe the newest spec yet."""
    newest = whole(obj, "metadata", "generation")
    found = (whole(one, "observedGeneration") for one in items(obj, "status", "conditions"))
    seen = [one for one in found if one is not None]
    return newest is not None and bool(seen) and max(seen) < newest


def name(obj: Json) -> str:
    """Return NAMESPACE/NAME."""
    return f"{text(obj, 'metadata', 'namespace')}/{text(obj, 'metadata', 'name')}"


def is_paused(obj: Json) -> bool:
    """Return True if spec.rollout.paused is set."""
    return at(obj, "spec", "rollout", "paused") is True


def dtype(obj: Json) -> str:
    """Return the serving dtype, or the empty string."""
    return text(obj, "status", "kvCache", "activeDtype") or text(obj, "status", "stable", "dtype")


def canary(obj: Json) -> Json:
    """Return the running canary, or None."""
    found = at(obj, "status", "canary")
    return found if isinstance(found, Mapping) and found else None


def last_trial(obj: Json) -> Json:
    """Return the newest trial that has ended, or None."""
    return next(items(obj, "status", "history"), None)


def stage(trial: Json) -> str:
    """Return the stage of a canary, or the one in which a trial ended: Promoted or RolledBack."""
    ended = Stage.PROMOTED if text(trial, "verdict") == Verdict.PASSED else Stage.ROLLED_BACK
    return text(trial, "stage") if "time" not in trial else ended


def standing(obj: Json, now: datetime) -> list[Json]:
    """Return the denials that have not expired. A denial whose end is unreadable counts as not expired."""
    denied = ((one, moment(one, "until")) for one in items(obj, "status", "kvCache", "denied"))
    return [one for one, until in denied if until is None or until > now]
