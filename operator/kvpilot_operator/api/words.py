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


class ConditionType(StrEnum):
    """What a condition is about; each has its rows in docs/conditions.md."""

    READY = "Ready"
    SERVING = "Serving"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    MODEL_CACHED = "ModelCached"
    METRICS_AVAILABLE = "MetricsAvailable"
    MEMORY_PRESSURED = "MemoryPressured"
    OBJECTIVES_HELD = "ObjectivesHeld"
    CANARY_HEALTHY = "CanaryHealthy"
    ACCURACY_VERIFIED = "AccuracyVerified"
    CALIBRATION_CONSISTENT = "CalibrationConsistent"
    SPEC_ACCEPTED = "SpecAccepted"
    OBJECTS_ACCEPTED = "ObjectsAccepted"
    ROUTE_ACCEPTED = "RouteAccepted"
    RECONCILE_SUCCEEDED = "ReconcileSucceeded"


class Reason(StrEnum):
    """Why a condition, a canary, a denial or a decision is as it is; on the first nine other rules act.

    It may also be a `WorkloadKind`, an `ObjectiveState`, an `Outcome`, a stage, or a word of an engine, the kubelet or
    the API server: docs/conditions.md has them by condition.
    """

    ACCURACY_REGRESSED = "AccuracyRegressed"
    ACCURACY_DRIFTED = "AccuracyDrifted"
    SUPERSEDED = "Superseded"
    ROUTE_UNUSABLE = "RouteUnusable"
    MIXED_FACTORS = "MixedFactors"
    BASELINE_LOST = "BaselineLost"
    ENGINE_BUSY = "EngineBusy"
    BASELINE_UNFIT = "BaselineUnfit"
    DTYPE_MISMATCH = "DtypeMismatch"

    # The service as a whole.
    SERVING = "Serving"
    ENGINES_READY = "EnginesReady"
    TOO_FEW_REPLICAS = "TooFewReplicas"
    ENGINES_STARTING = "EnginesStarting"
    SCALING = "Scaling"
    LEAVING = "Leaving"
    TRAFFIC_MOVING = "TrafficMoving"
    SETTLED = "Settled"
    SCALED_TO_ZERO = "ScaledToZero"
    NO_REVISION = "NoRevision"
    NO_SERVICE = "NoService"
    ROLLOUT_PAUSED = "RolloutPaused"
    SPEC_NOT_REACHED = "SpecNotReached"
    SPEC_INVALID = "SpecInvalid"
    INVALID = "Invalid"
    ACCEPTED = "Accepted"
    PARTLY_ACTED_ON = "PartlyActedOn"
    ALL_ANSWERED = "AllAnswered"

    # Its objects.
    WRITTEN = "Written"
    NOT_WRITTEN_YET = "NotWrittenYet"
    ROUTE_ACCEPTED = "RouteAccepted"
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted"
    ROUTE_WAITING = "RouteWaiting"
    POOL_REFUSED = "PoolRefused"
    NO_ROUTE = "NoRoute"

    # Its engines, and the weights that they load.
    UNSCHEDULABLE = "Unschedulable"
    CLAIM_NOT_BOUND = "ClaimNotBound"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    SECRET_MISSING = "SecretMissing"  # noqa: S105 - a word, no password
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    WAITING = "Waiting"
    ENGINE_REFUSED = "EngineRefused"
    ENGINE_CRASHED = "EngineCrashed"
    ENGINE_LOADED_IT = "EngineLoadedIt"
    NOT_LOADED_YET = "NotLoadedYet"
    PREFETCHED = "Prefetched"
    PREFETCH_PENDING = "PrefetchPending"
    PREFETCHING_WEIGHTS = "PrefetchingWeights"
    PREFETCH_FAILED = "PrefetchFailed"

    # What was measured.
    SCRAPED = "Scraped"
    PARTLY_BELIEVED = "PartlyBelieved"
    SAME_FACTORS = "SameFactors"
    NOT_CALIBRATED = "NotCalibrated"
    NOT_REPORTED = "NotReported"

    # Which dtype, and what keeps another one from serving.
    BASELINE = "Baseline"
    FIXED_DTYPE = "FixedDtype"
    SPEC_CHANGED = "SpecChanged"
    NOT_CHOSEN = "NotChosen"
    DTYPE_DENIED = "DtypeDenied"
    REVISION_FAILED = "RevisionFailed"
    NOT_OBSERVED = "NotObserved"
    NO_REPLICA_TO_REPLACE = "NoReplicaToReplace"

    # What the policy found.
    NOT_WEIGHED = "NotWeighed"
    BUSY = "Busy"
    REPLICAS_LOADING = "ReplicasLoading"
    MEMORY_PRESSURED = "MemoryPressured"
    SURGE = "Surge"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    END_OF_LADDER = "EndOfLadder"
    LOAD_LEFT = "LoadLeft"
    MEMORY_KEEPS_REPLICAS = "MemoryKeepsReplicas"
    PRESSURE_LEFT = "PressureLeft"

    # How a canary does beside what serves.
    NO_CANARY = "NoCanary"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    NO_STEP_LEFT = "NoStepLeft"
    STEP_PASSED = "StepPassed"
    WITHIN_LIMITS = "WithinLimits"
    NOT_SIGNIFICANT = "NotSignificant"
    TOO_FEW_REQUESTS = "TooFewRequests"
    TOO_FEW_SCRAPES = "TooFewScrapes"
    BUCKETS_DIFFER = "BucketsDiffer"
    LATENCY_REGRESSED = "LatencyRegressed"
    THROUGHPUT_REGRESSED = "ThroughputRegressed"
    ERRORS_INCREASED = "ErrorsIncreased"

    # How it answers.
    REFERENCE = "Reference"
    NOT_PROBED = "NotProbed"
    NOT_WATCHED = "NotWatched"
    PROBE_FAILED = "ProbeFailed"
    PROBE_ERRORS = "ProbeErrors"
    PROBE_CRASHED = "ProbeCrashed"
    PROBE_SET_INVALID = "ProbeSetInvalid"
    BASELINE_NOT_KEPT = "BaselineNotKept"
    TOO_FEW_POSITIONS = "TooFewPositions"


class CachePhase(StrEnum):
    """How far the claim for weights is filled."""

    PENDING = "Pending"
    PREFETCHING = "Prefetching"
    READY = "Ready"


class WorkloadKind(StrEnum):
    """What the window of metrics says; the reason of the condition MemoryPressured."""

    NO_METRICS = "NoMetrics"
    ENGINES_STALLED = "EnginesStalled"
    WARMING = "Warming"
    IDLE = "Idle"
    MEMORY_BOUND = "MemoryBound"
    PREFILL_BOUND = "PrefillBound"
    COMPUTE_BOUND = "ComputeBound"
    IMBALANCED = "Imbalanced"
    RELAXED = "Relaxed"
