"""`.status` of a QuantizedLLMService as frozen structs: the only state that outlives the operator's process.

Field names are the CRD's in snake case; KL divergences are integers in micronats, shares in permille, times in UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from kvpilot_formats import untrusted
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
from kvpilot_operator.state.struct import Struct

MAX_DECISIONS = 10
MAX_DENIED = 32
MAX_OPTIONS = 12
MAX_HISTORY = 16
MAX_SATURATIONS = 20
MAX_MESSAGE = 1024


class Stable(Struct, frozen=True, kw_only=True):
    """The revision that serves, or is meant to serve first."""

    revision: str
    dtype: str
    since: datetime
    ever_ready: bool = False


class Denied(Struct, frozen=True, kw_only=True):
    """A dtype that must not be tried for this (model, image, GPU, recent window asked for) before `until`."""

    dtype: str
    model: str
    image: str
    gpu: str
    recent_tokens: int | None = None
    reason: str
    message: str
    until: datetime


class WeightsCache(Struct, frozen=True, kw_only=True):
    """How far the claim for weights is filled; `identity` hashes what has to be on it."""

    identity: str
    phase: CachePhase
    claim_name: str
    downloaded_bytes: int | None = None
    total_bytes: int | None = None


class KVCache(Struct, frozen=True, kw_only=True):
    """What is known of the serving cache: capacity in tokens over all stable replicas, use in percent.

    Hits are of the tokens of prompts, of services with kvCache.offload alone.
    """

    active_dtype: str | None = None
    observed_dtype: str | None = None
    recent_tokens: int | None = None
    retention: str | None = None
    recommended_dtype: str | None = None
    capacity_tokens: int | None = None
    usage_percent: int | None = None
    gpu_hit_percent: int | None = None
    host_hit_percent: int | None = None
    disk_hit_percent: int | None = None
    changed_time: datetime | None = None
    denied: tuple[Denied, ...] = ()


class Saturation(Struct, frozen=True, kw_only=True):
    """What one replica finished when requests last queued with this dtype, and how many tokens they had on average.

    Of the prompt, also how many of them no cache held; and whether they queued for memory.
    """

    dtype: str
    requests_per_hour: int
    mean_prompt: int
    mean_generation: int
    computed_prompt: int | None = None
    memory: bool | None = None


class ScaleInBackoff(Struct, frozen=True, kw_only=True):
    """So many replicas of this dtype were too few: one that had been given back was soon needed again."""

    dtype: str
    replicas: int
    time: datetime


class Scaling(Struct, frozen=True, kw_only=True):
    """How many replicas the operator wants (scaling mode Operator), and which spec.replicas it started from."""

    desired_replicas: int | None = None
    recommended_replicas: int | None = None
    spec_replicas: int | None = None
    changed_time: datetime | None = None
    scaled_in_time: datetime | None = None
    scale_in_backoff: ScaleInBackoff | None = msgspec.field(name="regret", default=None)
    saturations: tuple[Saturation, ...] = ()


class Objective(Struct, frozen=True, kw_only=True):
    """A latency objective and what was last seen of it; a figure that hardly moved is not written anew."""

    metric: Literal["TTFT", "ITL"]
    percentile: int
    milliseconds: int
    state: ObjectiveState
    observed_milliseconds: int | None = None


class Cost(Struct, frozen=True, kw_only=True):
    """What the service costs, in millionths of the currency of the operator's prices; of tokens, generated ones."""

    per_hour_micros: int
    per_million_tokens_micros: int | None = None


class Canary(Struct, frozen=True, kw_only=True):
    """A revision on trial, or (as `lastCanary`) how the last trial ended. Changes are in percent of the stable side."""

    revision: str
    dtype: str
    from_dtype: str
    stage: Stage
    started_time: datetime
    stage_time: datetime
    generation: int | None = None
    reason: str = ""
    message: str = ""
    verdict: Verdict = Verdict.PENDING
    errors: int = 0
    failures: int = 0
    capacity_tokens: int | None = None
    stable_capacity_tokens: int | None = None
    replaces_one: bool = False
    traffic_mode: TrafficMode | None = None
    step: int | None = None
    step_time: datetime | None = None
    weight_percent: int | None = None
    ttft_p95_change_percent: int | None = None
    itl_p95_change_percent: int | None = None
    throughput_change_percent: int | None = None

    @property
    def capacity_ratio(self) -> float | None:
        """What a replica holds, over what one of the stable side does; None where either is not known."""
        ours, theirs = self.capacity_tokens, self.stable_capacity_tokens
        return ours / theirs if ours and theirs else None


