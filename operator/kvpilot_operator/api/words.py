"""Enum values that the operator writes to the status. Each value is part of the API."""

from enum import StrEnum
from typing import Self


class Stage(StrEnum):
    """Stages of a canary."""

    STARTING = "Starting"
    PROBING = "Probing"
    SHIFTING = "Shifting"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"


class Verdict(StrEnum):
    """Results of a canary, or of one measurement."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"
    ERROR = "Error"
    INCONCLUSIVE = "Inconclusive"


class TrafficMode(StrEnum):
    """Ways in which a canary gets its share of the requests."""

    PROBE_ONLY = "ProbeOnly"
    REPLICA_RATIO = "ReplicaRatio"
    HTTP_ROUTE = "HTTPRoute"


class Action(StrEnum):
    """Actions of decisions in the journal. The last six are steps, which the policy compares."""

    SERVE = "Serve"
    START_CANARY = "StartCanary"
    REPLACE_ONE = "ReplaceOne"
    JUDGE = "Judge"
    PROMOTE = "Promote"
    PROMOTED = "Promoted"
    ROLL_BACK = "RollBack"
    KEEP_BASELINE = "KeepBaseline"
    RECOMMEND = "Recommend"
    HOLD = "Hold"
    STAY = "Stay"
    DTYPE_DOWN = "DtypeDown"
    DTYPE_UP = "DtypeUp"
    SCALE_OUT = "ScaleOut"
    SCALE_IN = "ScaleIn"


class Outcome(StrEnum):
    """Results of the policy's check of one step: chosen, possible, or the reason against it."""

    CHOSEN = "Chosen"
    POSSIBLE = "Possible"
    INSUFFICIENT = "Insufficient"
    VETOED = "Vetoed"
    DENIED = "Denied"
    NOT_MEMORY = "NotMemory"
    NO_CANARY = "NoCanary"
    COOLING_DOWN = "CoolingDown"
    REPLICAS_FIRST = "ReplicasFirst"
    REPLICAS_MISSING = "ReplicasMissing"
    NOT_OWNER = "NotOwner"
    AT_LIMIT = "AtLimit"
    TOO_TIGHT = "TooTight"
    BACKING_OFF = "BackingOff"
    OBJECTIVES_HELD = "ObjectivesHeld"


class ObjectiveState(StrEnum):
    """States of a latency objective."""

    HELD = "Held"
    MISSED = "Missed"
    UNSETTLED = "Unsettled"
    NO_SAMPLES = "NoSamples"


class ConditionType(StrEnum):
    """Types of conditions, in the order of the status, each with the statuses at which it needs no attention.

    The text below a type has its reasons, for the table of docs/conditions.md (`make generate`).
    """

    calm: tuple[str, ...]

    def __new__(cls, word: str, *calm: str) -> Self:
        """Return the type `word`."""
        made = str.__new__(cls, word)
        made._value_, made.calm = word, calm
        return made

    READY = "Ready", "True"
    """the reason of `Stalled` or `Reconciling` if one of them is True, otherwise that of `Serving`"""
    SERVING = "Serving", "True"
    """`Serving`, `EnginesStarting`, `ScaledToZero`, `TrafficMoving`. If an engine does not start: `Unschedulable`,
    `ClaimNotBound`, `ImageUnavailable`, `ConfigMissing` (a Secret or ConfigMap), `EngineCrashed`, [the engine's own
    reason](serving.md) or the kubelet's"""
    RECONCILING = "Reconciling", "True", "False", "Unknown"
    """During a canary: `Canary` followed by its stage, such as CanaryProbing, or the reason why its pods do not start,
    as in `Serving`. Otherwise: `EnginesStarting`, `SpecChanged`, `Scaling`, `TrafficMoving`, `ReconcileIncomplete`,
    `Busy` (a canary waits [until the service is idle](canary.md#where-does-its-gpu-come-from)). While it is False:
    `Settled`"""
    STALLED = "Stalled", "False"
    """`SpecInvalid`, `RolloutPaused`, [the refusals of the API server](runbooks/KvpilotObjectsRefused.md#mitigation).
    If no canary can start: `ProbeSetInvalid`, `ScaledToZero`, `Unschedulable`, `RouteUnusable`, `DtypeDenied`,
    `BaselineUnfit`, `RevisionFailed`, `ReconcileIncomplete`. If an engine fails: the same reasons as in `Serving`"""
    METRICS_AVAILABLE = "MetricsAvailable", "True"
    """`Scraped`, `NoMetrics`. `EnginesStalled` if some engines have requests but produce no tokens: the condition is
    True while other engines work, and False if none works"""
    MEMORY_PRESSURED = "MemoryPressured", "False", "Unknown"
    """[the resource that limits the service](pilot.md#which-resource-limits-the-service): `NoMetrics`,
    `EnginesStalled`, `Warming`, `Idle`, `MemoryBound`, `PrefillBound`, `ComputeBound`, `Imbalanced`, `Relaxed`"""
    OBJECTIVES_HELD = "ObjectivesHeld", "True", "Unknown"
    """`Held`, `Missed`, `Unsettled`, `NoSamples`"""
    CANARY_HEALTHY = "CanaryHealthy", "True", "Unknown"
    """`NoCanary`, or the canary's stage. Why the canary started: `SpecChanged`, `MemoryPressured`, `ObjectiveMissed`,
    `LoadLeft`, `AccuracyDrifted`. What the probes found: `WithinLimits`, `TooFewSamples`, `AccuracyRegressed`,
    `MixedFactors`, `BaselineLost`, `BaselineUnfit`, `DtypeMismatch`, `EngineCrashed` (at a full context), `ProbeErrors`
    or [why a probe failed](accuracy-watch.md#why-did-a-probe-end-without-figures). What its traffic showed:
    `WithinLimits`, `TooFewSamples`, `PerformanceRegressed`, `ErrorsIncreased`. Why else the trial ended: `Superseded`,
    `ProgressDeadlineExceeded`. Why its pods do not start: the same reasons as in `Serving`"""
    ACCURACY_VERIFIED = "AccuracyVerified", "True", "Unknown"
    """`Reference`, `WithinLimits`, `NotProbed`, `AccuracyRegressed`, `AccuracyDrifted`, `ProbeErrors`,
    `ProbeSetInvalid`, `MixedFactors`, `BaselineUnfit`, `DtypeMismatch`"""


