"""Everything known of one service at one moment: what `observe` gathers and `decide` reads. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, NamedTuple

from kvpilot_operator.api.schema import Fault
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.decision import Find, ProbeResult
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.server import ServerFacts
from kvpilot_operator.state.status import Status


class ServiceKey(NamedTuple):
    """Namespace and name of a QuantizedLLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


ON_ITS_WAY = ("PodInitializing", "ContainerCreating")
"""What a container waits with while nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One engine pod as its kubelet reports it."""

    name: str
    revision: str
    ip: str | None
    node: str | None
    ready: bool
    """Whether requests are sent to it: the kubelet's condition Ready, for which its readiness gates must be open."""
    terminating: bool
    restarts: int
    waiting_reason: str | None
    """Why the container waits (ErrImagePull, CrashLoopBackOff, ...)."""
    exit_message: str | None
    """What the engine's last exit left behind (kvpilot-serve's refusal, or the end of its log)."""
    unschedulable: str | None
    """The scheduler's message while no node fits, or a queue holds the pod back."""
    held_up: tuple[str, str] | None = None
    """Why an init container or a sidecar keeps the pod from being ready: reason and message."""
    needs: tuple[str, ...] | None = None
    """What its volumes are made from, such as "Secret certificates"; None once a container of it has started."""
    uid: str = ""
    do_not_evict: bool = False
    """Whether we have asked cluster autoscalers to leave it where it is."""
    mesh: bool = False
    """Whether it is reached by the mesh's mutual TLS."""
    containers_ready: bool = False
    admitted: bool | None = None
    """Whether our readiness gate is open; None where the pod has none."""
    workers: tuple[PodView, ...] = ()
    """The other pods of the group that it leads, none of which takes requests."""

    @property
    def group(self) -> tuple[PodView, ...]:
        """All pods of the replica that it is, or leads."""
        return (self, *self.workers)

    @property
    def answers(self) -> bool:
        """Whether its engine answers whoever has its address, be it admitted or not."""
        return (self.ready or self.containers_ready) and bool(self.ip) and not self.terminating


@dataclass(frozen=True, slots=True)
class PrefetchView:
    """The Job that fills the claim for weights."""

    content: str
    """As its annotation says it: what has to be on the claim, and the Job's own content."""
    done: bool
    failure: str | None
    """Why it ended without being done."""
    pods: tuple[PodView, ...]
    downloaded_bytes: int | None
    """As its pod says now; None where none answers."""
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One revision's Deployment, or what else runs it."""

    revision: str
    dtype: str
    replicas: int
    failure: str | None = None
    """Why pods that it lacks cannot be created, in the API server's words (the condition ReplicaFailure)."""
    image: str | None = None
    model: str | None = None
    """The engine's, as it is told."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that its engines load at start."""
    gated: bool = True
    """Whether its pods have our readiness gate: those of an earlier operator may have none."""
    kind: str = "Deployment"
    nodes: int = 1
    """Pods of a replica."""


@dataclass(frozen=True, slots=True)
class ObjectView:
    """An object that carries the service's label: which one it is, and whether it is the service's own."""

    uid: str
    owned: bool
    """By an owner reference with the service's uid: a label is easily copied."""
    version: str
    """Moves when somebody changes what the object should be."""
    selects: str | None = None
    """The revision that a Service sends requests to, "" for every one; None where its selector is not ours."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An object that the API server would not have, in its own words."""

    kind: str
    name: str
    reason: str
    """The reason in the server's Status: Invalid, Forbidden, ...; may be empty."""
    message: str
    causes: tuple[tuple[str, str], ...] = ()
    """Field and message, where it names them."""


NOTHING_OBSERVED = Histogram()


