"""The spec of one QuantizedLLMService as frozen structs, one field for each field of the CRD.

Fields have the CRD's names in snake case. `make generate` writes the CRD from them (see `record`).
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

import msgspec
from msgspec import Meta

from kvpilot_formats import dtypes
from kvpilot_formats.arguments import rules as arguments
from kvpilot_operator.api.pods import Cache, Engine, Model
from kvpilot_operator.api.record import NAME, SET, Json, Label, Name, Percent, Record, Rule, keyed_by, rules

SmallDtype = Literal[
    "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "int8", "k8v4", "k4v4", "k4v2",
    "k2v2", "mla8", "mla4",
]  # fmt: skip
"""Dtypes of fewer than 16 bits."""
Dtype = Literal["auto", "bfloat16", "float16", SmallDtype]
Thousand = Annotated[int, Meta(ge=0, le=1000)]
Hostname = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=253,
        pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    ),
]
ProbeSet = Annotated[
    str,
    Meta(max_length=263, pattern=f"^(builtin/(general|multi-turn|long-context|structured)|configmap/{NAME})$"),
]
SkippedLayer = Annotated[str, Meta(max_length=16, pattern=r"^(sliding_window|0|[1-9][0-9]{0,3})$")]

_MILLIBITS = {name: int(dtypes.parse(name).bits_per_element() * 1000) for name in get_args(SmallDtype)}
_DOWNWARDS = Rule(
    "",
    f"[{_MILLIBITS}].all(bits, [0, 1, 2, 3, 4, 5, 6].all(i, i + 1 >= size(self) || bits[self[i]] > bits[self[i + 1]]))",
    "kvCache.ladder [{self.join(', ')}] has a step that is not smaller than the one before: order the dtypes from more "
    "bits per element to fewer, and name none twice",
)
_UPWARDS = Rule(
    "",
    "[0, 1, 2, 3, 4, 5, 6, 7, 8].all(i, i + 1 >= size(self) || self[i].weightPercent < self[i + 1].weightPercent)",
    "canary.steps: order them so that each weightPercent is above the one before",
)
_GATEWAYS_DIFFER = Rule(
    "",
    "self.all(a, self.exists_one(b, a == b))",
    "route.parentRefs names a Gateway, or a listener of it, twice: remove one of the two",
)

RULES_OF_SERVICE = (
    Rule(
        ".metadata.name",
        "size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name becomes the name of a Service and of what is made for it: use at most 40 lower-case letters, "
        "digits and dashes, start with a letter and end with a letter or digit",
    ),
    Rule(
        ".spec.model.adapters",
        "!has(self.spec.model.adapters) || self.spec.model.adapters.all(one, one.name != "
        "(has(self.spec.model.servedName) ? self.spec.model.servedName : self.metadata.name))",
        "an adapter has the name under which the model itself is served: use another name",
    ),
)
"""Rules of a whole object."""


class Pressure(Record, frozen=True):
    """Signs of too little KV memory. Any one sign, held for sustainedSeconds, turns the condition MemoryPressured True.
    Takes effect at the next reconcile."""

    high_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    """KV cache use, in percent, from which memory is under pressure."""
    low_percent: Annotated[int, Meta(ge=0, le=99)] = 50
    """KV cache use, in percent, under which pressure has left. Below highPercent."""
    waiting_per_replica: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Requests that wait in a replica's queue from which memory is under pressure."""
    preemptions_per_minute: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Requests per minute that a replica throws out of its KV cache, from which memory is under pressure."""
    sustained_seconds: Annotated[int, Meta(ge=5, le=86_400)] = 300
    """Seconds for which a sign must hold before anything is done about it."""


@rules(
    Rule(
        ".storageClassName",
        "!(has(self.claimName) && has(self.storageClassName))",
        "kvCache.offload.disk has claimName, a claim that is there, and storageClassName, which is for volumes of the "
        "pods' own: remove one of the two",
    )
)
class OffloadDisk(Record, frozen=True):
    """A tier of disk below host memory: what host memory drops stays there, in one file of each engine's own that no
    other engine reads and that goes with it. Without claimName each pod has a volume of its own, made and deleted with
    it (a generic ephemeral volume), of storageClassName or the cluster's default. Engines with vLLM 0.32 have it,
    others refuse to start, as they do where the volume is full or cannot be written; one whose disk fails later serves
    on without."""

    size_gib: Annotated[int, Meta(ge=1, le=131_072)]
    """Size of each engine's file, at most, in GiB. A pod's own volume is asked for with a tenth more, which a file
    system keeps for itself; a claim has to have it free for each pod."""
    storage_class_name: Name | None = None
    """StorageClass of the pods' own volumes; without it, and without claimName, the cluster's default. A node's local
    disks are the fastest."""
    claim_name: Name | None = None
    """PersistentVolumeClaim of this namespace that all pods keep their files on, instead of volumes of their own. Pods
    on several nodes need one that several nodes can write (ReadWriteMany)."""


class Offload(Record, frozen=True):
    """Host memory and disk for prefixes when the GPU needs their blocks: a later request that begins alike loads them
    instead of computing them again. Every dtype can be offloaded, and a smaller one holds more tokens in the same
    memory; int8, k8v4, k4v4, k4v2 and k2v2 not for a model with sliding-window layers, mla8 and mla4 not at all.
    Without it they are dropped. A change starts a new revision."""

    cpu_memory_gib: Annotated[int, Meta(ge=1, le=16_384)]
    """Host memory of each replica that holds offloaded blocks, in GiB, shared by its GPUs. The pod asks for it beside
    engine.resources: requests.memory and limits.memory grow by it where they are set, and requests.memory is set to it
    where neither is. The engine takes all of it at its start, and refuses to start where it is not there."""
    disk: OffloadDisk | None = None


@rules(
    Rule(
        "",
        "self.policy == 'All' ? !(has(self.sinkTokens) || has(self.windowTokens) || has(self.budgetTokens)) : "
        "self.policy == 'SinksAndWindow' ? has(self.sinkTokens) && has(self.windowTokens) && !has(self.budgetTokens) : "
        "has(self.budgetTokens)",
        "kvCache.retention: the numbers do not fit the policy: SinksAndWindow needs sinkTokens and windowTokens and "
        "takes no budgetTokens, HeavyHitters needs budgetTokens, All takes none: set policy or the numbers accordingly",
    ),
    Rule(
        ".budgetTokens",
        "!has(self.budgetTokens) || (has(self.sinkTokens) ? self.sinkTokens : 4) + "
        "(has(self.windowTokens) ? self.windowTokens : self.budgetTokens / 2) < self.budgetTokens",
        "kvCache.retention.budgetTokens is not above sinkTokens and windowTokens together, which are 4 and half of the "
        "budget unless they are set: raise it, or lower these",
    ),
)
class Retention(Record, frozen=True):
    """Tokens of a sequence that the KV cache keeps; all of them without it. With SinksAndWindow (StreamingLLM) the
    first and the last ones: the pages between are freed while a request runs, so that it takes no more of them however
    long it gets, and what was in them is forgotten. With HeavyHitters (H2O) the heaviest pages between are kept too, by
    the attention that they had so far, up to a budget. kvpilot never chooses either. Engines refuse to start with it
    for a model with sliding-window layers, beside offload, recentTokens above 0 and speculative decoding, and with
    HeavyHitters for dtype auto on a GPU. A change starts a new revision."""

    policy: Literal["All", "SinksAndWindow", "HeavyHitters"]
    """All keeps every token; SinksAndWindow needs sinkTokens and windowTokens, HeavyHitters budgetTokens."""
    sink_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    """The first tokens of a sequence that are kept, in whole pages."""
    window_tokens: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    """The last tokens of a sequence that are kept, in whole pages."""
    budget_tokens: Annotated[int, Meta(ge=16, le=16_777_216)] | None = None
    """For HeavyHitters, all tokens of a sequence that are kept before each step, in whole pages: sinkTokens (4 if left
    out), windowTokens (half of the budget if left out) and, for the rest, the heaviest pages between. Engines refuse
    one without room for a page beside sinks and window (512 tokens with pages of 128, which CPUs have unless
    --block-size says otherwise)."""


class KVCache(Record, frozen=True):
    """Choice of the KV cache's dtype, and what the cache keeps."""

    mode: Literal["Fixed", "Recommend", "Auto"] = "Recommend"
    """Who chooses the dtype. Fixed: you, with dtype. Recommend: kvpilot works out what it would choose and writes it to
    status.kvCache.recommendedDtype and status.scaling.recommendedReplicas, and changes neither dtype nor replicas,
    except that a dtype whose answers fail their probes is left. Auto: kvpilot moves along the ladder, one canary at a
    time. Takes effect at the next reconcile, within seconds. A service that was created while Auto was the default has
    it stored and keeps it."""
    baseline: Literal["auto", "bfloat16", "float16"] = "auto"
    """The 16-bit dtype that the accuracy of every other one is measured against, and where Auto starts. auto is the
    model's own. Where the checkpoint chooses fewer bits for auto, name bfloat16 or float16, with --dtype of the same
    name in engine.extraArgs. A change captures the baseline anew."""
    ladder: Annotated[tuple[SmallDtype, ...], Meta(min_length=1, max_length=8, extra={"rules": (_DOWNWARDS,)})] = (
        "fp8",
        "k8v4",
        "k4v4",
    )
    """The dtypes that Auto may choose and Recommend may name, from the safest to the smallest, after the baseline. A
    step that the GPU or the model does not support is passed over."""
    skip_layers: Annotated[tuple[SkippedLayer, ...], Meta(max_length=128, extra=SET)] = ("sliding_window",)
    """Layers whose cache stays in the model's dtype whatever is chosen: layer numbers from 0, or sliding_window for all
    layers with a sliding window (they hold little, so there is little to gain). A change starts a new revision."""
    pressure: Pressure = Pressure()
    min_dwell_seconds: Annotated[int, Meta(ge=0, le=2_592_000)] = 21_600
    """Seconds that a dtype serves before Auto may choose another. A change of dtype restarts and recompiles every
    replica, so hours are right in production. Does not delay a rollback."""
    dtype: Dtype | None = None
    """The dtype of the KV cache; required with mode Fixed, refused otherwise. auto is the model's own 16-bit dtype, or
    what its checkpoint chooses; bfloat16 and float16 need --dtype with the same name in engine.extraArgs, since a model
    of another dtype answers nonsense; mla8 and mla4 are for models with multi-head latent attention, and int8, k8v4,
    k4v4, k4v2 and k2v2 for all others. It goes through a canary like any other change, and one that fails its probes is
    denied and not served."""
    recent_tokens: Literal[0, 64, 128, 256, 512] | None = None
    """How many of the last tokens of each sequence are read at 8 bits, with k8v4, k4v4, k4v2 and k2v2; of no effect on
    other dtypes. More is more accurate and takes more memory for each sequence (kvpilot plan counts it); 0 turns it
    off. Without it each dtype's default: 64 for k8v4, 64 for k4v4, 128 for k4v2, 512 for k2v2. A shorter context cuts a
    default down to the largest value that is not longer. A change starts a new revision of these dtypes, which goes
    through a canary, and what was denied before may be tried again."""
    offload: Offload | None = None
    retention: Retention | None = None

    @property
    def bounded(self) -> bool:
        """True if engines forget a part of long sequences."""
        return self.retention is not None and self.retention.policy != "All"

    def recent_tokens_of(self, dtype: str) -> int | None:
        """Return the recent window for an engine with this dtype; None if none is set, or the dtype has no window."""
        return self.recent_tokens if dtypes.parse(dtype).has_ring else None


