"""The spec of one QuantizedLLMService as frozen dataclasses, one field per field of the CRD.

Names are the CRD's in snake_case, and so are their meanings, units, defaults and limits: the CRD describes them, here
they only get types. A field is None exactly where the CRD gives it no default and the user left it out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvpilot_kernels import formats

Json = Any
"""A value as a JSON decoder returns it."""


@dataclass(frozen=True, slots=True)
class KeyRef:
    """One key of a Secret or ConfigMap of the service's namespace."""

    name: str
    key: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """spec.model; served_name falls back to the object's name."""

    source: str
    revision: str | None
    served_name: str
    token_secret_ref: KeyRef | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One item of spec.engine.env: a value, or the one place it comes from, or neither for an empty value."""

    name: str
    value: str | None
    secret_key_ref: KeyRef | None
    config_map_key_ref: KeyRef | None
    field_path: str | None


@dataclass(frozen=True, slots=True)
class Resources:
    """spec.engine.resources: (resource name, quantity) pairs sorted by name, quantities as text ("1", "24Gi")."""

    requests: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodeExpression:
    """One item of spec.engine.nodeAffinity."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopologySpread:
    """One item of spec.engine.topologySpread."""

    topology_key: str
    max_skew: int
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]


@dataclass(frozen=True, slots=True)
class Toleration:
    """One item of spec.engine.tolerations."""

    key: str | None
    operator: Literal["Equal", "Exists"]
    value: str | None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None
    toleration_seconds: int | None


@dataclass(frozen=True, slots=True)
class Engine:
    """spec.engine; image_pull_secrets are names, node_selector is (label, value) pairs sorted by label."""

    image: str
    image_pull_secrets: tuple[str, ...]
    tensor_parallel_size: int
    gpu_memory_utilization_percent: int
    extra_args: tuple[str, ...]
    env: tuple[EnvVar, ...]
    resources: Resources
    node_selector: tuple[tuple[str, str], ...]
    node_affinity: tuple[NodeExpression, ...]
    topology_spread: tuple[TopologySpread, ...]
    tolerations: tuple[Toleration, ...]
    shm_size_mib: int
    runtime_class_name: str | None
    priority_class_name: str | None
    service_account_name: str | None


@dataclass(frozen=True, slots=True)
class Cache:
    """spec.cache."""

    weights_claim_name: str | None
    compile_claim_name: str | None


@dataclass(frozen=True, slots=True)
class Pressure:
    """spec.kvCache.pressure."""

    high_percent: int
    low_percent: int
    waiting_per_replica: int
    preemptions_per_minute: int
    sustained_seconds: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """spec.kvCache; dtype is set exactly when mode is Fixed."""

    mode: Literal["Fixed", "Recommend", "Auto"]
    dtype: str | None
    baseline: str
    ladder: tuple[str, ...]
    skip_layers: tuple[str, ...]
    recent_tokens: int | None
    pressure: Pressure
    min_dwell_seconds: int

    def recent_tokens_of(self, dtype: str) -> int | None:
        """What is asked of an engine with this dtype; None where nothing is, or the dtype has no recent window."""
        return self.recent_tokens if formats.parse(dtype).has_ring else None


@dataclass(frozen=True, slots=True)
class Scaling:
    """spec.scaling."""

    mode: Literal["Operator", "External"]
    min_replicas: int
    max_replicas: int
    scale_down_stabilization_seconds: int

    def clamp(self, replicas: int) -> int:
        """The nearest number of replicas within min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """One item of spec.canary.steps."""

    weight_percent: int
    hold_seconds: int


@dataclass(frozen=True, slots=True)
class Canary:
    """spec.canary; route_ref is its name."""

    capacity_policy: Literal["Surge", "ReplaceOne", "SurgeOrReplaceOne"]
    steps: tuple[CanaryStep, ...]
    route_ref: str | None
    warm_up_seconds: int
    min_requests: int
    max_ttft_p95_regression_percent: int
    max_itl_p95_regression_percent: int
    max_throughput_regression_percent: int
    max_error_increase_percent: int
    progress_deadline_seconds: int


@dataclass(frozen=True, slots=True)
class Accuracy:
    """spec.accuracy."""

    probe_sets: tuple[str, ...]
    max_excess_kl_millinats: int
    min_top1_agreement_percent: int
    failure_limit: int
    consecutive_error_limit: int
    period_seconds: int
    on_failure: Literal["Rollback", "Report"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """spec.rollout."""

    deny_seconds: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """spec.drain."""

    pre_stop_seconds: int
    timeout_seconds: int


@dataclass(frozen=True, slots=True)
class Disruption:
    """spec.disruption."""

    min_available: int


@dataclass(frozen=True, slots=True)
class Spec:
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


def parse(obj: Mapping[str, Json]) -> Spec:
    """Read the spec of a QuantizedLLMService.

    `obj` is the whole object as JSON, after schema.apply_defaults and without schema.faults; anything else may raise
    KeyError or TypeError.
    """
    spec = obj["spec"]
    engine, resources, canary = spec["engine"], spec["engine"]["resources"], spec["canary"]
    flat = {
        **spec,
        "model": {"servedName": obj["metadata"]["name"], **spec["model"]},
        "engine": {
            **engine,
            "imagePullSecrets": [secret["name"] for secret in engine["imagePullSecrets"]],
            "env": [_env_var(variable) for variable in engine["env"]],
            "resources": {kind: _pairs(resources.get(kind, {})) for kind in ("requests", "limits")},
            "nodeSelector": _pairs(engine["nodeSelector"]),
        },
        "canary": {**canary, "routeRef": canary.get("routeRef", {}).get("name")},
    }
    parsed: Spec = _reader(Spec)(flat)
    return parsed


_WORDS = {"kl": "KL", "ttft": "TTFT", "itl": "ITL", "mib": "MiB"}


@cache
def camel(name: str) -> str:
    """The CRD's name of a field."""
    head, *rest = name.split("_")
    return head + "".join(_WORDS.get(part, part.capitalize()) for part in rest)


@cache
def _reader(kind: Any) -> Callable[[Json], Any]:
    """Reads a JSON value as `kind`: a dataclass by its fields' names in the CRD, a list as a tuple."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = [(name, camel(name), _reader(hint), NoneType in get_args(hint)) for name, hint in hints.items()]
        return lambda value: kind(
            **{name: read(value.get(key)) for name, key, read, may in fields if may or key in value}
        )
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return lambda value: tuple(map(item, value))
    if NoneType in get_args(kind):
        given = _reader(get_args(kind)[0])
        return lambda value: None if value is None else given(value)
    return lambda value: value


def _env_var(variable: Mapping[str, Json]) -> dict[str, Json]:
    source = variable.get("valueFrom", {})
    return {**variable, **source, "fieldPath": source.get("fieldRef", {}).get("fieldPath")}


def _pairs(mapping: Mapping[str, Json]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in sorted(mapping.items())]
