"""Everything known of one service at one moment: what `observe` gathers and `decide` reads. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from kvpilot_operator.api.schema import Fault
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.state.status import Status


class ServiceKey(NamedTuple):
    """Namespace and name of a QuantizedLLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PodView:
    """One engine pod as its kubelet reports it."""

    name: str
    revision: str
    ip: str | None
    node: str | None
    ready: bool
    terminating: bool
    restarts: int
    waiting_reason: str | None
    """Why the container waits (ErrImagePull, CrashLoopBackOff, ...)."""
    exit_message: str | None
    """What the engine's last exit left behind (kvpilot-serve's refusal, or the end of its log)."""
    unschedulable: str | None
    """The scheduler's message while no node fits."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One revision's Deployment."""

    revision: str
    dtype: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one revision: sums over its pods, except use, which is the token-weighted mean."""

    time: datetime
    pods: int
    usage: float
    """Share of KV blocks in use, 0 to 1."""
    running: float
    waiting: float
    preemptions: float
    """Counter: the sum over pods."""
    capacity_tokens: int
    observed_dtype: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the nodes that run the service say of their accelerator (GPU feature discovery's labels)."""

    gpu: str = "cpu"
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """A finished baseline capture with its 16-bit-against-16-bit control."""

    baseline: Baseline
    control: Measurement


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe that ended without a measurement."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found; `identity` is the request's."""

    identity: str
    outcome: Captured | Measurement | ProbeFailed


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The probe packs of a service, read and checked: their content hash, or why they cannot be used."""

    identity: str = ""
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What this API server serves."""

    pod_disruption_budgets: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One service, whole."""

    now: datetime
    key: ServiceKey
    uid: str
    generation: int
    raw: Mapping[str, Any]
    """The object as the API server returned it, defaults applied."""
    faults: tuple[Fault, ...]
    spec: Spec | None
    """None while there are faults."""
    status: Status
    deployments: Mapping[str, DeploymentView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    traffic: str | None = None
    """The revision that the Service selects now; None while there is no Service."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Scrapes by revision, oldest first."""
    node: NodeFacts = NodeFacts()
    server: ServerFacts = ServerFacts()
    probes: ProbePlan = ProbePlan()
    probe_result: ProbeResult | None = None

    def pods_of(self, revision: str) -> tuple[PodView, ...]:
        """The revision's pods that are not on their way out."""
        return tuple(p for p in self.pods if p.revision == revision and not p.terminating)

    def ready_pods(self, revision: str) -> tuple[PodView, ...]:
        """The revision's pods that answer."""
        return tuple(p for p in self.pods_of(revision) if p.ready and p.ip)

    def last_sample(self, revision: str) -> Sample | None:
        """The newest scrape of the revision."""
        series = self.samples.get(revision, ())
        return series[-1] if series else None
