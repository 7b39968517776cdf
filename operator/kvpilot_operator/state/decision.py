"""The decision of one reconcile: data for `act`. It may ask for a probe, and a later reconcile gets its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvpilot_operator.state.questions import Unanswered
from kvpilot_operator.state.status import Status
from kvpilot_probes.codec import Baseline
from kvpilot_probes.stats import Measurement

Manifest = Mapping[str, Any]
Ref = tuple[str, str, str]
"""(apiVersion, kind, name) of an object of the service's namespace."""


class Cause(NamedTuple):
    """The cause of a failure: a CamelCase reason, and a message that names the fault and the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Find:
    """A search for a captured baseline in its ConfigMap."""

    identity: str
    baseline: str
    config_map: str


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture of baseline and control by the 16-bit pod at `url`, unless the ConfigMap holds them."""

    identity: str
    pod: str
    url: str
    model: str
    baseline: str
    config_map: str
    serving: bool = False
    """True if the pod serves users. The probe gives way to their requests for a while."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A comparison of the pod at `url` with the baseline in the ConfigMap."""

    identity: str
    pod: str
    url: str
    model: str
    dtype: str
    config_map: str
    serving: bool = False
    """True if the pod serves users. The probe gives way to their requests, or ends without a verdict."""


Request = Find | Capture | Measure


@dataclass(frozen=True, slots=True)
class Captured:
    """A baseline with its 16-bit control; `adopted` if it was found in the ConfigMap."""

    baseline: Baseline
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class NothingKept:
    """A search that found no usable baseline."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe that ended without a measurement."""

    reason: str
    message: str


Found = Captured | NothingKept | Measurement | ProbeFailed


class ProbeResult(NamedTuple):
    """A request and its result."""

    request: Request
    outcome: Found | None
    """None while the probe runs."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about the service."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects that the service owns from now on. First `scale` raises replicas of Deployments that an older spec
    rendered; `apply` goes out in order (of a user's HTTPRoute only the rules, if it is as observed); then `scale`
    lowers replicas; last, Deployments whose revision is not in `keep` and all `absent` objects are deleted."""

    apply: tuple[Manifest, ...]
    scale: Mapping[str, int]
    keep: frozenset[str]
    absent: tuple[Ref, ...] = ()
    """Our objects that must not exist."""
    named: tuple[Ref, ...] = ()
    """Our objects that pods need before they start."""


class Latency(NamedTuple):
    """A latency objective, and the latency that engines reached."""

    metric: str
    percentile: int
    limit_seconds: float
    observed_seconds: float | None
    """None for too few samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements for metrics alone: no decision needs them, and a restart forgets them."""

    recent_tokens: int | None = None
    """Recent window that engines report; None before their first scrape."""
    retention: str = ""
    """Policy by which engines free pages of a sequence; empty if they keep all."""
    hits: Mapping[str, float] = field(default_factory=dict)
    """Share of prompt tokens that a tier held, by tier; empty without kvCache.offload."""
    cost_per_hour: float | None = None
    """Cost of all GPUs of the service, a canary's included; None if they have no price."""
    cost_per_million_tokens: float | None = None
    """Cost of a million generated tokens, at the rate of the last window."""
    latencies: tuple[Latency, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one reconcile. `act` writes the status first, then objects, and posts events last."""

    status: Status
    objects: Objects | None = None
    """None leaves every object as it is."""
    baseline: Baseline | None = None
    """A captured baseline to keep before the status that names it is written."""
    probe: Request | None = None
    events: tuple[Event, ...] = ()
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates by pod name. They open after the status is written, and close after traffic has moved."""
    do_not_evict: frozenset[str] = frozenset()
    """Names of all pods that cluster autoscalers should not evict."""
    unanswered: tuple[Unanswered, ...] = ()
    """Questions without an answer; what they decide stays unchanged."""
    figures: Figures = Figures()
    again_seconds: float | None = None
    """Reconcile again after this many seconds, even if nothing happens."""