class Objective(Record, frozen=True):
    """One item of spec.scaling.objectives."""

    metric: Literal["TTFT", "ITL"]
    """TTFT: time to first token. ITL: time between two tokens."""
    percentile: Annotated[int, Meta(ge=50, le=99)]
    """The share of requests (TTFT) or tokens (ITL) that it is to hold for, in percent."""
    milliseconds: Annotated[int, Meta(ge=1, le=3_600_000)]
    """The longest time."""

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile}"


class Scaling(Record, frozen=True):
    """Number of replicas: who decides it, and its bounds."""

    mode: Literal["Operator", "External"] = "Operator"
    """Operator: kvpilot weighs a replica more against a smaller dtype. External: an autoscaler (HPA, KEDA) or a person
    writes /scale, and kvpilot never chooses a number itself. Never both: two writers of one number fight."""
    min_replicas: Thousand = 1
    """Fewest replicas. 0 lets /scale stop the service altogether."""
    max_replicas: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Most replicas. A canary may add one for as long as it lasts."""
    scale_down_stabilization_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds for which fewer replicas must have been enough before kvpilot scales in."""
    objectives: Annotated[tuple[Objective, ...], Meta(max_length=8, extra=keyed_by("metric", "percentile"))] = ()
    """Latencies to hold, by vLLM's histograms over kvCache.pressure.sustainedSeconds. A missed one calls for a smaller
    dtype where memory binds, else for replicas; where all are held, and one is of TTFT, no replica is added for a
    queue. Too few samples decide nothing."""

    def clamp(self, replicas: int) -> int:
        """Return the nearest number of replicas within min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class CanaryStep(Record, frozen=True):
    """One item of spec.canary.steps."""

    weight_percent: Annotated[int, Meta(ge=1, le=100)]
    """Share of requests, in percent, that goes to the canary. 100 is the promotion itself and is not judged."""
    hold_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds to stay at this share before the next step. At least 30 seconds of figures are judged."""


