"""The spec of one QuantizedLLMService as frozen structs, one field per field of the CRD.

Names are the CRD's in snake_case, and so are their meanings, units, defaults and limits: the CRD describes them, here
they only get types. A field is None exactly where the CRD gives it no default and the user left it out.
"""

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Self

import msgspec

from kvpilot_kernels import formats

Json = Any
"""A value as a JSON decoder returns it."""


_WORDS = {"kl": "KL", "ttft": "TTFT", "itl": "ITL", "mib": "MiB", "gib": "GiB"}


@cache
def camel(name: str) -> str:
    """The CRD's name of a field."""
    head, *rest = name.split("_")
    return head + "".join(_WORDS.get(part, part.capitalize()) for part in rest)


class _Part(msgspec.Struct, frozen=True, rename=camel, omit_defaults=True):
    def as_written(self) -> dict[str, Json]:
        """The part as JSON, as the CRD has it, without what was left out."""
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Json])


class KeyRef(_Part, frozen=True):
    """One key of a Secret or ConfigMap of the service's namespace."""

    name: str
    key: str
    optional: bool = False


class Adapter(_Part, frozen=True):
    """One item of spec.model.adapters."""

    name: str
    source: str


class Model(_Part, frozen=True):
    """spec.model; served_name falls back to the object's name."""

    source: str
    served_name: str
    adapters: tuple[Adapter, ...] = ()
    revision: str | None = None
    token_secret_ref: KeyRef | None = None
    max_model_len: int | None = None


class FieldRef(_Part, frozen=True):
    """A field of the pod."""

    field_path: str


class ValueFrom(_Part, frozen=True):
    """The one place that a variable's value comes from."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(_Part, frozen=True):
    """One item of spec.engine.env: a value, or the one place it comes from, or neither for an empty value."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Resources(_Part, frozen=True):
    """spec.engine.resources: (resource name, quantity) pairs sorted by name, quantities as text ("1", "24Gi")."""

    requests: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, str], ...]


class NodeExpression(_Part, frozen=True):
    """One item of spec.engine.nodeAffinity."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...] = ()


class TopologySpread(_Part, frozen=True):
    """One item of spec.engine.topologySpread."""

    topology_key: str
    max_skew: int
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]


class Toleration(_Part, frozen=True):
    """One item of spec.engine.tolerations."""

    operator: Literal["Equal", "Exists"]
    key: str | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Engine(_Part, frozen=True):
    """spec.engine; image_pull_secrets are names, node_selector is (label, value) pairs sorted by label, nodes is 1.

    pod_template is JSON with sorted keys: nobody but `render` looks into it.
    """

    image: str
    image_pull_secrets: tuple[str, ...]
    tensor_parallel_size: int
    nodes: int
    gpu_memory_utilization_percent: int
    extra_args: tuple[str, ...]
    env: tuple[EnvVar, ...]
    resources: Resources
    node_selector: tuple[tuple[str, str], ...]
    node_affinity: tuple[NodeExpression, ...]
    topology_spread: tuple[TopologySpread, ...]
    tolerations: tuple[Toleration, ...]
    shm_size_mib: int
    runtime_class_name: str | None = None
    priority_class_name: str | None = None
    service_account_name: str | None = None
    pod_template: str = "{}"

    def option(self, name: str, shortest: str = "") -> list[str]:
        """What extra_args set an option to, in order: the last one counts.

        vLLM takes underscores, and a beginning of the name, down to `shortest`, that no other option has.
        """
        words = [word for arg in self.extra_args for word in arg.split("=", 1)]
        options = ((word.replace("_", "-"), value) for word, value in pairwise(words))
        return [value for word, value in options if word.startswith(shortest or name) and name.startswith(word)]


class Claim(_Part, frozen=True):
    """spec.cache.weights; size is a quantity of storage, as text."""

    size: str
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"]
    storage_class_name: str | None = None


class Cache(_Part, frozen=True):
    """spec.cache; of weights and weights_claim_name one is set at most."""

    prefetch: bool
    weights: Claim | None = None
    weights_claim_name: str | None = None
    compile_claim_name: str | None = None

    @property
    def on_one_node(self) -> bool:
        """Whether pods can share the weights' claim on one node alone."""
        return self.weights is not None and self.weights.access_mode == "ReadWriteOnce"


class Pressure(_Part, frozen=True):
    """spec.kvCache.pressure."""

    high_percent: int
    low_percent: int
    waiting_per_replica: int
    preemptions_per_minute: int
    sustained_seconds: int


class Offload(_Part, frozen=True):
    """spec.kvCache.offload."""

    cpu_memory_gib: int


class Retention(_Part, frozen=True):
    """spec.kvCache.retention; both numbers are set exactly when the policy is SinksAndWindow."""

    policy: Literal["All", "SinksAndWindow"]
    sink_tokens: int | None = None
    window_tokens: int | None = None


class KVCache(_Part, frozen=True):
    """spec.kvCache; dtype is set exactly when mode is Fixed."""

    mode: Literal["Fixed", "Recommend", "Auto"]
    baseline: str
    ladder: tuple[str, ...]
    skip_layers: tuple[str, ...]
    pressure: Pressure
    min_dwell_seconds: int
    dtype: str | None = None
    recent_tokens: int | None = None
    offload: Offload | None = None
    retention: Retention | None = None

    @property
    def bounded(self) -> bool:
        """Whether engines forget a part of long sequences."""
        return self.retention is not None and self.retention.policy != "All"

    def recent_tokens_of(self, dtype: str) -> int | None:
        """What is asked of an engine with this dtype; None where nothing is, or the dtype has no recent window."""
        return self.recent_tokens if formats.parse(dtype).has_ring else None


