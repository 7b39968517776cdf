"""`.status` of a QuantizedLLMService as frozen structs: the only state that outlives the operator's process.

Field names are the CRD's in snake case; KL divergences are integers in micronats, shares in permille, times in UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvpilot_formats import untrusted
from kvpilot_operator.api.record import Count, Percent, ReasonText, Record, Word, keyed_by
from kvpilot_operator.api.words import (
    Action,
    CachePhase,
    ConditionType,
    ObjectiveState,
    Outcome,
    Stage,
    TrafficMode,
    Verdict,
)
from kvpilot_operator.state.accuracy import Accuracy

MAX_DECISIONS = 10
MAX_DENIED = 32
MAX_OPTIONS = 12
MAX_HISTORY = 16
MAX_SATURATIONS = 20
MAX_MESSAGE = 1024


class Stable(Record, frozen=True, kw_only=True):
    """The revision that serves the traffic."""

    revision: Word
    """The revision's name, 8 hexadecimal digits."""
    dtype: Word
    """The KV cache dtype of this revision."""
    since: datetime
    """When it took the traffic."""
    ever_ready: bool = False
    """Whether this revision was ready at least once."""


class Denied(Record, frozen=True, kw_only=True):
    """A dtype that must not be tried for this (model, image, GPU, recent window asked for) before `until`."""

    dtype: Word
    """The dtype that failed."""
    model: Annotated[str, Meta(max_length=700)]
    """The model it failed with."""
    image: Annotated[str, Meta(max_length=512)]
    """The engine image it failed with."""
    gpu: Annotated[str, Meta(max_length=128)]
    """The GPU it failed on, or cpu."""
    recent_tokens: Count | None = None
    """The spec.kvCache.recentTokens it failed with; absent where none was set."""
    reason: ReasonText
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=2048)]
    """Why, in words and numbers."""
    until: datetime
    """When it may be tried again."""


class WeightsCache(Record, frozen=True, kw_only=True):
    """How far the claim for weights is filled, with cache.prefetch. Until it is Ready no engine is started for what the
    newest spec asks for."""

    identity: Word
    """Hash of the claim, and of the model, its revision and adapters that have to be on it."""
    phase: CachePhase
    """Pending before the Job says how much there is to fetch, Prefetching, and Ready once all of it is there."""
    claim_name: Annotated[str, Meta(max_length=253)]
    """The PersistentVolumeClaim."""
    downloaded_bytes: Count | None = None
    """What of it is there, to one part in a hundred."""
    total_bytes: Count | None = None
    """What has to be there."""


class KVCache(Record, frozen=True, kw_only=True):
    """The KV cache as it is."""

    active_dtype: Word | None = None
    """The dtype that serves the traffic."""
    observed_dtype: Word | None = None
    """The dtype that the engines themselves report in their metrics; Other where kvpilot knows none of that name."""
    recent_tokens: Count | None = None
    """How many of the last tokens of each sequence the engines themselves say that they read at 8 bits."""
    retention: Word | None = None
    """What the engines themselves say that they keep of a sequence, such as SinksAndWindow; Other where kvpilot knows
    no such policy, absent where they keep every token."""
    recommended_dtype: Word | None = None
    """The dtype that kvpilot would choose now."""
    capacity_tokens: Count | None = None
    """Tokens that the KV caches of all serving replicas hold together, in sequences of the longest context, as the
    engines report it: what recent windows take is not in it."""
    usage_percent: Percent | None = None
    """How full the KV cache of the fullest serving replica is, in percent."""
    gpu_hit_percent: Percent | None = None
    """With kvCache.offload, the share of the tokens of prompts that the prefix caches of the GPUs held over the last
    window, in percent."""
    host_hit_percent: Percent | None = None
    """With kvCache.offload, the share of them that was loaded from host memory, in percent."""
    disk_hit_percent: Percent | None = None
    """With kvCache.offload.disk, the share of them that was loaded from the disk, in percent."""
    changed_time: datetime | None = None
    """When activeDtype last changed; the dwell time counts from here."""
    denied: Annotated[tuple[Denied, ...], Meta(max_length=32)] = ()
    """Dtypes that failed and are not tried again before a point in time."""


class Saturation(Record, frozen=True, kw_only=True):
    """What one replica finished when requests last queued with this dtype, and how many tokens they had on average.

    Of the prompt, also how many of them no cache held; and whether they queued for memory.
    """

    dtype: Word
    """The dtype that served."""
    requests_per_hour: Count
    """Requests that one replica finished, an hour."""
    mean_prompt: Count
    """Mean length of their prompts, in tokens; the figure counts for similar requests only."""
    mean_generation: Count
    """Mean length of their answers, in tokens."""
    computed_prompt: Count | None = None
    """Tokens of a prompt that no cache held, on average; told only beside scaling.objectives."""
    memory: bool | None = None
    """Whether they queued for KV cache memory; told only where they did, beside scaling.objectives."""