class RouteRef(Record, frozen=True):
    """The Gateway API HTTPRoute that sends users to this service, in its namespace. With it the steps are set as
    weights of its backends (the Service NAME, or the InferencePool NAME of spec.inferencePool); without it they are set
    by the number of replicas behind the Service."""

    name: Name
    """The HTTPRoute's name."""


class Canary(Record, frozen=True):
    """Trial of a new revision before it takes the traffic. Read anew for each canary."""

    capacity_policy: Literal["Surge", "ReplaceOne", "SurgeOrReplaceOne"] = "SurgeOrReplaceOne"
    """Where the canary's GPUs come from. Surge: from spare ones, and the canary waits for them. ReplaceOne: from one
    stable replica, which leaves first. SurgeOrReplaceOne: from spare ones, or else from a stable replica."""
    steps: Annotated[tuple[CanaryStep, ...], Meta(max_length=10, extra={"rules": (_UPWARDS,)})] = ()
    """Shares of live traffic that a canary takes after its probes have passed, in increasing order. Without steps a
    canary that has passed takes all traffic in one switch."""
    warm_up_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 60
    """Seconds at the start of each step whose figures do not count: caches are cold and graphs are still compiled."""
    min_requests: Annotated[int, Meta(ge=10, le=1_000_000)] = 100
    """Requests that both sides must have finished before a step is judged. Fewer are inconclusive."""
    max_ttft_p95_regression_percent: Thousand = 10
    """By how many percent the 95th percentile of the time to first token may be above the stable side's."""
    max_itl_p95_regression_percent: Thousand = 10
    """By how many percent the 95th percentile of the time between two tokens may be above the stable side's."""
    max_throughput_regression_percent: Percent = 10
    """By how many percent the tokens per second of a running request may be below the stable side's."""
    max_error_increase_percent: Percent = 1
    """By how many percentage points the share of failed requests may be above the stable side's."""
    progress_deadline_seconds: Annotated[int, Meta(ge=30, le=604_800)] = 3600
    """Seconds that one stage of a canary may take without progress: to start (loading the model included), to be
    probed, to put a step's share in effect, to reach a verdict after a step's warmUpSeconds and holdSeconds (or 30
    seconds of figures, if longer), to move one replica in a promotion. Warm-up, holds and pauses do not count. After it
    the canary is rolled back."""
    route_ref: RouteRef | None = None


