"""The parts of a spec that determine its pods: spec.model, spec.engine and spec.cache."""

import math
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvpilot_formats.arguments import Arguments, read
from kvpilot_formats.arguments import rules as arguments
from kvpilot_operator.api.pod_template import POD_TEMPLATE
from kvpilot_operator.api.record import NAME, Count, Json, Key, Name, Quantity, Record, Rule, keyed_by, rules

ServedName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
"""Name of a model in requests."""
Revision = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")
]
"""Branch, tag or commit. Parts between slashes must not be empty or begin with a dot."""

# Parts of CEL's regular expressions for paths. No part of a path may be . or ..
_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
_STEP = "/([A-Za-z0-9_@+=-]|[.][A-Za-z0-9_@+=-]|[.][.][A-Za-z0-9._@+=-])[A-Za-z0-9._@+=-]*"
_HUB = f"hf://{_PART}"
_CLAIM = f"pvc://{NAME}({_STEP})*"
_FILE = f"file://({_STEP})+"
_IMAGE = "oci://[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9_][A-Za-z0-9._-]*)?(@sha256:[a-f0-9]{64})?"
_GPUS = "string(self.resources.limits['nvidia.com/gpu'])"
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_NO_GPUS = "!has(self.resources.limits) || !('nvidia.com/gpu' in self.resources.limits)"


class KeyRef(Record, frozen=True):
    """One key of a Secret or ConfigMap of the service's namespace."""

    name: Name
    """Name of the object."""
    key: Key
    """Key in the object."""


class TokenRef(KeyRef, frozen=True):
    """Secret of this namespace with an access token of the Hugging Face hub, for gated hf:// models. The engine gets
    the token as HF_TOKEN. If not set, kvpilot passes no token. A change starts a new revision."""

    key: Key = "token"
    """Key of the Secret that holds the access token."""


@rules(
    Rule(
        ".source",
        f"self.source.matches('^({_HUB}/{_PART}|{_CLAIM}|{_FILE})$')",
        "the source is not an adapter: use hf://ORG/ADAPTER, pvc://CLAIM/PATH or file:///PATH, without . and ..",
    )
)
class Adapter(Record, frozen=True):
    """One item of spec.model.adapters."""

    name: ServedName
    """Name of the adapter in requests, in place of the model's name."""
    source: Annotated[str, Meta(min_length=1, max_length=512)]
    """Place of the adapter: hf://ORG/ADAPTER (with an hf:// model), pvc://CLAIM/PATH or file:///PATH."""


@rules(
    # Attach the rule to the object, because the API server quotes a scalar's value, and this one may hold a password.
    Rule(
        ".source",
        f"self.source.matches('^({_HUB}(/{_PART})?|{_CLAIM}|{_IMAGE}|{_FILE})$')",
        "model.source is not a place that kvpilot reads: use hf://ORG/MODEL (revision in model.revision), "
        "pvc://CLAIM/PATH, oci://REGISTRY/REPOSITORY:TAG or file:///PATH, without spaces, parts . or .., or a "
        "slash at the end; copy a bucket to a claim, or mount it as one by its CSI driver",
    ),
    Rule(
        ".source",
        "self.source.startsWith('hf://') || !(has(self.tokenSecretRef) || has(self.revision) || "
        "self.adapters.exists(one, one.source.startsWith('hf://')))",
        "model.source is not on the hub, but tokenSecretRef, revision and adapters of hf:// are for models of the hub: "
        "remove them, take adapters from pvc:// or file://, or use an hf:// source",
    ),
)
class Model(Record, frozen=True):
    """The model to serve, and its name."""

    source: Annotated[str, Meta(min_length=1, max_length=512)]
    """Place of the weights: hf://ORG/MODEL (Hugging Face hub), pvc://CLAIM/PATH (a PersistentVolumeClaim of this
    namespace), oci://REGISTRY/REPOSITORY:TAG (an image mounted as a volume) or file:///PATH (in the engine's image). A
    change starts a new revision."""
    served_name: ServedName = ""
    """Name of the model in requests; the name of this object if not set. A change starts a new revision."""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=16, extra=keyed_by("name"))] = ()
    """LoRA adapters. Each is served under its own name, beside the model. An engine does not start if an adapter is
    broken. A change starts a new revision."""
    revision: Revision | None = None
    """Branch, tag or commit of an hf:// model; the hub's default branch if not set. Pin a commit, because two pods may
    otherwise load different weights. A change starts a new revision."""
    token_secret_ref: TokenRef | None = None
    max_model_len: Annotated[int, Meta(ge=16, le=16_777_216)] | None = None
    """Longest context, in tokens, prompt and answer together; the model's own if not set. The engine refuses to start
    if its KV cache cannot hold one request of this length. A change starts a new revision."""


class FieldRef(Record, frozen=True):
    """A field of the pod itself."""

    field_path: Literal[
        "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
        "status.hostIP", "status.podIP",
    ]  # fmt: skip
    """Path of the field."""


