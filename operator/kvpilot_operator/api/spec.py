"""The spec of one QuantizedLLMService as frozen dataclasses, one field per field of the CRD.

Names are the CRD's in snake_case, and so are their meanings, units, defaults and limits: the CRD describes them, here
they only get types. A field is None exactly where the CRD gives it no default and the user left it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    kv_cache, scaling, canary, accuracy = spec["kvCache"], spec["scaling"], spec["canary"], spec["accuracy"]
    pressure = kv_cache["pressure"]
    return Spec(
        replicas=spec["replicas"],
        model=_model(spec["model"], obj["metadata"]["name"]),
        engine=_engine(spec["engine"]),
        cache=Cache(spec["cache"].get("weightsClaimName"), spec["cache"].get("compileClaimName")),
        kv_cache=KVCache(
            mode=kv_cache["mode"],
            dtype=kv_cache.get("dtype"),
            baseline=kv_cache["baseline"],
            ladder=tuple(kv_cache["ladder"]),
            skip_layers=tuple(kv_cache["skipLayers"]),
            recent_tokens=kv_cache.get("recentTokens"),
            pressure=Pressure(
                high_percent=pressure["highPercent"],
                low_percent=pressure["lowPercent"],
                waiting_per_replica=pressure["waitingPerReplica"],
                preemptions_per_minute=pressure["preemptionsPerMinute"],
                sustained_seconds=pressure["sustainedSeconds"],
            ),
            min_dwell_seconds=kv_cache["minDwellSeconds"],
        ),
        scaling=Scaling(
            mode=scaling["mode"],
            min_replicas=scaling["minReplicas"],
            max_replicas=scaling["maxReplicas"],
            scale_down_stabilization_seconds=scaling["scaleDownStabilizationSeconds"],
        ),
        canary=Canary(
            capacity_policy=canary["capacityPolicy"],
            steps=tuple(CanaryStep(step["weightPercent"], step["holdSeconds"]) for step in canary["steps"]),
            route_ref=canary.get("routeRef", {}).get("name"),
            warm_up_seconds=canary["warmUpSeconds"],
            min_requests=canary["minRequests"],
            max_ttft_p95_regression_percent=canary["maxTTFTP95RegressionPercent"],
            max_itl_p95_regression_percent=canary["maxITLP95RegressionPercent"],
            max_throughput_regression_percent=canary["maxThroughputRegressionPercent"],
            max_error_increase_percent=canary["maxErrorIncreasePercent"],
            progress_deadline_seconds=canary["progressDeadlineSeconds"],
        ),
        accuracy=Accuracy(
            probe_sets=tuple(accuracy["probeSets"]),
            max_excess_kl_millinats=accuracy["maxExcessKLMillinats"],
            min_top1_agreement_percent=accuracy["minTop1AgreementPercent"],
            failure_limit=accuracy["failureLimit"],
            consecutive_error_limit=accuracy["consecutiveErrorLimit"],
            period_seconds=accuracy["periodSeconds"],
            on_failure=accuracy["onFailure"],
        ),
        rollout=Rollout(deny_seconds=spec["rollout"]["denySeconds"], paused=spec["rollout"]["paused"]),
        drain=Drain(spec["drain"]["preStopSeconds"], spec["drain"]["timeoutSeconds"]),
        disruption=Disruption(spec["disruption"]["minAvailable"]),
    )


def _model(model: Mapping[str, Json], object_name: str) -> Model:
    return Model(
        source=model["source"],
        revision=model.get("revision"),
        served_name=model.get("servedName", object_name),
        token_secret_ref=_key_ref(model.get("tokenSecretRef")),
        max_model_len=model.get("maxModelLen"),
    )


def _engine(engine: Mapping[str, Json]) -> Engine:
    resources = engine["resources"]
    return Engine(
        image=engine["image"],
        image_pull_secrets=tuple(secret["name"] for secret in engine["imagePullSecrets"]),
        tensor_parallel_size=engine["tensorParallelSize"],
        gpu_memory_utilization_percent=engine["gpuMemoryUtilizationPercent"],
        extra_args=tuple(engine["extraArgs"]),
        env=tuple(_env_var(variable) for variable in engine["env"]),
        resources=Resources(_pairs(resources.get("requests", {})), _pairs(resources.get("limits", {}))),
        node_selector=_pairs(engine["nodeSelector"]),
        node_affinity=tuple(
            NodeExpression(e["key"], e["operator"], tuple(e["values"])) for e in engine["nodeAffinity"]
        ),
        topology_spread=tuple(
            TopologySpread(t["topologyKey"], t["maxSkew"], t["whenUnsatisfiable"]) for t in engine["topologySpread"]
        ),
        tolerations=tuple(_toleration(toleration) for toleration in engine["tolerations"]),
        shm_size_mib=engine["shmSizeMiB"],
        runtime_class_name=engine.get("runtimeClassName"),
        priority_class_name=engine.get("priorityClassName"),
        service_account_name=engine.get("serviceAccountName"),
    )


def _env_var(variable: Mapping[str, Json]) -> EnvVar:
    source = variable.get("valueFrom", {})
    return EnvVar(
        name=variable["name"],
        value=variable.get("value"),
        secret_key_ref=_key_ref(source.get("secretKeyRef")),
        config_map_key_ref=_key_ref(source.get("configMapKeyRef")),
        field_path=source.get("fieldRef", {}).get("fieldPath"),
    )


def _toleration(toleration: Mapping[str, Json]) -> Toleration:
    return Toleration(
        key=toleration.get("key"),
        operator=toleration["operator"],
        value=toleration.get("value"),
        effect=toleration.get("effect"),
        toleration_seconds=toleration.get("tolerationSeconds"),
    )


def _key_ref(ref: Mapping[str, Json] | None) -> KeyRef | None:
    return None if ref is None else KeyRef(ref["name"], ref["key"], ref.get("optional", False))


def _pairs(mapping: Mapping[str, Json]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in sorted(mapping.items()))
