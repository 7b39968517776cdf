"""The words that the status is written in. Each value is part of the API: a new one is added here and in crds/."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """How far a canary is."""

    STARTING = "Starting"
    PROBING = "Probing"
    SHIFTING = "Shifting"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"


class Verdict(StrEnum):
    """What was found of a canary, or in one measurement."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"
    ERROR = "Error"
    INCONCLUSIVE = "Inconclusive"


class TrafficMode(StrEnum):
    """How a canary gets its share of the requests."""

    PROBE_ONLY = "ProbeOnly"
    REPLICA_RATIO = "ReplicaRatio"
    HTTP_ROUTE = "HTTPRoute"


class Action(StrEnum):
    """What was decided, or (the last six) which step was weighed."""

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
    OFFLOAD = "Offload"


class Outcome(StrEnum):
    """What became of a step that was weighed."""

    CHOSEN = "Chosen"
    PASSED = "Passed"
    POSSIBLE = "Possible"
    INSUFFICIENT = "Insufficient"
    VETOED = "Vetoed"
    DENIED = "Denied"
    SLOWER = "Slower"
    NOT_MEMORY = "NotMemory"
    NO_CANARY = "NoCanary"
    COOLING_DOWN = "CoolingDown"
    DWELLING = "Dwelling"
    REPLICAS_FIRST = "ReplicasFirst"
    REPLICAS_MISSING = "ReplicasMissing"
    NOT_OWNER = "NotOwner"
    AT_LIMIT = "AtLimit"
    SETTLING = "Settling"
    TOO_TIGHT = "TooTight"
    REGRETTED = "Regretted"
    OBJECTIVES_HELD = "ObjectivesHeld"
    NOT_ASKED = "NotAsked"


class ObjectiveState(StrEnum):
    """Whether a latency objective is held."""

    HELD = "Held"
    MISSED = "Missed"
    UNSETTLED = "Unsettled"
    NO_SAMPLES = "NoSamples"


class Reason(StrEnum):
    """Reasons that other rules act on; all others are for people, and some are the engines' or the API server's."""

    ACCURACY_REGRESSED = "AccuracyRegressed"
    ACCURACY_DRIFTED = "AccuracyDrifted"
    SUPERSEDED = "Superseded"
    ROUTE_UNUSABLE = "RouteUnusable"
    MIXED_FACTORS = "MixedFactors"
    BASELINE_LOST = "BaselineLost"
    ENGINE_BUSY = "EngineBusy"


class CachePhase(StrEnum):
    """How far the claim for weights is filled."""

    PENDING = "Pending"
    PREFETCHING = "Prefetching"
    READY = "Ready"


class WorkloadKind(StrEnum):
    """What the window of metrics says; the reason of the condition MemoryPressured."""

    NO_METRICS = "NoMetrics"
    WARMING = "Warming"
    IDLE = "Idle"
    MEMORY_BOUND = "MemoryBound"
    PREFILL_BOUND = "PrefillBound"
    COMPUTE_BOUND = "ComputeBound"
    RELAXED = "Relaxed"