class Objective(_Part, frozen=True):
    """One item of spec.scaling.objectives."""

    metric: Literal["TTFT", "ITL"]
    percentile: int
    milliseconds: int

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile}"


class Scaling(_Part, frozen=True):
    """spec.scaling."""

    mode: Literal["Operator", "External"]
    min_replicas: int
    max_replicas: int
    scale_down_stabilization_seconds: int
    objectives: tuple[Objective, ...] = ()

    def clamp(self, replicas: int) -> int:
        """The nearest number of replicas within min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class CanaryStep(_Part, frozen=True):
    """One item of spec.canary.steps."""

    weight_percent: int
    hold_seconds: int


class Canary(_Part, frozen=True):
    """spec.canary; route_ref is its name."""

    capacity_policy: Literal["Surge", "ReplaceOne", "SurgeOrReplaceOne"]
    steps: tuple[CanaryStep, ...]
    warm_up_seconds: int
    min_requests: int
    max_ttft_p95_regression_percent: int
    max_itl_p95_regression_percent: int
    max_throughput_regression_percent: int
    max_error_increase_percent: int
    progress_deadline_seconds: int
    route_ref: str | None = None


class Accuracy(_Part, frozen=True):
    """spec.accuracy."""

    probe_sets: tuple[str, ...]
    max_excess_kl_millinats: int
    min_top1_agreement_percent: int
    failure_limit: int
    consecutive_error_limit: int
    period_seconds: int
    on_failure: Literal["Rollback", "Report"]


class Rollout(_Part, frozen=True):
    """spec.rollout."""

    deny_seconds: int
    paused: bool


class Drain(_Part, frozen=True):
    """spec.drain."""

    pre_stop_seconds: int
    timeout_seconds: int


class Port(_Part, frozen=True):
    """A port of a Service."""

    number: int


class EndpointPickerRef(_Part, frozen=True):
    """The endpoint picker of one pool, as an InferencePool has it."""

    name: str
    port: Port
    failure_mode: Literal["FailOpen", "FailClose"]


class InferencePool(_Part, frozen=True):
    """spec.inferencePool."""

    endpoint_picker_ref: EndpointPickerRef | None = None
    canary_endpoint_picker_ref: EndpointPickerRef | None = None


class ParentRef(_Part, frozen=True):
    """One item of spec.route.parentRefs: a Gateway, or one of its listeners."""

    name: str
    namespace: str | None = None
    section_name: str | None = None


class Route(_Part, frozen=True):
    """spec.route."""

    parent_refs: tuple[ParentRef, ...]
    hostnames: tuple[str, ...] = ()


class Disruption(_Part, frozen=True):
    """spec.disruption."""

    min_available: int


class Spec(_Part, frozen=True):
    """The whole spec of one service."""

    replicas: int
    model: Model
    engine: Engine
    cache: Cache
    kv_cache: KVCache
    scaling: Scaling
    canary: Canary
    accuracy: Accuracy
    rollout: Rollout
    drain: Drain
    disruption: Disruption
    inference_pool: InferencePool | None = None
    route: Route | None = None

    def route_of(self, service: str) -> str | None:
        """Name of the HTTPRoute that gives a canary its share: one of ours has the service's."""
        return service if self.route is not None else self.canary.route_ref

    @property
    def offloads(self) -> bool:
        """Whether engines keep prefixes in host memory, too."""
        return self.kv_cache.offload is not None or bool(self.engine.option("--kv-offloading-size"))

    def as_reference(self) -> Self:
        """The spec of the engine that accuracy is measured against, whose cache keeps every token."""
        whole = msgspec.structs.replace(self.kv_cache, retention=None)
        return msgspec.structs.replace(self, kv_cache=whole) if self.kv_cache.bounded else self


def parse(obj: Mapping[str, Json]) -> Spec:
    """Read the spec of a QuantizedLLMService.

    `obj` is the whole object as JSON, after schema.apply_defaults and without schema.faults; anything else may raise
    KeyError or msgspec.ValidationError.
    """
    spec = obj["spec"]
    engine, resources, canary = spec["engine"], spec["engine"]["resources"], spec["canary"]
    flat = {
        **spec,
        "model": {"servedName": obj["metadata"]["name"], **spec["model"]},
        "engine": {
            **engine,
            "imagePullSecrets": [secret["name"] for secret in engine["imagePullSecrets"]],
            "resources": {kind: _pairs(resources.get(kind, {})) for kind in ("requests", "limits")},
            "nodeSelector": _pairs(engine["nodeSelector"]),
            "podTemplate": _whole_numbers(engine.get("podTemplate", {})),
        },
        "canary": {**canary, "routeRef": canary.get("routeRef", {}).get("name")},
    }
    # The API server takes 3.0 for a whole number, and so does this.
    return msgspec.convert(flat, Spec, strict=False)


def _whole_numbers(value: Json) -> str:
    """JSON text in which 3.0, which the API server takes for a whole number, is 3, as a Pod needs it."""
    whole = json.loads(json.dumps(value), parse_float=lambda number: int(float(number)))
    return json.dumps(whole, sort_keys=True)


def _pairs(mapping: Mapping[str, Json]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in sorted(mapping.items())]
