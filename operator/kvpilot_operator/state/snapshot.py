"""Everything known about one service at one moment. `observe` gathers it, and `decide` uses it. Frozen, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.decision import Find, ProbeResult
from kvpilot_operator.state.objects import DeploymentView, ObjectView, PodView, Rejection, RouteView
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.status import Status


class ServiceKey(NamedTuple):
    """Namespace and name of a QuantizedLLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's architecture, from an engine's metric kvpilot_model_info."""

    head_dim: int
    kv_heads: int
    layers: int
    window_layers: int
    mla: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The accelerator of the nodes that run the service."""

    gpu: str = "cpu"
    """The node label nvidia.com/gpu.product; for other vendors the resource, such as amd.com/gpu."""
    compute_capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    """Memory of one GPU, or of one slice of it (MIG), by the node's labels. None without such a label."""
    cuda: bool = True


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The optional APIs that the API server serves."""

    http_routes: bool = False
    inference_pools: bool = False
    assigns_users: bool = False
    """True if the server assigns users and groups to the pods of each namespace (OpenShift)."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Hash of the service's probe packs (`identity`), or the fault that makes them unusable."""

    identity: str = ""
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that `decide` knows about one service."""

    now: datetime
    key: ServiceKey
    uid: str
    generation: int
    resource_version: str
    """resourceVersion of the service. `act` writes the status only if this is still the newest."""
    faults: tuple[Fault, ...]
    spec: Spec | None
    status: Status
    canary_annotation: str = ""
    deployments: Mapping[str, DeploymentView] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    traffic: str | None = None
    """Revision that the Service and the InferencePool select. It is "" if they select all revisions or differ from each
    other, and None without a Service of kvpilot."""
    objects: Mapping[tuple[str, str], ObjectView] = field(default_factory=dict)
    """Workloads and Services with the service's label, and pools with its names. Keys: (kind, name)."""
    rejections: tuple[Rejection, ...] | None = None
    """Objects that the API server refused at their last write. None before the first write."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    node: NodeFacts = NodeFacts()
    model: ModelFacts | None = None
    route: RouteView | None = None
    """Route for a canary's share; None if the spec names none, or the route does not exist."""
    autoscaler: str | None = None
    """Kind and name of an autoscaler that scales the service although kvpilot does (scaling.mode Operator)."""
    engine_defaults: bool = False
    """True if the installation has defaults for engines."""
    rolling: str | None = None
    """Name of a service of the namespace that replaces its pods without a change of dtype. Set only with engine
    defaults, whose changes reach services one after another."""
    server: ServerFacts = field(default_factory=ServerFacts)
    probes: ProbePlan = ProbePlan()
    probe_result: ProbeResult | None = None
    unanswered: tuple[Unanswered, ...] = ()
    """Observations that failed. The fields that they would fill are empty."""
    backed_off: Mapping[str, str] = field(default_factory=dict)
    """Cause of failed scrapes, by name of the pod. These pods are scraped less often."""

    def unread(self, question: Question) -> Unanswered | None:
        """Return the error that prevented this observation, or None if it succeeded."""
        return next((one for one in self.unanswered if one.question == question), None)

    def pods_of(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's pods that are not terminating."""
        return tuple(p for p in self.pods if p.revision == revision and not p.terminating)

    def pod_to_ask(self, pods: tuple[PodView, ...]) -> PodView:
        """Return the pod that is being probed, or else the first of `pods`.

        Choosing another pod would end the running probe.
        """
        request = self.probe_result.request if self.probe_result is not None else None
        asked = None if request is None or isinstance(request, Find) else request.pod
        return next((pod for pod in pods if pod.name == asked), pods[0])

    def ready_pods(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's ready pods, which get requests if the Service selects them."""
        return tuple(p for p in self.pods_of(revision) if p.ready and p.ip)

    def answering_pods(self, revision: str) -> tuple[PodView, ...]:
        """Return the revision's pods whose engines answer, admitted or not."""
        return tuple(p for p in self.pods_of(revision) if p.answers)

    def rejection(self, kind: str, name: str) -> Rejection | None:
        """Return the API server's refusal of this object, or None."""
        return next((one for one in self.rejections or () if (one.kind, one.name) == (kind, name)), None)

    def last_sample(self, revision: str) -> Sample | None:
        """Return the revision's newest scrape in which at least one pod had plausible metrics."""
        return next((sample for sample in reversed(self.samples.get(revision, ())) if sample.pods), None)

    def reported_dtype(self, revision: str) -> Sample | None:
        """Return the revision's newest scrape in which a pod reported its KV-cache dtype."""
        return next((sample for sample in reversed(self.samples.get(revision, ())) if sample.observed_dtype), None)