class ScaleInBackoff(Record, frozen=True, kw_only=True):
    """So many replicas of this dtype were too few and are not tried again for a day."""

    dtype: Word
    """The dtype that served."""
    replicas: Count
    """The replicas that were too few."""
    time: datetime
    """When they were."""


class Scaling(Record, frozen=True, kw_only=True):
    """How many replicas kvpilot wants, with spec.scaling.mode Operator."""

    desired_replicas: Count | None = None
    """The number that is kept up, between minReplicas and maxReplicas."""
    recommended_replicas: Count | None = None
    """The number that kvpilot would choose now, in every mode."""
    spec_replicas: Count | None = None
    """The spec.replicas that desiredReplicas started from; a change of it starts anew."""
    changed_time: datetime | None = None
    """When desiredReplicas last changed."""
    scaled_in_time: datetime | None = None
    """When a replica was last given back."""
    scale_in_backoff: ScaleInBackoff | None = None
    saturations: Annotated[tuple[Saturation, ...], Meta(max_length=20, extra=keyed_by("dtype"))] = ()
    """What one replica of a dtype finished when requests last queued for it. A step back to that dtype, or to fewer
    replicas, waits until the load is well below that."""


class Objective(Record, frozen=True, kw_only=True):
    """A latency objective and what was last seen of it; a figure that hardly moved is not written anew."""

    metric: Literal["TTFT", "ITL"]
    """TTFT: time to first token. ITL: time between two tokens."""
    percentile: Percent
    """As in the spec."""
    milliseconds: Annotated[int, Meta(ge=1, le=3_600_000)]
    """The longest time."""
    state: ObjectiveState
    """Held; Missed, in both halves of the window; Unsettled, in the window and not in both halves; or NoSamples, of
    which there were too few."""
    observed_milliseconds: Count | None = None
    """The percentile that was observed."""


class Cost(Record, frozen=True, kw_only=True):
    """What the service costs, in millionths of the currency of the operator's prices; absent where its kind of GPU has
    none."""

    per_hour_micros: Count
    """Of all GPUs that its replicas have, a canary's included, an hour."""
    per_million_tokens_micros: Count | None = None
    """Of a million generated tokens, at the rate of the last window; rewritten where it moved by 10%."""


class Canary(Record, frozen=True, kw_only=True):
    """A revision on trial. Changes are in percent of the stable side."""

    revision: Word
    """The revision that is tried."""
    dtype: Word
    """Its KV cache dtype."""
    from_dtype: Word
    """The dtype of the stable revision at the start."""
    stage: Stage
    """How far it is."""
    started_time: datetime
    """When it was started."""
    stage_time: datetime
    """When it reached this stage, or last made progress in it."""
    generation: Count | None = None
    """The metadata.generation that it was last on trial for."""
    reason: ReasonText = ""
    """Why it is at this stage, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=4096)] = ""
    """Why it is at this stage, in words and numbers."""
    verdict: Verdict = Verdict.PENDING
    """What its probes, and then its steps, say. Failed is bad accuracy or latency, Error is no measurement,
    Inconclusive is too little of it."""
    errors: Count = 0
    """Probe runs in a row without a verdict."""
    failures: Count = 0
    """Probe runs that failed."""
    capacity_tokens: Count | None = None
    """Tokens that one canary replica's KV cache holds."""
    stable_capacity_tokens: Count | None = None
    """Tokens that one stable replica's KV cache holds."""
    replaces_one: bool = False
    """Whether it took the place of one stable replica, for want of spare capacity."""
    traffic_mode: TrafficMode | None = None
    """How live traffic reaches it. ProbeOnly means that it gets none before its promotion."""
    step: Count | None = None
    """Which of spec.canary.steps it is at, from 0."""
    step_time: datetime | None = None
    """When it reached that step."""
    weight_percent: Percent | None = None
    """Share of live traffic that it takes now, in percent."""
    ttft_p95_change_percent: int | None = None
    """Change of the 95th percentile of the time to first token against the stable side, in percent."""
    itl_p95_change_percent: int | None = None
    """Change of the 95th percentile of the time between two tokens against the stable side, in percent."""
    throughput_change_percent: int | None = None
    """Change of the tokens per second of a running request against the stable side, in percent."""

    @property
    def capacity_ratio(self) -> float | None:
        """The capacity of its replica over that of a stable one; None where either is not known."""
        ours, theirs = self.capacity_tokens, self.stable_capacity_tokens
        return ours / theirs if ours and theirs else None


