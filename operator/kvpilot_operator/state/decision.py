"""What one pass decided: data for `act`, with the reason of every step in the status' journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.state.status import Status

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Capture:
    """Ask the 16-bit pod at `url` for the baseline and its control."""

    identity: str
    url: str
    model: str
    baseline: str
    """Identity of the baseline to capture."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Compare the pod at `url` with the baseline kept in the ConfigMap."""

    identity: str
    url: str
    model: str
    config_map: str


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about the service."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects that the service owns from now on.

    `apply` goes to the server in order; `scale` sets the replicas of Deployments that an older spec rendered; owned
    Deployments whose revision is not in `keep` are deleted last.
    """

    apply: tuple[Manifest, ...]
    scale: Mapping[str, int]
    """Replicas by revision."""
    keep: frozenset[str]


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one pass: status first, then objects, then a probe, then events."""

    status: Status
    objects: Objects | None = None
    """None leaves every object as it is."""
    baseline: Baseline | None = None
    """A captured baseline to keep before the status that names it is written."""
    probe: Capture | Measure | None = None
    events: tuple[Event, ...] = ()
    again_seconds: float | None = None
    """Look again after this many seconds even if nothing happens."""