CHANGES = ("ttft_p95_change_percent", "itl_p95_change_percent", "throughput_change_percent")
"""Of a trial's fields those that say how the canary did beside the stable side."""


class Experience(Struct, frozen=True, kw_only=True):
    """How a canary turned out: what the policy expects of the same dtype next time."""

    dtype: str
    from_dtype: str
    model: str
    image: str
    gpu: str
    recent_tokens: int | None = None
    time: datetime
    verdict: Verdict
    reason: str
    capacity_percent: int | None = None
    ttft_p95_change_percent: int | None = None
    itl_p95_change_percent: int | None = None
    throughput_change_percent: int | None = None
    excess_kl_micronats: int | None = None


class Option(Struct, frozen=True, kw_only=True):
    """A step that was weighed. `gpus` and `itl_change_percent` are relative to now, the rest is what it leads to."""

    action: Action
    dtype: str
    replicas: int
    gpus: int
    outcome: Outcome
    message: str
    capacity_tokens: int | None = None
    usage_percent: int | None = None
    itl_change_percent: int | None = None
    cost_per_hour_micros: int | None = None


class JournalEntry(Struct, frozen=True, kw_only=True):
    """One decision with its reason in words and numbers."""

    time: datetime
    action: Action
    reason: str
    message: str
    from_dtype: str | None = None
    to_dtype: str | None = None
    options: tuple[Option, ...] = ()


class Condition(Struct, frozen=True, kw_only=True):
    """metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    last_transition_time: datetime
    observed_generation: int
    message: str = ""


class Status(Struct, frozen=True, kw_only=True):
    """The whole `.status`."""

    observed_generation: int | None = None
    observed_revision: str | None = None
    inference_pool: str | None = None
    route: str | None = None
    url: str | None = None
    replicas: int | None = None
    ready_replicas: int | None = None
    selector: str | None = None
    adapters: tuple[str, ...] = ()
    stable: Stable | None = None
    cache: WeightsCache | None = None
    kv_cache: KVCache = KVCache()
    scaling: Scaling = Scaling()
    objectives: tuple[Objective, ...] = ()
    cost: Cost | None = None
    canary: Canary | None = None
    last_canary: Canary | None = None
    history: tuple[Experience, ...] = ()
    accuracy: Accuracy = Accuracy()
    decisions: tuple[JournalEntry, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, if it was ever set."""
        return next((c for c in self.conditions if c.type == kind), None)


_FIGURES = (
    "observed_dtype", "recent_tokens", "retention", "capacity_tokens", "usage_percent", "gpu_hit_percent",
    "host_hit_percent", "disk_hit_percent",
)  # fmt: skip
_QUOTING = (
    ConditionType.METRICS_AVAILABLE, ConditionType.MEMORY_PRESSURED, ConditionType.OBJECTIVES_HELD,
    ConditionType.CALIBRATION_CONSISTENT,
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
    """Read `.status`; what an older or newer operator wrote and we cannot read counts as unset, never as an error.

    But for a canary: see `unreadable_canary`.
    """
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


class Unreadable(NamedTuple):
    """A canary that an operator of another version wrote: what stands there, and why it cannot be read."""

    value: Any
    why: str


def unreadable_canary(raw: Any) -> Unreadable | None:
    """The canary of `.status` where it cannot be read: it may have traffic, so it counts as anything but unset."""
    value = raw.get("canary") if isinstance(raw, dict) else None
    if value is None:
        return None
    try:
        msgspec.convert({"canary": value}, Status)
    except msgspec.ValidationError as error:
        return Unreadable(value, str(error))
    return None


def dump_status(status: Status) -> dict[str, Any]:
    """The JSON object for the API server."""
    dumped: dict[str, Any] = msgspec.to_builtins(status)
    return dumped


def clip(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a message as people may read it, cut to what the schema holds."""
    text = untrusted.shown(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
