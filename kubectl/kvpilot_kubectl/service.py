"""Read from a QuantizedLLMService's JSON the fields that the commands show. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvpilot_kubectl.fields import Json, at, items, moment, text, whole, words
from kvpilot_operator.api.words import ConditionType, Reason, Stage, Verdict, WorkloadKind

# The statuses at which a condition needs no attention. Conditions that are not listed never need attention.
_CALM: dict[str, tuple[str, ...]] = {
    ConditionType.READY: ("True",),
    ConditionType.SERVING: ("True",),
    ConditionType.STALLED: ("False",),
    ConditionType.METRICS_AVAILABLE: ("True",),
    ConditionType.MEMORY_PRESSURED: ("False", "Unknown"),
    ConditionType.OBJECTIVES_HELD: ("True", "Unknown"),
    ConditionType.CANARY_HEALTHY: ("True", "Unknown"),
    ConditionType.ACCURACY_VERIFIED: ("True", "Unknown"),
}


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


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a service: an entry of status.conditions."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime | None
    generation: int | None

    @property
    def calm(self) -> bool:
        """True if the condition needs no attention. A condition of an unknown type never needs attention."""
        if self.type == ConditionType.SERVING and self.reason == Reason.SCALED_TO_ZERO:
            return True
        if self.type == ConditionType.CANARY_HEALTHY and self.reason in _HELD_UP:
            return False
        if (self.type, self.reason) in _TOLD_BY_REASON:
            return False
        return self.status in _CALM.get(self.type, (self.status,))


@dataclass(frozen=True, slots=True)
class Denied:
    """A dtype that is not tried again before `until`."""

    dtype: str
    reason: str
    message: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A running canary, or the result of the last one. `itl_change` is in percent of the stable revision's ITL p95."""

    dtype: str
    from_dtype: str
    revision: str
    stage: str
    verdict: str
    reason: str
    message: str
    weight: int | None
    since: datetime | None
    started: datetime | None
    stable_capacity: int | None
    capacity: int | None
    itl_change: int | None


@dataclass(frozen=True, slots=True)
class Service:
    """One service. Values that no operator has written yet are None or empty."""

    namespace: str
    name: str
    mode: str
    paused: bool
    generation: int | None
    written: bool
    dtype: str
    revision: str
    recommended: str
    url: str
    adapters: tuple[str, ...]
    weights: str
    """Phase of the PersistentVolumeClaim for weights."""
    ready: int | None
    replicas: int | None
    usage: int | None
    capacity: int | None
    accuracy: str
    """The last probed dtype, its verdict, and the cases that were covered."""
    canary: Trial | None
    last_trial: Trial | None
    denied: tuple[Denied, ...]
    conditions: tuple[Condition, ...]

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of that type, or None."""
        return next((one for one in self.conditions if one.type == kind), None)

    @property
    def load(self) -> str:
        """The resource that limits the engines, as the operator judges it."""
        found = self.condition(ConditionType.MEMORY_PRESSURED)
        return found.reason if found is not None else ""

    @property
    def behind(self) -> bool:
        """True if the conditions do not describe the newest spec yet."""
        seen = [one.generation for one in self.conditions if one.generation is not None]
        return self.generation is not None and bool(seen) and max(seen) < self.generation

    def standing(self, now: datetime) -> tuple[Denied, ...]:
        """Return the denials that have not expired. A denial whose end is unreadable counts as not expired."""
        return tuple(one for one in self.denied if one.until is None or one.until > now)


def read(obj: Json) -> Service:
    """Return the service that an object of the API server describes."""
    spec, status = at(obj, "spec"), at(obj, "status")
    return Service(
        namespace=text(obj, "metadata", "namespace"),
        name=text(obj, "metadata", "name"),
        mode=text(spec, "kvCache", "mode"),
        paused=at(spec, "rollout", "paused") is True,
        generation=whole(obj, "metadata", "generation"),
        written=isinstance(status, Mapping) and bool(status),
        dtype=text(status, "kvCache", "activeDtype") or text(status, "stable", "dtype"),
        revision=text(status, "stable", "revision"),
        recommended=text(status, "kvCache", "recommendedDtype"),
        url=text(status, "url"),
        adapters=words(status, "adapters"),
        weights=text(status, "cache", "phase"),
        ready=whole(status, "readyReplicas"),
        replicas=whole(status, "replicas"),
        usage=whole(status, "kvCache", "usagePercent"),
        capacity=whole(status, "kvCache", "capacityTokens"),
        accuracy=_accuracy(at(status, "accuracy", "last")),
        canary=_trial(at(status, "canary")),
        last_trial=next(map(_ended, items(status, "history")), None),
        denied=tuple(
            Denied(text(one, "dtype"), text(one, "reason"), text(one, "message"), moment(one, "until"))
            for one in items(status, "kvCache", "denied")
        ),
        conditions=tuple(
            Condition(
                text(one, "type"),
                text(one, "status"),
                text(one, "reason"),
                text(one, "message"),
                moment(one, "lastTransitionTime"),
                whole(one, "observedGeneration"),
            )
            for one in items(status, "conditions")
        ),
    )


def _accuracy(last: Json) -> str:
    head = " ".join(filter(None, (text(last, "dtype"), text(last, "verdict"))))
    return ": ".join(filter(None, (head, text(last, "covered"))))


def _trial(value: Json) -> Trial | None:
    if not isinstance(value, Mapping) or not value:
        return None
    return Trial(
        dtype=text(value, "dtype"),
        from_dtype=text(value, "fromDtype"),
        revision=text(value, "revision"),
        stage=text(value, "stage"),
        verdict=text(value, "verdict"),
        reason=text(value, "reason"),
        message=text(value, "message"),
        weight=whole(value, "weightPercent"),
        since=moment(value, "stageTime"),
        started=moment(value, "startedTime"),
        stable_capacity=whole(value, "stableCapacityTokens"),
        capacity=whole(value, "capacityTokens"),
        itl_change=whole(value, "itlP95ChangePercent"),
    )


def _ended(one: Json) -> Trial:
    """Read an ended trial from an entry of status.history."""
    verdict, percent = text(one, "verdict"), whole(one, "capacityPercent")
    return Trial(
        dtype=text(one, "dtype"),
        from_dtype=text(one, "fromDtype"),
        revision=text(one, "revision"),
        stage=Stage.PROMOTED if verdict == Verdict.PASSED else Stage.ROLLED_BACK,
        verdict=verdict,
        reason=text(one, "reason"),
        message=text(one, "message"),
        weight=None,
        since=moment(one, "time"),
        started=None,
        stable_capacity=None if percent is None else 100,
        capacity=percent,
        itl_change=whole(one, "itlP95ChangePercent"),
    )