@rules(
    Rule(
        "",
        "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(given, given)",
        "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef: set one",
    )
)
class ValueFrom(Record, frozen=True):
    """Source of the value, in place of `value`: exactly one of secretKeyRef, configMapKeyRef and fieldRef."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret of this namespace."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap of this namespace."""
    field_ref: FieldRef | None = None


@rules(
    Rule(
        "",
        "!(has(self.value) && has(self.valueFrom))",
        "env {self.name} has both value and valueFrom: remove one of them",
    ),
    Rule(
        ".name",
        "!(self.name in ['KVPILOT_SERVE_HOST', 'KVPILOT_RECENT_TOKENS', 'VLLM_API_KEY', 'VLLM_PLUGINS', "
        "'VLLM_DP_RANK', 'VLLM_DP_RANK_LOCAL', 'VLLM_DP_SIZE', 'VLLM_DP_MASTER_IP', 'VLLM_DP_MASTER_PORT'])",
        "env {self.name} would hide the engine from kvpilot, make the pod only a part of an engine, or override "
        "spec.kvCache.recentTokens: remove it",
    ),
)
class EnvVar(Record, frozen=True):
    """One item of spec.engine.env. Set value or valueFrom, or neither for an empty value."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: Annotated[str, Meta(max_length=4096)] | None = None
    """Value of the variable. Kubernetes replaces $(NAME) with the value of an earlier variable NAME."""
    value_from: ValueFrom | None = None


class Resources(Record, frozen=True):
    """CPU, memory and accelerators of each engine pod. Accelerators such as nvidia.com/gpu go into limits."""

    requests: Annotated[dict[str, Quantity | Count], Meta(max_length=16)] = msgspec.field(default_factory=dict)
    """Amounts that the scheduler reserves, by resource name, as Kubernetes quantities. With N GPUs in limits, cpu
    defaults to 2 + N and memory to 4 + 4 N GiB (docs/pods.md). A request or limit replaces its default."""
    limits: Annotated[dict[str, Quantity | Count], Meta(max_length=16)] = msgspec.field(default_factory=dict)
    """Largest amounts that the pod may use, by resource name, as Kubernetes quantities."""


@rules(
    # Attach the rule to the object, because the API server quotes a scalar's value, and this one may hold a password.
    Rule(
        ".image",
        "!has(self.image) || !self.image.matches('[[:space:]]') && !self.image.contains('://') && "
        "self.image.matches('^[^@]*(@[a-z0-9+._-]+:[a-fA-F0-9]{32,})?$')",
        "engine.image is not an image reference: write it as REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST, without "
        "a scheme, spaces or credentials",
    ),
    Rule(
        ".resources.limits",
        f"{_NO_GPUS} || {_GPUS}.matches('^(-.*|[0-9]+([.]0+)?(k|[MGTPE]|[KMGTPE]i)?|[0-9]*000m|0{{1,2}}m)$')",
        "nvidia.com/gpu of resources.limits must be a whole number of GPUs: write it in digits alone, such as 1",
    ),
    # The second line of this rule accepts quantities that the rule above refuses. It also accepts numbers of six digits
    # or more: even in thousandths they exceed the largest tensorParallelSize (64), and int() may not take them.
    Rule(
        ".tensorParallelSize",
        f"{_NO_GPUS} || "
        f"{_GPUS}.matches('^(-|[0-9]+[.][0-9]*[1-9]|[0-9]*[1-9][0-9]{{0,2}}m|0*[1-9][0-9]{{5}})') || "
        f"({_GPUS}.matches('[kKMGTPE]') ? {_GPUS}.matches('^0*[1-9]') : "
        f"int({_GPUS}.find('^[0-9]+')) >= "
        f"(has(self.tensorParallelSize) ? self.tensorParallelSize : 1) * ({_GPUS}.matches('m$') ? 1000 : 1))",
        "tensorParallelSize is above the nvidia.com/gpu of resources.limits: raise the limit or lower it",
    ),
    # Skip engines with options that begin with p or d, because pipeline and data parallelism use more GPUs than
    # tensorParallelSize. The operator checks these engines itself.
    Rule(
        ".tensorParallelSize",
        f"!has(self.tensorParallelSize) || {_NO_GPUS} || !{_GPUS}.matches('^[0-9]{{1,5}}$') || "
        f"int({_GPUS}) <= self.tensorParallelSize || self.extraArgs.exists(a, a.matches('^--?[dp]'))",
        "tensorParallelSize is below the nvidia.com/gpu of resources.limits, so GPUs would idle: remove "
        "tensorParallelSize, whose default is the limit, or lower the limit",
    ),
)
class Engine(Record, frozen=True):
    """The vLLM engine and its pods. A change of any of its fields starts a new revision."""

    image: Annotated[str, Meta(min_length=1, max_length=512)] = ""
    """Image of kvpilot's runtime, whose entry point is kvpilot-serve. Pin a digest in production. If not set, the
    installation's image (engines.image of the chart). A change of that image reaches the services of a namespace one
    after another."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Number of GPUs of one node over which tensor parallelism spreads a replica. If not set, nvidia.com/gpu or
    amd.com/gpu of resources.limits, or else 1. It must divide the model's number of attention heads."""
    nodes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of nodes over which a replica is spread. With more than 1, a replica is a group of as many pods, with
    tensor parallelism within a node and pipeline parallelism across nodes. Each pod requests engine.resources. A
    LeaderWorkerSet creates the groups, so the cluster must have LeaderWorkerSet installed."""
    gpu_memory_utilization_percent: Annotated[int, Meta(ge=10, le=99)] = 90
    """Share of each GPU's memory, in percent, that the engine may take. The KV cache gets the part of it that weights
    and activations do not need. On a CPU it has no effect; set the KV cache there, in GiB, with VLLM_CPU_KVCACHE_SPACE
    in engine.env."""
    extra_args: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=64)] = ()
    """Further arguments for vllm serve, passed on unchanged. A list item is OPTION=VALUE, or option and value are two
    items. kvpilot refuses the following options in every spelling that vLLM accepts, and reports them in the condition
    Stalled: options that kvpilot sets itself; options that hide the engine from kvpilot (--api-key, --ssl-*,
    --root-path, --middleware, --grpc, --headless, --disable-log-stats, --api-server-count=0); options that spread one
    engine over several pods; --logprobs-mode, which changes what a probe measures; --hf-token, which holds a secret;
    --config; and options that contradict another field."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=64, extra=keyed_by("name"))] = ()
    """Environment variables of the engine container."""
    resources: Resources = Resources()
    startup_timeout_seconds: Annotated[int, Meta(ge=60, le=604_800)] = 7200
    """Seconds within which a started engine must answer, loading included. After that, the kubelet restarts it."""
    pod_template: Annotated[dict[str, Json], POD_TEMPLATE] = msgspec.field(default_factory=dict)
    """Other settings of the engine's pods, with the fields of a Pod's template: nodeSelector, affinity, tolerations,
    topologySpreadConstraints, serviceAccountName, sidecars, volumes and more. kvpilot merges it into its own template
    (strategic merge: containers, volumes and claims by name, volumeMounts by mountPath). It refuses fields that kvpilot
    or other fields of the spec set, and access to the node that its administrator does not allow (docs/pods.md)."""

    @property
    def gpu_limit(self) -> int:
        """Return the number of GPUs in a pod's limits; 0 without GPUs, or for a quantity with a suffix, such as 1k."""
        given = (str(self.resources.limits[name]) for name in _GPU_RESOURCES if name in self.resources.limits)
        found = re.fullmatch(r"([0-9]+)([.]0+|000m)?", next(given, ""))
        return int(found[1]) if found is not None else 0

    @property
    def groups(self) -> int:
        """Return the number of tensor-parallel groups in one pod: pipeline stages times engines in extra_args."""
        return math.prod(map(self.arguments.count, arguments.GROUPS_OF_GPUS))

    @property
    def tensor_parallel(self) -> int:
        """Return the size of tensor parallelism: the user's value, or else the size that uses all GPUs of the pod."""
        return self.tensor_parallel_size or max(1, self.gpu_limit // self.groups)

    @property
    def arguments(self) -> Arguments:
        """Return extra_args as vLLM parses them."""
        return read(self.extra_args)


class Claim(Record, frozen=True):
    """The PersistentVolumeClaim NAME-weights, which kvpilot creates for the weights of an hf:// model. It also holds
    compiled code unless compileClaimName is set. It is deleted with the service, but not if you remove this field. If
    not set, kvpilot creates no claim."""

    size: Annotated[str, Meta(min_length=2, max_length=9, pattern=r"^[1-9][0-9]{0,5}(M|G|T|Mi|Gi|Ti)$")]
    """Storage to request, a whole number with a unit, such as 200Gi. You may raise it if the storage class allows
    expansion, but never lower it. While one model replaces another, the claim must hold both."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Access mode of the claim. ReadWriteMany (a shared file system) lets replicas run on several nodes; the storage
    class must support it. ReadWriteOnce (a disk) keeps all pods of the service on one node."""
    storage_class_name: Name | None = None
    """StorageClass of the claim; the cluster's default if not set. An existing claim keeps its class."""


class Cache(Record, frozen=True):
    """PersistentVolumeClaims that keep weights and compiled code, so that a new pod does not download or compile them
    again. A change starts a new revision, except a change of a claim's size."""

    weights: Claim | None = None
    weights_claim_name: Name | None = None
    """PersistentVolumeClaim of this namespace that you created, for the weights of an hf:// model. If neither this
    field nor weights is set, every pod downloads the weights. Use a claim with ReadWriteMany for more than one
    replica."""
    compile_claim_name: Name | None = None
    """PersistentVolumeClaim of this namespace for compiled code: one archive for each image, kind of GPU and set of
    arguments. Engines execute its content, so let nobody else write to it. It may be the claim of weightsClaimName, if
    only engines write to that claim. If not set, only a claim that kvpilot creates (weights) keeps compiled code."""