class Reason(StrEnum):
    """Reasons of conditions, canaries, denials and decisions. A reason may also be a `WorkloadKind`, an
    `ObjectiveState`, an `Outcome`, a `Stage`, or a reason that an engine, the kubelet or the API server reported
    (docs/conditions.md)."""

    ACCURACY_REGRESSED = "AccuracyRegressed"
    ACCURACY_DRIFTED = "AccuracyDrifted"
    SUPERSEDED = "Superseded"
    ROUTE_UNUSABLE = "RouteUnusable"
    MIXED_FACTORS = "MixedFactors"
    BASELINE_LOST = "BaselineLost"
    BASELINE_UNFIT = "BaselineUnfit"
    DTYPE_MISMATCH = "DtypeMismatch"
    # Reasons about the service as a whole.
    SERVING = "Serving"
    ENGINES_STARTING = "EnginesStarting"
    SCALING = "Scaling"
    SCALED_TO_ZERO = "ScaledToZero"
    TRAFFIC_MOVING = "TrafficMoving"
    SETTLED = "Settled"
    ROLLOUT_PAUSED = "RolloutPaused"
    SPEC_CHANGED = "SpecChanged"
    SPEC_INVALID = "SpecInvalid"
    RECONCILE_INCOMPLETE = "ReconcileIncomplete"
    # Reasons about engines.
    UNSCHEDULABLE = "Unschedulable"
    CLAIM_NOT_BOUND = "ClaimNotBound"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    CONFIG_MISSING = "ConfigMissing"
    ENGINE_CRASHED = "EngineCrashed"
    # Reasons about metrics, and the conclusions of the policy.
    SCRAPED = "Scraped"
    BUSY = "Busy"
    MEMORY_PRESSURED = "MemoryPressured"
    SURGE = "Surge"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    END_OF_LADDER = "EndOfLadder"
    LOAD_LEFT = "LoadLeft"
    # Reasons why a canary cannot start, and results of its comparison with the serving revision.
    DTYPE_DENIED = "DtypeDenied"
    REVISION_FAILED = "RevisionFailed"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    WITHIN_LIMITS = "WithinLimits"
    TOO_FEW_SAMPLES = "TooFewSamples"
    PERFORMANCE_REGRESSED = "PerformanceRegressed"
    ERRORS_INCREASED = "ErrorsIncreased"
    # Reasons about the accuracy of answers.
    REFERENCE = "Reference"
    NOT_PROBED = "NotProbed"
    PROBE_ERRORS = "ProbeErrors"
    PROBE_SET_INVALID = "ProbeSetInvalid"


class WorkloadKind(StrEnum):
    """Kinds of load, as judged from a window of metrics. They are reasons of the condition MemoryPressured."""

    NO_METRICS = "NoMetrics"
    ENGINES_STALLED = "EnginesStalled"
    WARMING = "Warming"
    IDLE = "Idle"
    MEMORY_BOUND = "MemoryBound"
    PREFILL_BOUND = "PrefillBound"
    COMPUTE_BOUND = "ComputeBound"
    IMBALANCED = "Imbalanced"
    RELAXED = "Relaxed"