@dataclass(frozen=True, slots=True)
class Flows:
    """What happened on one revision's pods since the scrape before: increments, never counters.

    A pod adds to it only with two pages of one engine process behind it; what a restart lost counts from zero.
    """

    seconds: float = 0.0
    """Pod-seconds that the increments cover; 0 where nothing is known yet."""
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: float = 0.0
    """Prompt tokens that it held."""
    host_hits: float = 0.0
    """Prompt tokens that it did not hold, and that were loaded from where they had been offloaded to."""
    finished: float = 0.0
    """Requests that ended, failed ones included."""
    failed: float = 0.0
    """Requests that ended in an error of the engine (a client that left is none)."""
    prefill_seconds: float = 0.0
    """Request-seconds spent in prefill."""
    decode_seconds: float = 0.0
    """Request-seconds spent in decode."""
    ttft: Histogram = NOTHING_OBSERVED
    """Time to first token, seconds."""
    itl: Histogram = NOTHING_OBSERVED
    """Inter-token latency, seconds."""
    prompt_lengths: Histogram = NOTHING_OBSERVED
    generation_lengths: Histogram = NOTHING_OBSERVED

    @classmethod
    def together(cls, flows: Sequence[Flows]) -> Flows:
        """Their sum; histograms of other buckets than the last (an engine of another version) are left out."""
        columns: list[list[Any]] = [[getattr(one, f.name) for one in flows] for f in fields(cls) if flows]
        sums: list[Any] = [Histogram.together(c) if isinstance(c[0], Histogram) else sum(c) for c in columns]
        return cls(*sums)


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one revision: sums over the pods whose pages are plausible; use is their token-weighted mean."""

    time: datetime
    pods: int
    """Pods that answered with a plausible page."""
    usage: float
    """Share of KV blocks in use, 0 to 1."""
    running: float
    waiting: float
    capacity_tokens: int
    observed_dtype: str
    flows: Flows = Flows()
    implausible: tuple[str, ...] = ()
    """Pods that answered with an implausible page, each as "NAME: why"."""
    unanswered: int = 0
    """Ready pods that gave no page."""
    recent_tokens: int | None = None
    """The recent window of most pods; None where none has told it."""
    retention: str = ""
    """The policy by which most pods free pages of a sequence; empty where most keep all."""
    factors: str = ""
    """Hash of the calibration factors that most pods have; empty where none has told it."""
    mixed: tuple[tuple[str, str], ...] = ()
    """Pods that have other ones, and their hashes; the first few by name."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine says of its model's architecture (the metric kvpilot_model_info of our runtime)."""

    head_dim: int
    kv_heads: int
    layers: int
    window_layers: int
    """Layers with a sliding window."""
    mla: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the nodes that run the service say of their accelerator."""

    gpu: str = "cpu"
    """As the node label nvidia.com/gpu.product says it, or would; another vendor's by the vendor's own label."""
    compute_capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    """Memory of one GPU, or of one slice where the GPUs are divided (MIG)."""
    cuda: bool = True
    """False for an accelerator of another vendor than NVIDIA."""


class Parent(NamedTuple):
    """What a Gateway says of a route that asks to be attached to it."""

    name: str
    """As NAMESPACE/NAME, with the listener where one is named."""
    accepted: bool | None
    """None where nothing has been said of the route as it is now."""
    message: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """The Gateway API HTTPRoute that takes a canary's share, as it is now: ours, or the one that routeRef names."""

    name: str
    resource_version: str
    rules: tuple[Mapping[str, Any], ...]
    """`spec.rules`, raw."""
    weights: Mapping[str, int]
    """Weight by backend Service name, over the rules that send traffic to this service."""
    parents: tuple[Parent, ...] = ()
    """In the order of `spec.parentRefs`."""


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
    """What the API server would not have when it was last written; None before anything was."""
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
    """What could not be observed this time: its field holds nothing then, which says nothing."""
    backed_off: Mapping[str, str] = field(default_factory=dict)
    """Pods that are asked for their metrics less often, by name, with why: they failed more than once in a row."""
    gpu_hour_micros: int | None = None
    """What one of its GPUs costs an hour, in millionths of the prices' currency; None where no price is known."""

    def unread(self, question: Question) -> Unanswered | None:
        """Why this could not be observed; None where it was."""
        return next((one for one in self.unanswered if one.question == question), None)

    def pods_of(self, revision: str) -> tuple[PodView, ...]:
        """The revision's pods that are not on their way out."""
        return tuple(p for p in self.pods if p.revision == revision and not p.terminating)

    def pod_to_ask(self, pods: tuple[PodView, ...]) -> PodView:
        """Of these the one that is being asked, so that a new pod does not end a probe; else the first by name."""
        request = self.probe_result.request if self.probe_result is not None else None
        asked = None if request is None or isinstance(request, Find) else request.pod
        return next((pod for pod in pods if pod.name == asked), pods[0])

    def ready_pods(self, revision: str) -> tuple[PodView, ...]:
        """The revision's pods that answer and are sent requests where a selector names them."""
        return tuple(p for p in self.pods_of(revision) if p.ready and p.ip)

    def answering_pods(self, revision: str) -> tuple[PodView, ...]:
        """The revision's pods whose engines answer, those that are not admitted yet included."""
        return tuple(p for p in self.pods_of(revision) if p.answers)

    def rejection(self, kind: str, name: str) -> Rejection | None:
        """Why the API server would not have this object, if it would not."""
        return next((one for one in self.rejections or () if (one.kind, one.name) == (kind, name)), None)

    def last_sample(self, revision: str) -> Sample | None:
        """The revision's newest scrape in which at least one pod was plausible."""
        return next((sample for sample in reversed(self.samples.get(revision, ())) if sample.pods), None)
