"""The spec of one QuantizedLLMService as a frozen struct, and the CEL rules that involve several of its parts.

The parts are in other modules of this package. `make generate` writes the CRD from all of them (see `record`).
"""

from collections.abc import Mapping

import msgspec

from kvpilot_formats.arguments import rules as arguments
from kvpilot_operator.api.gateways import InferencePool
from kvpilot_operator.api.kv_cache import KVCache
from kvpilot_operator.api.pods import Cache, Engine, Model
from kvpilot_operator.api.record import Json, Record, Rule, Thousand, rules
from kvpilot_operator.api.rollout import Accuracy, Canary, Rollout
from kvpilot_operator.api.scaling import Disruption, Drain, Scaling

RULES_OF_SERVICE = (
    Rule(
        ".metadata.name",
        "size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name becomes the name of a Service and of other objects: use at most 40 lower-case letters, "
        "digits and dashes, start with a letter and end with a letter or digit",
    ),
    Rule(
        ".spec.model.adapters",
        "!has(self.spec.model.adapters) || self.spec.model.adapters.all(one, one.name != "
        "(has(self.spec.model.servedName) ? self.spec.model.servedName : self.metadata.name))",
        "an adapter has the name under which the model itself is served: use another name",
    ),
)
"""CEL rules about the whole object."""