class Accuracy(Record, frozen=True):
    """Accuracy that a canary, and later the serving replicas, must show against the 16-bit baseline of the same model.
    Read anew for each probe run."""

    probe_sets: Annotated[tuple[ProbeSet, ...], Meta(min_length=1, max_length=16, extra=SET)] = (
        "builtin/general", "builtin/multi-turn", "builtin/long-context", "builtin/structured",
    )  # fmt: skip
    """Prompts that are asked: builtin/general, builtin/multi-turn, builtin/long-context, builtin/structured, or
    configmap/NAME for your own (key prompts.yaml of a ConfigMap of this namespace). A change captures the baseline
    anew."""
    max_excess_kl_millinats: Annotated[int, Meta(ge=0, le=100_000)] = 20
    """By how many thousandths of a nat the mean KL divergence of the canary from the baseline may be above that of the
    baseline from itself (the control run). Noise is not damage."""
    min_top1_agreement_percent: Percent = 97
    """Percentage of positions at which canary and baseline find the same token most likely, lowered by what the control
    run itself disagrees. A canary is below it where so many positions leave no doubt, at an error of 1%: in 250 of them
    some 4% below."""
    failure_limit: Annotated[int, Meta(ge=1, le=100)] = 1
    """Failed probe runs at which a canary is rolled back, and failed runs in a row at which onFailure takes effect for
    the serving replicas. 1 means the first one."""
    consecutive_error_limit: Annotated[int, Meta(ge=1, le=100)] = 4
    """Probe runs in a row without a verdict (a timeout, a refused connection) at which a canary is rolled back. An
    error is not a failure: the dtype may be tried again within the hour. For the serving replicas the condition
    AccuracyVerified becomes Unknown and nothing else happens."""
    period_seconds: Annotated[int, Meta(ge=60, le=2_592_000)] = 900
    """Seconds between two probe runs against the serving replicas after promotion, one replica a run. Nothing is probed
    while the baseline dtype itself serves."""
    on_failure: Literal["Rollback", "Report"] = "Rollback"
    """Reaction to a dtype that serves traffic and fails a probe run. Rollback: back to the last good dtype, and the
    failed one is denied. Report: the condition AccuracyVerified says so, and nothing moves. A canary that fails is
    rolled back in either case."""


