"""Everything known of one service at one moment: what `observe` gathers and `decide` reads. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.decision import Find, ProbeResult
from kvpilot_operator.state.objects import DeploymentView, ObjectView, PodView, PrefetchView, Rejection, RouteView
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.server import ServerFacts
from kvpilot_operator.state.status import Status


class ServiceKey(NamedTuple):
    """Namespace and name of a QuantizedLLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's architecture by an engine's metric kvpilot_model_info."""

    head_dim: int
    kv_heads: int
    layers: int
    window_layers: int
    """Layers with a sliding window."""
    mla: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The accelerator of the nodes that run the service."""

    gpu: str = "cpu"
    """The value of the node label nvidia.com/gpu.product; for another vendor's the resource, such as amd.com/gpu."""
    compute_capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    """Memory of one GPU, or of one slice where the GPUs are divided (MIG)."""
    cuda: bool = True
    """False for an accelerator of another vendor than NVIDIA."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The probe packs of a service, read and checked: their content hash, or why they cannot be used."""

    identity: str = ""
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One service, whole."""

    now: datetime
    key: ServiceKey
    uid: str
    generation: int
    resource_version: str
    """The resource version of the object that was judged: its status is written only while it is still this one."""
    faults: tuple[Fault, ...]
    spec: Spec | None
    """None while there are faults."""
    status: Status
    deployments: Mapping[str, DeploymentView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    traffic: str | None = None
    """The revision that the Service, and the pool if there is one, select now, "" for every one, or where they differ;
    None while no Service of ours selects any."""
    objects: Mapping[tuple[str, str], ObjectView] = field(default_factory=dict)
    """Workloads and Services with the service's label, and InferencePools and HTTPRoutes of its names, by kind and
    name."""
    rejections: tuple[Rejection, ...] | None = None
    """Refusals of the last writes by the API server; None before anything was written."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Scrapes by revision, oldest first."""
    node: NodeFacts = NodeFacts()
    model: ModelFacts | None = None
    """None where no engine has said it."""
    route: RouteView | None = None
    """None where no route is asked for, or it does not exist, or the one of that name is not ours."""
    prefetch: PrefetchView | None = None
    """The Job that fills the claim; None where there is none of ours, and where nothing waits for one."""
    server: ServerFacts = field(default_factory=ServerFacts)
    probes: ProbePlan = ProbePlan()
    probe_result: ProbeResult | None = None
    unanswered: tuple[Unanswered, ...] = ()
    """Questions that could not be observed this time: the field of each is empty, which says nothing."""
    backed_off: Mapping[str, str] = field(default_factory=dict)
    """Pods that are asked for their metrics less often, by name, with why: they failed more than once in a row."""
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """LoRA adapters that pods say they have loaded, by name of the pod; asked are those that were told to load any."""
    gpu_hour_micros: int | None = None
    """The price of one of its GPUs an hour, in millionths of the prices' currency; None where it is unknown."""

    def unread(self, question: Question) -> Unanswered | None:
        """Return why this could not be observed; None where it was."""
        return next((one for one in self.unanswered if one.question == question), None)

    def pods_of(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's pods that are not terminating."""
        return tuple(p for p in self.pods if p.revision == revision and not p.terminating)

    def pod_to_ask(self, pods: tuple[PodView, ...]) -> PodView:
        """Return the pod that is being asked, so that a new pod does not end a probe; else the first by name."""
        request = self.probe_result.request if self.probe_result is not None else None
        asked = None if request is None or isinstance(request, Find) else request.pod
        return next((pod for pod in pods if pod.name == asked), pods[0])

    def ready_pods(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's pods that answer and get requests where a selector names them."""
        return tuple(p for p in self.pods_of(revision) if p.ready and p.ip)

    def answering_pods(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's pods whose engines answer, admitted or not."""
        return tuple(p for p in self.pods_of(revision) if p.answers)

    def rejection(self, kind: str, name: str) -> Rejection | None:
        """Return the API server's refusal of this object; None where there is none."""
        return next((one for one in self.rejections or () if (one.kind, one.name) == (kind, name)), None)

    def last_sample(self, revision: str) -> Sample | None:
        """Return the revision's newest scrape in which at least one pod was plausible."""
        return next((sample for sample in reversed(self.samples.get(revision, ())) if sample.pods), None)

    def reported_dtype(self, revision: str) -> Sample | None:
        """Return the revision's newest scrape in which a pod told its KV-cache dtype."""
        return next((sample for sample in reversed(self.samples.get(revision, ())) if sample.observed_dtype), None)
