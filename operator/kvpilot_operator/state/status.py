"""`.status` of a QuantizedLLMService as frozen structs: the only state that outlives the operator's process."""

from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvpilot_formats import untrusted
from kvpilot_operator.api.record import Count, Message, Percent, ReasonText, Record, Text, Word, keyed_by
from kvpilot_operator.api.words import Action, ConditionType, Outcome, Stage, TrafficMode, Verdict
from kvpilot_operator.state.accuracy import Accuracy

MAX_DECISIONS = 10
MAX_DENIED = 32
MAX_OPTIONS = 12
MAX_HISTORY = 16
MAX_SATURATIONS = 20
MAX_MESSAGE = 1024

Model = Annotated[str, Meta(max_length=700, description="The model.")]
Image = Annotated[str, Meta(max_length=512, description="The engine image.")]
Gpu = Annotated[str, Meta(max_length=128, description="The GPU, or cpu.")]
RecentTokens = Annotated[int, Meta(ge=0, description="The spec.kvCache.recentTokens; absent where none was set.")]


class Stable(Record, frozen=True, kw_only=True):
    """The revision that serves the traffic."""

    revision: Word
    """The revision's name, 8 hexadecimal digits."""
    dtype: Word
    """KV cache dtype of the revision."""
    since: datetime
    """Time at which the revision took the traffic."""
    ever_ready: bool = False
    """True once this revision was ready."""


class Denied(Record, frozen=True, kw_only=True):
    """A dtype that failed. kvpilot does not try it with this model, image, GPU and recent window before `until`."""

    dtype: Word
    """The dtype that failed."""
    model: Model
    image: Image
    gpu: Gpu
    recent_tokens: RecentTokens | None = None
    reason: ReasonText
    message: Message
    until: datetime
    """Time from which kvpilot may try the dtype again."""


class KVCache(Record, frozen=True, kw_only=True):
    """The KV cache of the serving replicas."""

    active_dtype: Word | None = None
    """The dtype that serves the traffic."""
    recommended_dtype: Word | None = None
    """The dtype that kvpilot would choose now."""
    capacity_tokens: Count | None = None
    """Number of tokens that the KV caches of all serving replicas hold together, as engines report it for sequences of
    the longest context. Recent windows are not counted."""
    usage_percent: Percent | None = None
    """KV cache use of the fullest serving replica, in percent."""
    changed_time: datetime | None = None
    """Time at which activeDtype last changed. kvCache.minDwellSeconds counts from here."""
    denied: Annotated[tuple[Denied, ...], Meta(max_length=MAX_DENIED)] = ()
    """Dtypes that failed, and that kvpilot does not try again for a while."""


class Saturation(Record, frozen=True, kw_only=True):
    """The load of one replica at which requests last queued with this dtype."""

    dtype: Word
    """The dtype that served."""
    requests_per_hour: Count
    """Number of requests that one replica finished in an hour."""
    mean_prompt: Count
    """Mean length of the requests' prompts, in tokens. kvpilot uses this record only for requests of similar length."""
    mean_generation: Count
    """Mean length of the answers, in tokens."""
    computed_prompt: Count | None = None
    """Mean number of prompt tokens of a request that were in no cache; only with scaling.objectives."""
    memory: bool | None = None
    """True if the requests waited for KV cache memory; only with scaling.objectives."""


class ScaleInBackoff(Record, frozen=True, kw_only=True):
    """A number of replicas that was too small. kvpilot does not try it again for a day."""

    dtype: Word
    """The dtype that served."""
    replicas: Count
    """The number of replicas."""
    time: datetime
    """Time at which the number was found to be too small."""


class Scaling(Record, frozen=True, kw_only=True):
    """Number of replicas that kvpilot chooses, and records of earlier steps."""

    desired_replicas: Count | None = None
    """Number of replicas that kvpilot maintains with scaling.mode Operator, between minReplicas and maxReplicas."""
    recommended_replicas: Count | None = None
    """Number of replicas that kvpilot would choose now, in every mode."""
    spec_replicas: Count | None = None
    """Value of spec.replicas from which desiredReplicas started. If spec.replicas changes, desiredReplicas starts again
    from the new value."""
    changed_time: datetime | None = None
    """Time at which desiredReplicas last changed."""
    scaled_in_time: datetime | None = None
    """Time at which kvpilot last removed a replica."""
    scale_in_backoff: ScaleInBackoff | None = None
    saturations: Annotated[tuple[Saturation, ...], Meta(max_length=MAX_SATURATIONS, extra=keyed_by("dtype"))] = ()
    """Loads at which requests queued. kvpilot returns to a recorded dtype, or to fewer replicas, only at a far lower
    load."""