# Rules about fields with the default {} are here, because the API server checks {} before it fills in the nested
# defaults.
@rules(
    Rule(
        ".kvCache.dtype",
        "(self.kvCache.mode == 'Fixed') == has(self.kvCache.dtype)",
        "kvCache.mode {self.kvCache.mode} and kvCache.dtype do not match: set dtype only with mode Fixed; with other "
        "modes remove it, and list the allowed dtypes in kvCache.ladder",
    ),
    Rule(
        ".kvCache.dtype",
        "!has(self.kvCache.dtype) || !(self.kvCache.dtype in ['mla8', 'mla4']) || !has(self.kvCache.offload)",
        "kvCache.dtype {self.kvCache.dtype} cannot be offloaded to host memory: remove kvCache.offload, or use fp8",
    ),
    Rule(
        ".kvCache.startDtype",
        "!has(self.kvCache.startDtype) || "
        "(self.kvCache.mode != 'Fixed' && self.kvCache.ladder.exists(step, step == self.kvCache.startDtype))",
        "kvCache.startDtype {self.kvCache.startDtype} must be a step of kvCache.ladder, and mode must be Auto or "
        "Recommend: add it to the ladder, or remove startDtype; with mode Fixed set dtype instead",
    ),
    *(
        Rule(
            f".{field}",
            f"!({given}self.{field} in ['bfloat16', 'float16']) || "
            "(self.engine.extraArgs.exists_one(a, a.matches('^--dt')) && "
            f"self.engine.extraArgs.exists(a, a == '--dtype=' + self.{field}))",
            f"{field} {{self.{field}}} gives wrong answers with a model of another dtype: use auto, which follows the "
            "model, or add --dtype with the same name to engine.extraArgs, as one item",
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
        "cache.weights and cache.weightsClaimName keep downloads of hf:// models, but model.source downloads nothing: "
        "remove cache.weights and cache.weightsClaimName, or use an hf:// source",
    ),
    Rule(
        ".cache.weights",
        "!has(self.cache.weights) || !has(self.cache.weightsClaimName)",
        "cache.weights creates a claim, but cache.weightsClaimName names an existing one: remove one of them",
    ),
    Rule(
        ".cache.weights.accessMode",
        "!has(self.cache.weights) || self.cache.weights.accessMode != 'ReadWriteOnce' || "
        "!has(self.engine.podTemplate.spec) || !has(self.engine.podTemplate.spec.topologySpreadConstraints) || "
        "!self.engine.podTemplate.spec.topologySpreadConstraints.exists(s, "
        "s.topologyKey == 'kubernetes.io/hostname' && s.whenUnsatisfiable == 'DoNotSchedule')",
        "cache.weights.accessMode ReadWriteOnce keeps all replicas on one node, but topologySpreadConstraints of "
        "engine.podTemplate spread them over nodes: use ReadWriteMany and a class that supports "
        "it, or remove kubernetes.io/hostname from the constraints",
    ),
    Rule(
        ".engine.nodes",
        "self.engine.nodes == 1 || !(has(self.kvCache.offload) || "
        "(has(self.cache.weights) && self.cache.weights.accessMode == 'ReadWriteOnce'))",
        "engine.nodes spreads each replica over several nodes, but kvCache.offload and "
        "cache.weights.accessMode ReadWriteOnce need replicas on one node: remove them (use ReadWriteMany), or set "
        "engine.nodes to 1",
    ),
    Rule(
        ".engine.env",
        "self.engine.env.all(e, !(e.name == 'HF_TOKEN' && has(self.model.tokenSecretRef)) && "
        "!(e.name == 'HF_HOME' && (has(self.cache.weights) || has(self.cache.weightsClaimName))) && "
        "!(e.name == 'VLLM_CACHE_ROOT' && has(self.cache.compileClaimName)))",
        "engine.env sets HF_TOKEN, HF_HOME or VLLM_CACHE_ROOT, but model.tokenSecretRef, cache.weights (or "
        "cache.weightsClaimName) or cache.compileClaimName does so too: remove one of them",
    ),
    Rule(
        ".inferencePool.canaryEndpointPickerRef",
        "!has(self.inferencePool) || !has(self.inferencePool.endpointPickerRef) || "
        "has(self.inferencePool.canaryEndpointPickerRef) || !has(self.canary.routeRef)",
        "inferencePool.canaryEndpointPickerRef is missing, but with canary.routeRef a canary has its own pool: name "
        "that pool's endpoint picker, or remove routeRef, so that a canary's share is its share of the replicas",
    ),
)
class Spec(Record, frozen=True):
    """Desired state of the service. Only model and engine are required. The operator accepts at most 128 KiB of
    JSON."""

    model: Model
    engine: Engine
    replicas: Thousand = 1
    """Number of engine replicas. kvpilot limits it to scaling.minReplicas and scaling.maxReplicas. You set it, or
    /scale does (kubectl scale, a HorizontalPodAutoscaler, KEDA). If an autoscaler sets it, leave it out of manifests
    that you apply repeatedly. A change takes effect at once, without a restart."""
    cache: Cache = Cache()
    kv_cache: KVCache = KVCache()
    scaling: Scaling = Scaling()
    canary: Canary = Canary()
    accuracy: Accuracy = Accuracy()
    rollout: Rollout = Rollout()
    drain: Drain = Drain()
    disruption: Disruption = Disruption()
    inference_pool: InferencePool | None = None

    @property
    def offloads(self) -> bool:
        """Return True if engines offload KV blocks to host memory."""
        return self.kv_cache.offload is not None or self.engine.arguments.on(arguments.OFFLOAD)

    @property
    def connector(self) -> str:
        """Return vLLM's name of the engines' KV connector; empty without a connector."""
        moves = self.engine.arguments.mapping(arguments.TRANSFER)
        return "OffloadingConnector" if self.offloads else str(moves.get("kv_connector") or "")


def parse(obj: Mapping[str, Json]) -> Spec:
    """Return the spec of a QuantizedLLMService, with defaults filled in.

    Raise msgspec.ValidationError, which names the field, if a value has the wrong type or is beyond its limits.
    """
    # Accept 3.0 as a whole number (strict=False), as the API server does.
    spec = msgspec.convert({"spec": obj.get("spec")}, _Service, strict=False).spec
    if spec.model.served_name:
        return spec
    model = msgspec.structs.replace(spec.model, served_name=obj["metadata"]["name"])
    return msgspec.structs.replace(spec, model=model)


class _Service(Record, frozen=True):
    spec: Spec