CHANGES = ("ttft_p95_change_percent", "itl_p95_change_percent", "throughput_change_percent")
"""Fields of a trial that compare the canary with the stable side."""


class Experience(Record, frozen=True, kw_only=True):
    """The end of a trial: what the policy expects of the same dtype next time. The newest one has the message."""

    revision: Word
    """The revision that was tried."""
    dtype: Word
    """The dtype that was tried."""
    from_dtype: Word
    """The dtype that served meanwhile."""
    model: Annotated[str, Meta(max_length=700)]
    """The model."""
    image: Annotated[str, Meta(max_length=512)]
    """The engine image."""
    gpu: Annotated[str, Meta(max_length=128)]
    """The GPU, or cpu."""
    recent_tokens: Count | None = None
    """The spec.kvCache.recentTokens; absent where none was set."""
    time: datetime
    """End of the trial; while it is rolled back, the time of its verdict."""
    verdict: Verdict
    """How it ended."""
    reason: ReasonText
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=1024)] = ""
    """The cause with its figures; empty in all rows but the newest."""
    generation: Count | None = None
    """The metadata.generation that started the trial."""
    traffic_mode: TrafficMode | None = None
    """How live traffic reached it."""
    capacity_percent: Count | None = None
    """Tokens that a replica held, in percent of a stable one's."""
    ttft_p95_change_percent: int | None = None
    """Change of the 95th percentile of the time to first token against the stable side, in percent."""
    itl_p95_change_percent: int | None = None
    """Change of the 95th percentile of the time between two tokens against the stable side, in percent."""
    throughput_change_percent: int | None = None
    """Change of the tokens per second of a running request against the stable side, in percent."""
    excess_kl_micronats: int | None = None
    """Its damage above the control's, in millionths of a nat."""


class Option(Record, frozen=True, kw_only=True):
    """A step that was weighed, and the dtype, replicas and capacity that it leads to. The message has the figures."""

    action: Action
    """Stay, DtypeDown, DtypeUp, ScaleOut, ScaleIn or Offload."""
    dtype: Word
    """The dtype that it leads to."""
    replicas: Count
    """The number of replicas that it leads to."""
    outcome: Outcome
    """Chosen, Possible, Insufficient, or the cause that rules it out: Vetoed, Denied, NotMemory, NoCanary, CoolingDown,
    ReplicasFirst, ReplicasMissing, NotOwner, AtLimit, TooTight, BackingOff or ObjectivesHeld."""
    message: Annotated[str, Meta(max_length=1024)]
    """The expected effect with its figures, and the cause that rules it out."""
    capacity_tokens: Count | None = None
    """Tokens that all replicas would hold."""


class JournalEntry(Record, frozen=True, kw_only=True):
    """One decision with its reason in words and numbers."""

    time: datetime
    """When it was made."""
    action: Action
    """What was decided: Serve, StartCanary, ReplaceOne, Judge, Promote, Promoted, RollBack, KeepBaseline, Recommend,
    Hold, ScaleOut or ScaleIn."""
    reason: ReasonText
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=4096)]
    """Why, in words and numbers."""
    from_dtype: Word | None = None
    """The dtype before."""
    to_dtype: Word | None = None
    """The dtype after."""
    options: Annotated[tuple[Option, ...], Meta(max_length=12)] = ()
    """The steps that were weighed, the chosen one first."""