class Trial(Record, frozen=True, kw_only=True):
    """A trial of a revision. Changes are relative to the stable revision."""

    revision: Word
    """The revision on trial."""
    dtype: Word
    """KV cache dtype of the revision on trial."""
    from_dtype: Word
    """Dtype that served when the trial started."""
    generation: Count | None = None
    """The metadata.generation that started the trial."""
    reason: ReasonText = ""
    message: Message = ""
    verdict: Verdict = Verdict.PENDING
    """Passed, Failed (accuracy or latency), Error (no measurement), Inconclusive (too few samples), or Pending."""
    traffic_mode: TrafficMode | None = None
    """Way in which the revision on trial gets live traffic. With ProbeOnly it gets none before its promotion."""
    itl_p95_change_percent: int | None = None
    """Change of the 95th percentile of the time between two tokens, in percent."""


class Canary(Trial, frozen=True, kw_only=True):
    """A revision on trial. Changes are relative to the stable revision."""

    stage: Stage
    """Stage of the trial."""
    started_time: datetime
    """Time at which the trial started."""
    stage_time: datetime
    """Time at which the trial reached this stage, or last made progress in it."""
    errors: Count = 0
    """Number of probe runs in a row without a verdict."""
    failures: Count = 0
    """Number of failed probe runs."""
    capacity_tokens: Count | None = None
    """Number of tokens that one canary replica's KV cache holds."""
    stable_capacity_tokens: Count | None = None
    """Number of tokens that one stable replica's KV cache holds."""
    replaces_one: bool = False
    """True if the canary took the place of one stable replica, because there was no spare capacity."""
    step: Count | None = None
    """Index of the current item of spec.canary.steps, counted from 0."""
    step_time: datetime | None = None
    """Time at which the canary reached this step."""
    weight_percent: Percent | None = None
    """Share of live traffic that the canary takes now, in percent."""

    @property
    def capacity_ratio(self) -> float | None:
        """Capacity of a canary replica divided by that of a stable replica; None if either is unknown."""
        ours, theirs = self.capacity_tokens, self.stable_capacity_tokens
        return ours / theirs if ours and theirs else None


class Experience(Trial, frozen=True, kw_only=True):
    """An ended trial. The policy expects the same result if the dtype is tried again. Only the newest trial has a
    message."""

    model: Model
    image: Image
    gpu: Gpu
    recent_tokens: RecentTokens | None = None
    time: datetime
    """Time at which the trial ended; during a rollback, the time of its verdict."""
    capacity_percent: Count | None = None
    """Number of tokens that a replica on trial held, in percent of a stable replica's number."""


class Option(Record, frozen=True, kw_only=True):
    """A step that the policy compared with others, and the dtype, replicas and capacity that it would lead to."""

    action: Action
    """Stay, DtypeDown, DtypeUp, ScaleOut or ScaleIn."""
    dtype: Word
    """Dtype after the step."""
    replicas: Count
    """Number of replicas after the step."""
    outcome: Outcome
    """Chosen, Possible, Insufficient, or the cause that rules it out: Vetoed, Denied, NotMemory, NoCanary, CoolingDown,
    ReplicasFirst, ReplicasMissing, NotOwner, AtLimit, TooTight, BackingOff or ObjectivesHeld."""
    message: Message
    """Expected effect of the step, with figures, and the cause that rules it out, if there is one."""
    capacity_tokens: Count | None = None
    """Number of tokens that all replicas would hold together."""


class JournalEntry(Record, frozen=True, kw_only=True):
    """One decision and its cause."""

    time: datetime
    """Time of the decision."""
    action: Action
    """Serve, StartCanary, ReplaceOne, Judge, Promote, Promoted, RollBack, KeepBaseline, Recommend, Hold, ScaleOut or
    ScaleIn."""
    reason: ReasonText
    message: Message
    from_dtype: Word | None = None
    """Dtype before the decision."""
    to_dtype: Word | None = None
    """Dtype after the decision."""
    options: Annotated[tuple[Option, ...], Meta(max_length=MAX_OPTIONS)] = ()
    """Steps that the policy compared, the chosen step first."""


