"""The decision of one reconcile: data for `act`, with the reason of every step in the status' journal.

A later reconcile gets the result of a probe that it asks for: requests and results stand here side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.state.questions import Unanswered
from kvpilot_operator.state.status import Status

Manifest = Mapping[str, Any]


class Cause(NamedTuple):
    """The cause of a failure: a CamelCase reason, and a message that names the fault and the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Find:
    """Look for a baseline that was captured before, in the ConfigMap of its identity."""

    identity: str
    baseline: str
    """Identity of the baseline."""
    config_map: str


@dataclass(frozen=True, slots=True)
class Capture:
    """Ask the 16-bit pod at `url` for the baseline and its control, unless the ConfigMap holds them already."""

    identity: str
    pod: str
    """Name of the pod that is asked."""
    url: str
    model: str
    baseline: str
    """Identity of the baseline to capture."""
    config_map: str
    serving: bool = False
    """True if users' requests go to that pod: the probe gives way to them for a while."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Compare the pod at `url` with the baseline kept in the ConfigMap."""

    identity: str
    pod: str
    """Name of the pod that is asked: what is found is said of it alone."""
    url: str
    model: str
    dtype: str
    """Its KV-cache dtype."""
    config_map: str
    serving: bool = False
    """True if users' requests go to that pod: the probe gives way to them, or ends without a verdict."""


Request = Find | Capture | Measure


@dataclass(frozen=True, slots=True)
class Captured:
    """The baseline with its 16-bit-against-16-bit control; `adopted` where it was found kept and not captured anew."""

    baseline: Baseline
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class NothingKept:
    """A search for a kept baseline that found none that can be used."""


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
    """The objects that the service owns from now on.

    First `scale` raises the replicas of Deployments that an older spec rendered; `apply` goes to the server in order
    (of an HTTPRoute with a resourceVersion, which is the user's, only the rules are replaced, and only if it is as it
    was observed); then `scale` lowers replicas, and last owned Deployments whose revision is not in `keep` and what is
    `absent` are deleted.
    """

    apply: tuple[Manifest, ...]
    scale: Mapping[str, int]
    """Replicas by revision."""
    keep: frozenset[str]
    absent: tuple[tuple[str, str, str], ...] = ()
    """(apiVersion, kind, name) of objects of ours that must not be there."""
    named: tuple[tuple[str, str, str], ...] = ()
    """(apiVersion, kind, name) of objects of ours that pods name: none starts before they are there."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one reconcile: status first, then objects, then a probe, then events."""

    status: Status
    objects: Objects | None = None
    """None leaves every object as it is."""
    baseline: Baseline | None = None
    """A captured baseline to keep before the status that names it is written."""
    probe: Request | None = None
    events: tuple[Event, ...] = ()
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates to be opened, after the status says why, or closed, after traffic was moved; by pod name."""
    do_not_evict: frozenset[str] = frozenset()
    """Names of pods that cluster autoscalers are asked to leave where they are; no other pod is."""
    unanswered: tuple[Unanswered, ...] = ()
    """The questions that had no answer; what they decide is left as it is."""
    again_seconds: float | None = None
    """Reconcile again after this many seconds, even if nothing happens."""