class Rollout(Record, frozen=True):
    """Rules for every change of revision."""

    deny_seconds: Annotated[int, Meta(ge=0, le=31_536_000)] = 604_800
    """Seconds for which a dtype that failed is not tried again with the same model, image and GPU."""
    paused: bool = False
    """true: no canary is started and a running one is neither promoted nor rolled back. Serving, scaling and status go
    on. Takes effect at the next reconcile."""


class Drain(Record, frozen=True):
    """Shutdown of a replica without losing requests. A change starts a new revision."""

    pre_stop_seconds: Annotated[int, Meta(ge=0, le=600)] = 15
    """Seconds between leaving the Service and the stop signal, for clients and proxies to notice."""
    timeout_seconds: Annotated[int, Meta(ge=1, le=7_200)] = 120
    """Seconds that running requests get to finish after the stop signal."""


class Port(Record, frozen=True):
    """A port of a Service."""

    number: Annotated[int, Meta(ge=1, le=65_535)]
    """The port's number."""


class EndpointPickerRef(Record, frozen=True):
    """The endpoint picker of one pool, as an InferencePool has it."""

    name: Name
    """Name of the picker's Service, in this namespace."""
    port: Port
    """Port of that Service."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """Behaviour of the gateway while the picker does not answer: FailOpen sends requests to any pod of the pool,
    FailClose to none."""


@rules(
    Rule(
        ".canaryEndpointPickerRef",
        "!has(self.canaryEndpointPickerRef) || has(self.endpointPickerRef) && "
        "self.canaryEndpointPickerRef.name != self.endpointPickerRef.name",
        "inferencePool.canaryEndpointPickerRef needs endpointPickerRef beside it, with another name, since a picker "
        "serves one pool: run a picker for each of NAME and NAME-canary, and set both",
    )
)
class InferencePool(Record, frozen=True):
    """InferencePools of the Gateway API Inference Extension, v1: NAME selects what the Service NAME selects, and where
    there is a route (route, or canary.routeRef), NAME-canary what a canary's share goes to. Without it there are none.
    """

    endpoint_picker_ref: EndpointPickerRef | None = None
    """The endpoint picker of the pool NAME, as in an InferencePool. A picker serves one pool, so that of NAME-canary is
    another one. Releases v1.0 to v1.5 of the extension need it; as of v1.6 it may be left out, for a gateway that picks
    itself."""
    canary_endpoint_picker_ref: EndpointPickerRef | None = None
    """The endpoint picker of the pool NAME-canary."""


class ParentRef(Record, frozen=True):
    """One item of spec.route.parentRefs: a Gateway, or one of its listeners."""

    name: Name
    """Name of the Gateway."""
    namespace: Label | None = None
    """Its namespace, without it the service's. The Gateway's listener has to allow routes from there."""
    section_name: Name | None = None
    """Name of one of its listeners. Without it the route asks for all of them."""


class Route(Record, frozen=True):
    """An HTTPRoute NAME of the Gateway API that kvpilot makes and owns: it sends to the InferencePool NAME with
    inferencePool, else to the Service NAME, and the steps of a canary are set as its weights. It goes with the service,
    or with this field. For a route of your own set canary.routeRef instead."""

    parent_refs: Annotated[
        tuple[ParentRef, ...], Meta(min_length=1, max_length=8, extra={"rules": (_GATEWAYS_DIFFER,)})
    ]
    """The Gateways that the route asks to be attached to."""
    hostnames: Annotated[tuple[Hostname, ...], Meta(max_length=16, extra=SET)] = ()
    """Hosts that the route answers for, as *.example.com or chat.example.com. Without any it answers for those of the
    listeners."""


class Disruption(Record, frozen=True):
    """Replicas that node drains and upgrades must leave running. Takes effect at once."""

    min_available: Thousand = 1
    """Ready replicas that a voluntary disruption must leave. A service with no more replicas than this has no
    disruption budget, so that its nodes can be drained."""


# Rules about structs with the default {} stand here: the server judges a default before it fills in what is within.
@rules(
    Rule(
        ".kvCache.dtype",
        "(self.kvCache.mode == 'Fixed') == has(self.kvCache.dtype)",
        "kvCache.mode {self.kvCache.mode} and kvCache.dtype do not go together: set dtype with mode Fixed, and remove "
        "it with any other, where kvCache.ladder says what may be chosen",
    ),
    Rule(
        ".kvCache.dtype",
        "!has(self.kvCache.dtype) || !(self.kvCache.dtype in ['mla8', 'mla4']) || !(has(self.kvCache.offload) || "
        "(has(self.kvCache.retention) && self.kvCache.retention.policy != 'All'))",
        "kvCache.dtype {self.kvCache.dtype} is served with the whole cache on the GPU: remove kvCache.offload and "
        "kvCache.retention, or use fp8",
    ),
    *(
        Rule(
            f".{field}",
            f"!({given}self.{field} in ['bfloat16', 'float16']) || "
            "(self.engine.extraArgs.exists_one(a, a.matches('^--dt')) && "
            f"self.engine.extraArgs.exists(a, a == '--dtype=' + self.{field}))",
            f"{field} {{self.{field}}} gives nonsense with a model of another dtype: use auto, the dtype of the model, "
            "or add --dtype with the same name to engine.extraArgs, as one item",
        )
        for field, given in (("kvCache.baseline", ""), ("kvCache.dtype", "has(self.kvCache.dtype) && "))
    ),
    Rule(
        ".kvCache.recentTokens",
        "!has(self.kvCache.recentTokens) || !has(self.model.maxModelLen) || "
        "self.kvCache.recentTokens <= self.model.maxModelLen",
        "kvCache.recentTokens is above model.maxModelLen, the longest context: lower it, or raise maxModelLen",
    ),
    Rule(
        ".kvCache.retention",
        "!has(self.kvCache.retention) || self.kvCache.retention.policy == 'All' || "
        "!(has(self.kvCache.offload) || (has(self.kvCache.recentTokens) && self.kvCache.recentTokens > 0))",
        "kvCache.retention frees pages that kvCache.offload and kvCache.recentTokens would look for: remove it, or "
        "remove these",
    ),
    Rule(
        ".kvCache.pressure.lowPercent",
        "self.kvCache.pressure.lowPercent < self.kvCache.pressure.highPercent",
        "kvCache.pressure.lowPercent is not below kvCache.pressure.highPercent (85 unless set): lower lowPercent or "
        "raise highPercent, so that the service does not flap between two dtypes",
    ),
    Rule(
        ".scaling.minReplicas",
        "self.scaling.minReplicas <= self.scaling.maxReplicas",
        "scaling.minReplicas is above scaling.maxReplicas (8 unless set): lower minReplicas or raise maxReplicas",
    ),
    Rule(
        ".cache",
        "!(has(self.cache.weights) || has(self.cache.weightsClaimName)) || self.model.source.startsWith('hf://')",
        "cache.weights and cache.weightsClaimName keep downloads of hf:// models, and model.source downloads nothing: "
        "remove cache.weights and cache.weightsClaimName, or use an hf:// source",
    ),
    Rule(
        ".cache.weights",
        "!has(self.cache.weights) || !has(self.cache.weightsClaimName)",
        "cache.weights has a claim made and cache.weightsClaimName names one that is there: remove one of them",
    ),
    Rule(
        ".cache.prefetch",
        "!self.cache.prefetch || has(self.cache.weights) || has(self.cache.weightsClaimName)",
        "cache.prefetch fills a claim, and there is none to fill: set cache.weights or cache.weightsClaimName, or "
        "remove cache.prefetch",
    ),
    Rule(
        ".cache.prefetch",
        "!self.cache.prefetch || !self.engine.env.exists(e, e.name == 'VLLM_USE_MODELSCOPE' && "
        "!(has(e.value) && e.value in ['', '0', 'false', 'False']))",
        "cache.prefetch asks the Hugging Face hub, and VLLM_USE_MODELSCOPE in engine.env has engines ask ModelScope: "
        "remove one of them",
    ),
    Rule(
        ".cache.weights.accessMode",
        "!has(self.cache.weights) || self.cache.weights.accessMode != 'ReadWriteOnce' || "
        "!has(self.engine.podTemplate.spec) || !has(self.engine.podTemplate.spec.topologySpreadConstraints) || "
        "!self.engine.podTemplate.spec.topologySpreadConstraints.exists(s, "
        "s.topologyKey == 'kubernetes.io/hostname' && s.whenUnsatisfiable == 'DoNotSchedule')",
        "cache.weights.accessMode ReadWriteOnce keeps all replicas on one node, and topologySpreadConstraints of "
        "engine.podTemplate spread them over nodes: use ReadWriteMany and a class that can, or remove "
        "kubernetes.io/hostname from the constraints",
    ),
    Rule(
        ".engine.nodes",
        "self.engine.nodes == 1 || !(has(self.kvCache.offload) || "
        "(has(self.kvCache.retention) && self.kvCache.retention.policy != 'All') || "
        "(has(self.cache.weights) && self.cache.weights.accessMode == 'ReadWriteOnce'))",
        "engine.nodes spreads each replica over several nodes, and kvCache.offload, kvCache.retention and "
        "cache.weights.accessMode ReadWriteOnce are for replicas on one: remove these (use ReadWriteMany), or set "
        "engine.nodes to 1",
    ),
    Rule(
        ".engine.env",
        "self.engine.env.all(e, !(e.name == 'HF_TOKEN' && has(self.model.tokenSecretRef)) && "
        "!(e.name == 'HF_HOME' && (has(self.cache.weights) || has(self.cache.weightsClaimName))) && "
        "!(e.name == 'VLLM_CACHE_ROOT' && has(self.cache.compileClaimName)))",
        "engine.env sets HF_TOKEN, HF_HOME or VLLM_CACHE_ROOT, and model.tokenSecretRef, cache.weights (or "
        "cache.weightsClaimName) or cache.compileClaimName does so too: remove one of them",
    ),
    Rule(
        ".inferencePool.canaryEndpointPickerRef",
        "!has(self.inferencePool) || !has(self.inferencePool.endpointPickerRef) || "
        "has(self.inferencePool.canaryEndpointPickerRef) || !(has(self.canary.routeRef) || has(self.route))",
        "inferencePool.canaryEndpointPickerRef is missing, and by canary.routeRef or route a canary's share goes to a "
        "pool of its own: name that pool's endpoint picker, or remove the route, so that canaries share by the number "
        "of replicas",
    ),
    Rule(
        ".canary.routeRef",
        "!has(self.route) || !has(self.canary.routeRef)",
        "canary.routeRef names a route of yours and route has one made: remove one of them",
    ),
    Rule(
        ".disruption.minAvailable",
        "self.disruption.minAvailable <= self.scaling.maxReplicas",
        "disruption.minAvailable is above scaling.maxReplicas (8 unless set), so no node could ever be drained: lower "
        "disruption.minAvailable or raise scaling.maxReplicas",
    ),
)
class Spec(Record, frozen=True):
    """The service that is asked for. Every field but model and engine has a default. The operator accepts at most 128
    KiB of JSON."""

    model: Model
    engine: Engine
    replicas: Thousand = 1
    """How many engine replicas are asked for. /scale writes it (kubectl scale, a HorizontalPodAutoscaler, KEDA), or you
    do. Kept within scaling.minReplicas and scaling.maxReplicas. Leave it out of manifests that are applied again and
    again when an autoscaler writes it. Takes effect at once, without a restart of running replicas."""
    cache: Cache = Cache()
    kv_cache: KVCache = KVCache()
    scaling: Scaling = Scaling()
    canary: Canary = Canary()
    accuracy: Accuracy = Accuracy()
    rollout: Rollout = Rollout()
    drain: Drain = Drain()
    disruption: Disruption = Disruption()
    inference_pool: InferencePool | None = None
    route: Route | None = None

    def route_of(self, service: str) -> str | None:
        """Return the HTTPRoute that gives a canary its share: one of ours has the service's name."""
        if self.route is not None:
            return service
        named = self.canary.route_ref
        return named.name if named is not None else None

    @property
    def offloads(self) -> bool:
        """True if engines keep prefixes in host memory, too."""
        return self.kv_cache.offload is not None or self.engine.arguments.on(arguments.OFFLOAD)

    def as_reference(self) -> Self:
        """Return the spec of the engine that accuracy is measured against, whose cache keeps every token."""
        whole = msgspec.structs.replace(self.kv_cache, retention=None)
        return msgspec.structs.replace(self, kv_cache=whole) if self.kv_cache.bounded else self


def parse(obj: Mapping[str, Json]) -> Spec:
    """Read the spec of a QuantizedLLMService, with defaults filled in.

    Raises:
        msgspec.ValidationError: a field has the wrong type or is beyond its limits.
    """
    # The API server takes 3.0 for a whole number, and so does this.
    spec = msgspec.convert({"spec": obj.get("spec")}, _Service, strict=False).spec
    if spec.model.served_name:
        return spec
    model = msgspec.structs.replace(spec.model, served_name=obj["metadata"]["name"])
    return msgspec.structs.replace(spec, model=model)


class _Service(Record, frozen=True):
    spec: Spec
