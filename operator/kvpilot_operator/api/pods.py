"""What of a service's spec its pods are made of: spec.model, spec.engine and spec.cache.

Names, meanings, units, defaults and limits are the CRD's, as in `spec`.
"""

from typing import Literal

from kvpilot_formats.arguments import Arguments, read
from kvpilot_operator.api.part import Part


class KeyRef(Part, frozen=True):
    """One key of a Secret or ConfigMap of the service's namespace."""

    name: str
    key: str
    optional: bool = False


class Adapter(Part, frozen=True):
    """One item of spec.model.adapters."""

    name: str
    source: str


class Model(Part, frozen=True):
    """spec.model; served_name falls back to the object's name."""

    source: str
    served_name: str
    adapters: tuple[Adapter, ...] = ()
    revision: str | None = None
    token_secret_ref: KeyRef | None = None
    max_model_len: int | None = None


class FieldRef(Part, frozen=True):
    """A field of the pod."""

    field_path: str


class ValueFrom(Part, frozen=True):
    """The one place that a variable's value comes from."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(Part, frozen=True):
    """One item of spec.engine.env: a value, or the one place it comes from, or neither for an empty value."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Resources(Part, frozen=True):
    """spec.engine.resources: (resource name, quantity) pairs sorted by name, quantities as text ("1", "24Gi")."""

    requests: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, str], ...]


class NodeExpression(Part, frozen=True):
    """One item of spec.engine.nodeAffinity."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...] = ()


class TopologySpread(Part, frozen=True):
    """One item of spec.engine.topologySpread."""

    topology_key: str
    max_skew: int
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]


class Toleration(Part, frozen=True):
    """One item of spec.engine.tolerations."""

    operator: Literal["Equal", "Exists"]
    key: str | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Engine(Part, frozen=True):
    """spec.engine; image_pull_secrets are names, node_selector is (label, value) pairs sorted by label.

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

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.nodes

    @property
    def arguments(self) -> Arguments:
        """extra_args as vLLM reads them."""
        return read(self.extra_args)


class Claim(Part, frozen=True):
    """spec.cache.weights; size is a quantity of storage, as text."""

    size: str
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"]
    storage_class_name: str | None = None


class Cache(Part, frozen=True):
    """spec.cache; of weights and weights_claim_name one is set at most."""

    prefetch: bool
    weights: Claim | None = None
    weights_claim_name: str | None = None
    compile_claim_name: str | None = None

    @property
    def on_one_node(self) -> bool:
        """Whether pods can share the weights' claim on one node alone."""
        return self.weights is not None and self.weights.access_mode == "ReadWriteOnce"