class Condition(Record, frozen=True, kw_only=True):
    """A condition, as Kubernetes defines it (metav1.Condition)."""

    type: ConditionType
    """Type of the condition. docs/conditions.md explains each type."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    """The cause, as one CamelCase word."""
    last_transition_time: datetime
    """Time of the last change of status."""
    observed_generation: Count
    """The metadata.generation that the condition describes."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """The cause with its figures, and the remedy."""


class Status(Record, frozen=True, kw_only=True):
    """Observed state of the service."""

    observed_generation: Count | None = None
    """The metadata.generation that this status describes."""
    observed_revision: Word | None = None
    """Name of the revision that the spec of observedGeneration asks for. Its dtype is kvCache.dtype in mode Fixed,
    otherwise the dtype on trial or serving. The revision serves if stable.revision has the same name. A refused spec
    does not change it."""
    inference_pool: Text | None = None
    """Name of the InferencePool that selects the serving pods. If you remove spec.inferencePool, this field stays until
    the pool is deleted."""
    url: Text | None = None
    """Address in the cluster, http://NAME.NAMESPACE.svc; vLLM's API is below /v1. Absent while the Service does not
    exist or has another owner."""
    replicas: Count | None = None
    """Target number of replicas, serving or on trial, without the additional pod of a trial."""
    ready_replicas: Count | None = None
    """Number of ready engine pods, including the canary's."""
    selector: Annotated[str, Meta(max_length=1024)] | None = None
    """Label selector of the engine pods, for autoscalers that read /scale."""
    adapters: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=16)] = ()
    """LoRA adapters of the serving revision. Its engines load all of them when they start."""
    stable: Stable | None = None
    kv_cache: KVCache = KVCache()
    scaling: Scaling = Scaling()
    canary: Canary | None = None
    """The running canary; absent if there is none."""
    history: Annotated[tuple[Experience, ...], Meta(max_length=MAX_HISTORY)] = ()
    """Ended trials, newest first. The policy expects the same result from the same step."""
    accuracy: Accuracy = Accuracy()
    decisions: Annotated[tuple[JournalEntry, ...], Meta(max_length=MAX_DECISIONS)] = ()
    """The last decisions, newest first."""
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=32, extra=keyed_by("type"))] = ()
    """Ready is True while the service matches its newest spec and no change is under way. Serving is True while
    requests are answered. Reconciling and Stalled are those of kstatus, and never both True. Reconciling is True while
    a change to the newest spec is under way. Stalled is True if only a person can help. The messages of
    Reconciling and Stalled list every cause, with field, value and remedy: an invalid spec, objects or pods that the
    API server refuses, a paused rollout. The other conditions report measurements."""

    @property
    def last_trial(self) -> Experience | None:
        """The newest trial that has ended or is being rolled back; None without a trial."""
        return self.history[0] if self.history else None

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of that type; None if it was never set."""
        return next((c for c in self.conditions if c.type == kind), None)


_QUOTING = (ConditionType.METRICS_AVAILABLE, ConditionType.MEMORY_PRESSURED, ConditionType.OBJECTIVES_HELD)


def without_figures(status: Status) -> Status:
    """Return the status with all known figures from engines set to 0, and without messages that quote such figures.

    If two statuses are equal after this, the original statuses differ at most in figures.
    """
    kv, replace = status.kv_cache, msgspec.structs.replace
    kv = replace(kv, capacity_tokens=kv.capacity_tokens and 0, usage_percent=kv.usage_percent and 0)
    conditions = tuple(replace(one, message="") if one.type in _QUOTING else one for one in status.conditions)
    return replace(status, kv_cache=kv, conditions=conditions)


def parse_status(raw: Any) -> Status:
    """Return `.status` as a struct. Treat a part that cannot be read as unset."""
    if not isinstance(raw, dict):
        return Status()
    try:
        return msgspec.convert(raw, Status)
    except msgspec.ValidationError:
        readable = {}
        for key, value in raw.items():
            with suppress(msgspec.ValidationError):
                msgspec.convert({key: value}, Status)
                readable[key] = value
        return msgspec.convert(readable, Status)


def clip(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a message that is safe to show, cut to the length that the schema allows."""
    text = untrusted.shown(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
