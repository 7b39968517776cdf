"""The spec of one QuantizedLLMService as frozen structs, one field per field of the CRD.

Names are the CRD's in snake_case, and so are their meanings, units, defaults and limits: the CRD describes them, here
they only get types. A field is None exactly where the CRD gives it no default and the user left it out.
"""

import json
from collections.abc import Mapping
from typing import Literal, Self

import msgspec

from kvpilot_formats import dtypes
from kvpilot_formats.arguments import rules
from kvpilot_operator.api.part import Json, Part
from kvpilot_operator.api.pods import Cache, Engine, Model


class Pressure(Part, frozen=True):
    """spec.kvCache.pressure."""

    high_percent: int
    low_percent: int
    waiting_per_replica: int
    preemptions_per_minute: int
    sustained_seconds: int


class OffloadDisk(Part, frozen=True):
    """spec.kvCache.offload.disk; without a claim each pod has a volume of its own."""

    size_gib: int
    storage_class_name: str | None = None
    claim_name: str | None = None


class Offload(Part, frozen=True):
    """spec.kvCache.offload."""

    cpu_memory_gib: int
    disk: OffloadDisk | None = None


class Retention(Part, frozen=True):
    """spec.kvCache.retention; SinksAndWindow has the first two numbers, HeavyHitters the last and perhaps these."""

    policy: Literal["All", "SinksAndWindow", "HeavyHitters"]
    sink_tokens: int | None = None
    window_tokens: int | None = None
    budget_tokens: int | None = None


class KVCache(Part, frozen=True):
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
        return self.recent_tokens if dtypes.parse(dtype).has_ring else None


class Objective(Part, frozen=True):
    """One item of spec.scaling.objectives."""

    metric: Literal["TTFT", "ITL"]
    percentile: int
    milliseconds: int

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile}"


class Scaling(Part, frozen=True):
    """spec.scaling."""

    mode: Literal["Operator", "External"]
    min_replicas: int
    max_replicas: int
    scale_down_stabilization_seconds: int
    objectives: tuple[Objective, ...] = ()

    def clamp(self, replicas: int) -> int:
        """The nearest number of replicas within min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class CanaryStep(Part, frozen=True):
    """One item of spec.canary.steps."""

    weight_percent: int
    hold_seconds: int


class Canary(Part, frozen=True):
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


class Accuracy(Part, frozen=True):
    """spec.accuracy."""

    probe_sets: tuple[str, ...]
    max_excess_kl_millinats: int
    min_top1_agreement_percent: int
    failure_limit: int
    consecutive_error_limit: int
    period_seconds: int
    on_failure: Literal["Rollback", "Report"]


class Rollout(Part, frozen=True):
    """spec.rollout."""

    deny_seconds: int
    paused: bool


class Drain(Part, frozen=True):
    """spec.drain."""

    pre_stop_seconds: int
    timeout_seconds: int


class Port(Part, frozen=True):
    """A port of a Service."""

    number: int


class EndpointPickerRef(Part, frozen=True):
    """The endpoint picker of one pool, as an InferencePool has it."""

    name: str
    port: Port
    failure_mode: Literal["FailOpen", "FailClose"]


class InferencePool(Part, frozen=True):
    """spec.inferencePool."""

    endpoint_picker_ref: EndpointPickerRef | None = None
    canary_endpoint_picker_ref: EndpointPickerRef | None = None


class ParentRef(Part, frozen=True):
    """One item of spec.route.parentRefs: a Gateway, or one of its listeners."""

    name: str
    namespace: str | None = None
    section_name: str | None = None


class Route(Part, frozen=True):
    """spec.route."""

    parent_refs: tuple[ParentRef, ...]
    hostnames: tuple[str, ...] = ()


class Disruption(Part, frozen=True):
    """spec.disruption."""

    min_available: int


class Spec(Part, frozen=True):
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
        return self.kv_cache.offload is not None or self.engine.arguments.on(rules.OFFLOAD)

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
