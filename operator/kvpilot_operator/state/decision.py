"""The decision of one reconcile, as data for `act`. If it requests a probe, a later reconcile gets its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import ObjectiveState
from kvpilot_operator.state.questions import Unanswered
from kvpilot_operator.state.status import Status
from kvpilot_probes.codec import Baseline
from kvpilot_probes.stats import Measurement

Manifest = Mapping[str, Any]
Reference = tuple[str, str, str]
"""(apiVersion, kind, name) of an object in the service's namespace."""


class Cause(NamedTuple):
    """The cause of a failure: a CamelCase reason, and a message that names the fault and the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Find:
    """A request to search for a captured baseline in its ConfigMap."""

    identity: str
    baseline: str
    config_map: str


@dataclass(frozen=True, slots=True)
class Capture:
    """A request to capture baseline and control run from the 16-bit pod at `url`, unless the ConfigMap has both."""

    identity: str
    pod: str
    url: str
    model: str
    baseline: str
    config_map: str
    serving: bool = False
    """True if the pod serves users. The probe waits for their queued requests, but only for a limited time."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A request to compare the pod at `url` with the baseline in the ConfigMap."""

    identity: str
    pod: str
    url: str
    model: str
    dtype: str
    config_map: str
    serving: bool = False
    """True if the pod serves users. The probe waits for their queued requests, or ends without a verdict."""


Request = Find | Capture | Measure
"""A probe that a decision requests. Each request has its own `identity`. `baseline` is the identity of the baseline."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Result of a capture: the baseline with its control run. `adopted` is True if it came from the ConfigMap."""

    baseline: Baseline
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class NothingKept:
    """Result of a search (`Find`) that found no usable baseline."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """Result of a probe that ended without a measurement, with the reason."""

    reason: str
    message: str


Found = Captured | NothingKept | Measurement | ProbeFailed


class ProbeResult(NamedTuple):
    """A probe request and its result so far."""

    request: Request
    outcome: Found | None
    """Result of the probe; None while it runs."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about the service."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class Ungating(NamedTuple):
    """One step in the removal of the readiness gate from a revision's Deployment."""

    revision: str
    paused: bool | None
    """True to pause the Deployment and change its template, False to resume it, None to leave it as it is."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects that the service owns from now on. `act` does the following, in this order:

    1. Raise the replicas of existing workloads to the numbers in `scale`, by revision.
    2. Write the manifests in `apply`, in order. Of a user's HTTPRoute, write only the rules.
    3. Lower replicas, by manifests in `apply` and by `scale`.
    4. Delete workloads whose revision is not in `keep`, and the `absent` objects.

    If the API server newly refuses an object in step 1 or 2, steps 3 and 4 wait for the next reconcile.
    """

    apply: tuple[Manifest, ...]
    scale: Mapping[str, int]
    keep: frozenset[str]
    absent: tuple[Reference, ...] = ()
    """Objects to delete if the service owns them."""
    named: tuple[Reference, ...] = ()
    """Objects that the service must own, and that pods need before they start."""
    removed: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """Merge patches of `spec` by (kind, name). They remove fields even if another field manager set them, too."""


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """An objective with its state. `seconds` is the percentile over the whole window, None with too few samples."""

    objective: Objective
    state: ObjectiveState
    seconds: float | None = None

    @property
    def limit(self) -> float:
        """Return the longest allowed latency in seconds."""
        return self.objective.milliseconds / 1000

    def __str__(self) -> str:
        seen = "too few samples" if self.seconds is None else f"{self.seconds * 1000:.0f} ms"
        return f"{self.objective} {seen} (objective {self.objective.milliseconds} ms)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements for the operator's metrics. No decision depends on them, and a restart loses them."""

    recent_tokens: int | None = None
    """Recent window that engines report, in tokens; None before the first scrape."""
    objectives: tuple[ObjectiveResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one reconcile. `act` writes the status first, then objects, and posts events last."""

    status: Status
    objects: Objects | None = None
    """Objects to write and to delete; None leaves every object as it is."""
    baseline: Baseline | None = None
    """A captured baseline to store before the status, which names it."""
    probe: Request | None = None
    events: tuple[Event, ...] = ()
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates by pod name, True for open. `act` opens gates after the status, and closes gates at the end."""
    ungating: Ungating | None = None
    """Step that removes the readiness gate from the serving Deployment."""
    unanswered: tuple[Unanswered, ...] = ()
    """Questions (parts of the reconcile) that failed. Everything that depends on their answers stays unchanged."""
    figures: Figures = Figures()
    again_seconds: float | None = None
    """Seconds after which to reconcile again, even without an event."""