class Condition(Record, frozen=True, kw_only=True):
    """metav1.Condition."""

    type: Annotated[str, Meta(min_length=1, max_length=316)]
    """Ready, Serving, Reconciling, Stalled, MetricsAvailable, MemoryPressured, ObjectivesHeld, CanaryHealthy or
    AccuracyVerified."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    """The cause in one CamelCase word."""
    last_transition_time: datetime
    """Time of the last change of status."""
    observed_generation: Count
    """The metadata.generation that the condition describes."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """The cause with its figures, and the remedy."""


class Status(Record, frozen=True, kw_only=True):
    """The whole `.status`."""

    observed_generation: Count | None = None
    """The metadata.generation that this status speaks of."""
    observed_revision: Word | None = None
    """Name of the revision that the spec of observedGeneration asks for: with kvCache.dtype in mode Fixed, else with
    the dtype on trial or serving. It serves where stable.revision is the same. Of a spec that is refused nothing is
    asked for, and the name stays."""
    inference_pool: Annotated[str, Meta(max_length=253)] | None = None
    """Name of the InferencePool that selects what serves; absent where spec.inferencePool is, and no pool is left."""
    route: Annotated[str, Meta(max_length=253)] | None = None
    """Name of the HTTPRoute that kvpilot keeps; absent where spec.route is, and none is left."""
    url: Annotated[str, Meta(max_length=128)] | None = None
    """Where clients in the cluster reach the service, as http://NAME.NAMESPACE.svc; vLLM's API is below /v1. Absent
    while the Service does not exist, or its name is somebody else's."""
    replicas: Count | None = None
    """Replicas that are asked for, serving or on trial. The one pod more that a trial may bring does not count."""
    ready_replicas: Count | None = None
    """Engine pods that are ready, canary included."""
    selector: Annotated[str, Meta(max_length=1024)] | None = None
    """Label selector of the engine pods, as text, for /scale."""
    adapters: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=16)] = ()
    """Names of the LoRA adapters that all pods of the serving revision say they have loaded; asked are those that
    model.adapters gives any."""
    stable: Stable | None = None
    cache: WeightsCache | None = None
    kv_cache: KVCache = KVCache()
    scaling: Scaling = Scaling()
    objectives: Annotated[tuple[Objective, ...], Meta(max_length=8, extra=keyed_by("metric", "percentile"))] = ()
    """What was last seen of spec.scaling.objectives; rewritten where it moved by 10%."""
    cost: Cost | None = None
    canary: Canary | None = None
    """The canary that is under way; absent when there is none."""
    history: Annotated[tuple[Experience, ...], Meta(max_length=16)] = ()
    """How canaries turned out, newest first; the same step is expected to do the same again."""
    accuracy: Accuracy = Accuracy()
    decisions: Annotated[tuple[JournalEntry, ...], Meta(max_length=10)] = ()
    """The last decisions, newest first."""
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=32, extra=keyed_by("type"))] = ()
    """Ready is True while the service does what its newest spec asks for and nothing is under way. Serving is True
    while requests are answered. Reconciling and Stalled are those of kstatus: Reconciling is True while the service is
    on its way to its newest spec, Stalled where only a person can help; they are never both True. Their messages list
    every cause, with field, value and remedy: an invalid spec, objects or pods that the API server refuses, a route
    that a Gateway refuses, a paused rollout. The other conditions report measurements."""

    @property
    def last_trial(self) -> Experience | None:
        """The newest trial that ended, or is being rolled back."""
        return self.history[0] if self.history else None

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of that type; None where it was never set."""
        return next((c for c in self.conditions if c.type == kind), None)


_FIGURES = (
    "observed_dtype", "recent_tokens", "retention", "capacity_tokens", "usage_percent", "gpu_hit_percent",
    "host_hit_percent", "disk_hit_percent",
)  # fmt: skip
_QUOTING = (
    ConditionType.METRICS_AVAILABLE, ConditionType.MEMORY_PRESSURED, ConditionType.OBJECTIVES_HELD,
)  # fmt: skip


def without_figures(status: Status) -> Status:
    """Return a status in which all figures that engines report are the same: where they are known, and unknown.

    Everything else is left: what was decided, and the status and reason of each condition.
    """
    kv = status.kv_cache
    known: dict[str, Any] = {name: None if getattr(kv, name) is None else 0 for name in _FIGURES}
    return msgspec.structs.replace(
        status,
        kv_cache=msgspec.structs.replace(kv, **known),
        adapters=(),
        cost=None if status.cost is None else Cost(per_hour_micros=0),
        objectives=tuple(msgspec.structs.replace(one, observed_milliseconds=None) for one in status.objectives),
        conditions=tuple(
            msgspec.structs.replace(one, message="") if one.type in _QUOTING else one for one in status.conditions
        ),
    )


def parse_status(raw: Any) -> Status:
    """Read `.status`; a part that cannot be read counts as unset."""
    if not isinstance(raw, dict):
        return Status()
    try:
        return msgspec.convert(raw, Status)
    except msgspec.ValidationError:
        readable = {}
        for key, value in raw.items():
            try:
                msgspec.convert({key: value}, Status)
            except msgspec.ValidationError:
                continue
            readable[key] = value
        return msgspec.convert(readable, Status)


def dump_status(status: Status) -> dict[str, Any]:
    """Return the JSON object for the API server."""
    dumped: dict[str, Any] = msgspec.to_builtins(status)
    return dumped


def clip(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a message as people may read it, cut to what the schema holds."""
    text = untrusted.shown(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
