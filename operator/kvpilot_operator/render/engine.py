"""Render the pod template of one revision: the engine with its arguments, resources, volumes, probes and drain."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_formats import dtypes
from kvpilot_operator.api import names
from kvpilot_operator.api.pod_template import KEYS
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render import workloads

# The user of docker/runtime.Dockerfile. Its group owns the files on PersistentVolumeClaims.
ENGINE_USER = 65532
_WEIGHTS_PATH = "/models"
_ADAPTERS_PATH = "/adapters"
_COMPILE_PATH = "/compile-cache"
# Variable by which kvpilot-serve learns the folder for archives of compiled code.
COMPILED = "KVPILOT_COMPILED"


def pod_template(service: str, spec: Spec, dtype: str, *, assigned_user: bool = False) -> dict[str, Any]:
    """Return the template of the pods that take requests, with engines of this KV dtype. A label names the revision.

    With `assigned_user` the template sets no user and no group, because the cluster assigns them by namespace.
    """
    template: dict[str, Any] = {
        "metadata": {
            "labels": {
                **names.owned_labels(service),
                names.DTYPE_LABEL: dtype,
                **({names.GROUP_LABEL: service} if spec.engine.nodes > 1 else {}),
                **claim_label(service, spec),
            }
        },
        "spec": {**_pod_spec(service, spec, dtype), "securityContext": _security_context(assigned_user)},
    }
    template = strategic_merge(template, copy.deepcopy(spec.engine.pod_template))
    _fill_in(template["spec"], service, spec)
    whole = template if spec.engine.nodes == 1 else [template, workloads.worker_template(template)]
    content = json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()
    template["metadata"]["labels"][names.REVISION_LABEL] = hashlib.sha256(content).hexdigest()[:8]
    return template


def revision(template: dict[str, Any]) -> str:
    """Return the revision that a pod template is labelled with."""
    label: str = template["metadata"]["labels"][names.REVISION_LABEL]
    return label


def claim_label(service: str, spec: Spec) -> dict[str, str]:
    """Return the label of pods that must share a node, because one node's disk holds their weights; {} otherwise."""
    weights = spec.cache.weights
    shared = weights is not None and weights.access_mode == "ReadWriteOnce"
    return {names.CLAIM_LABEL: names.weights_claim(service)} if shared else {}


def _pod_spec(service: str, spec: Spec, dtype: str) -> dict[str, Any]:
    engine, drain = spec.engine, spec.drain
    volumes, mounts = _volumes(service, spec)
    container: dict[str, Any] = {
        "name": names.ENGINE_CONTAINER,
        "image": engine.image,
        "command": ["kvpilot-serve"],
        "args": _arguments(spec, dtype),
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": names.ENGINE_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": _health(5, 5, -(-engine.startup_timeout_seconds // 5)),
        "readinessProbe": _health(5, 5, 3),
        # A busy engine may answer /health late, so restart it only after two minutes of silence.
        "livenessProbe": _health(15, 10, 8),
        # The pod leaves the Service first. Then the engine finishes its requests (--shutdown-timeout).
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(drain.pre_stop_seconds)]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    container["resources"] = {kind: amounts for kind, amounts in _resources(spec).items() if amounts}
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": drain.pre_stop_seconds + drain.timeout_seconds + 10,
        "enableServiceLinks": False,
    }
    return pod


def _resources(spec: Spec) -> dict[str, dict[str, str]]:
    """Return the container's resources.

    The spec's resources come first. An engine on GPUs also gets CPU and memory requests, unless the spec sets them.
    Host memory for offloaded blocks is added.
    """
    asked = spec.engine.resources
    requests, limits = ({name: str(n) for name, n in given.items()} for given in (asked.requests, asked.limits))
    if gpus := spec.engine.gpu_limit:
        # One core for each process of vLLM: API server, engine core and a worker for each GPU. 4 GiB for each worker,
        # and 4 GiB for the other two processes together.
        for name, amount in (("cpu", f"{2 + gpus}"), ("memory", f"{4 + 4 * gpus}Gi")):
            if name not in limits:
                requests.setdefault(name, amount)
    if spec.kv_cache.offload is not None:
        more = spec.kv_cache.offload.cpu_memory_gib
        for amounts in (requests, limits):
            if "memory" in amounts:
                amounts["memory"] = _grown(amounts["memory"], more)
        if "memory" not in limits:  # Kubernetes takes a limit as the request if there is none
            requests.setdefault("memory", f"{more}Gi")
    return {"requests": requests, "limits": limits}


def _grown(quantity: str, gib: int) -> str:
    """Return a quantity of memory plus `gib` GiB, in the largest unit (GiB, MiB or bytes) that gives a whole number."""
    # Import it here, because it loads the whole client in 0.15 s, and `kvpilot plan` does not need that.
    from kubernetes.utils.quantity import parse_quantity

    size = math.ceil(parse_quantity(quantity)) + gib * 2**30
    unit, suffix = next(((n, s) for n, s in ((2**30, "Gi"), (2**20, "Mi")) if size % n == 0), (1, ""))
    return f"{size // unit}{suffix}"


def _health(period: int, timeout: int, failures: int) -> dict[str, Any]:
    asked = {"path": "/health", "port": "http"}
    return {"httpGet": asked, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}


def _security_context(assigned_user: bool) -> dict[str, Any]:
    """Return a pod's security context for Pod Security "restricted". Set our user unless the cluster assigns one."""
    own = {"runAsUser": ENGINE_USER, "runAsGroup": ENGINE_USER, "fsGroup": ENGINE_USER}
    return {
        "runAsNonRoot": True,
        **({} if assigned_user else own),
        # Without OnRootMismatch, the kubelet would change the group of every file on a claim at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _fill_in(pod: dict[str, Any], service: str, spec: Spec) -> None:
    """Complete a pod with fields that depend on the merged podTemplate."""
    # Engines never call the API server. But the cloud identity of a ServiceAccount that the user names needs the token.
    pod["automountServiceAccountToken"] = "serviceAccountName" in pod
    if pod.get("hostNetwork"):
        # By default, a pod on the node's network uses the node's DNS, which does not resolve Services.
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    for spread in pod.get("topologySpreadConstraints", ()):
        spread.setdefault("labelSelector", {"matchLabels": {names.SERVICE_LABEL: service}})
    if shared := claim_label(service, spec):
        # A disk is attached to one node, so all pods that use it must run there. The first pod may go to any node.
        beside = {"labelSelector": {"matchLabels": shared}, "topologyKey": "kubernetes.io/hostname"}
        affinity = pod.setdefault("affinity", {}).setdefault("podAffinity", {})
        affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(beside)
    if spec.kv_cache.offload is not None:
        # vLLM keeps offloaded blocks in /dev/shm, so enlarge that volume by their size.
        shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
        shm["sizeLimit"] = _grown(str(shm["sizeLimit"]), spec.kv_cache.offload.cpu_memory_gib)


def strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `patch` over `base` as `kubectl patch` does: maps by key, some lists by a key of their items.

    An empty list changes nothing. The API's schema allows no patch directives such as `$patch: delete`.
    """
    merged = dict(base)
    for field, value in patch.items():
        there = base.get(field)
        if isinstance(value, Mapping):
            merged[field] = strategic_merge(there, value) if isinstance(there, Mapping) else dict(value)
        elif isinstance(value, list) and field in KEYS:
            if value:
                merged[field] = _merged_items(there or (), value, KEYS[field])
        else:
            merged[field] = value
    return merged


def _merged_items(base: Sequence[Any], patch: Sequence[Any], key: str) -> list[Any]:
    items = {item[key]: item for item in base}
    for item in patch:
        items[item[key]] = strategic_merge(items.get(item[key], {}), item)
    return list(items.values())


def _arguments(spec: Spec, dtype: str) -> list[str]:
    model, engine = spec.model, spec.engine
    arguments = [
        f"--model={model_location(spec)}",
        f"--served-model-name={model.served_name}",
        f"--kv-cache-dtype={dtype}",
        f"--port={names.ENGINE_PORT}",
        f"--tensor-parallel-size={engine.tensor_parallel}",
        f"--gpu-memory-utilization={engine.gpu_memory_utilization_percent / 100:.2f}",
        f"--shutdown-timeout={spec.drain.timeout_seconds}",
    ]
    if model.max_model_len is not None:
        arguments.append(f"--max-model-len={model.max_model_len}")
    if model.revision is not None and model.source.startswith("hf://"):
        arguments.append(f"--revision={model.revision}")
    stored = dtypes.parse(dtype)
    # Drop the default name sliding_window for latent dtypes: latent layers have no window, and the engine refuses it.
    skipped = [layer for layer in spec.kv_cache.skip_layers if not stored.latent or layer != "sliding_window"]
    if skipped and stored.bits_per_element() < 16:
        arguments.append(f"--kv-cache-dtype-skip-layers={','.join(skipped)}")
    recent = spec.kv_cache.recent_tokens_of(dtype)
    if recent is not None:
        arguments.append(f"--recent-tokens={recent}")
    if spec.kv_cache.offload is not None:
        arguments.append(f"--kv-offloading-size={spec.kv_cache.offload.cpu_memory_gib}")
    return [*arguments, *workloads.group_arguments(engine.nodes), *_adapters(spec), *engine.extra_args]


def _adapters(spec: Spec) -> list[str]:
    """Return the arguments that load the adapters. Unless extraArgs limits it, one engine step may use all adapters."""
    if not spec.model.adapters:
        return []
    modules = []
    for one in spec.model.adapters:
        scheme, _, rest = one.source.partition("://")
        modules.append(f"{one.name}={_ADAPTERS_PATH}/{rest}" if scheme == "pvc" else f"{one.name}={rest}")
    return [names.ADAPTERS_OPTION, *modules, "--enable-lora", f"--max-loras={len(modules)}"]


def model_location(spec: Spec) -> str:
    """Return the model's location in the form that the engine accepts: a hub id, or a path inside the pod."""
    scheme, _, rest = spec.model.source.partition("://")
    if scheme == "hf":
        return rest
    if scheme == "pvc":
        return f"{_WEIGHTS_PATH}/{rest.partition('/')[2]}".rstrip("/")
    if scheme == "oci":
        return _WEIGHTS_PATH
    return rest


def _environment(spec: Spec) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = []
    if spec.model.token_secret_ref is not None:
        token = {"name": spec.model.token_secret_ref.name, "key": spec.model.token_secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    hub = spec.model.source.startswith("hf://")
    if (spec.cache.weights or spec.cache.weights_claim_name) and hub:
        env.append({"name": "HF_HOME", "value": _WEIGHTS_PATH})
    compiled = f"{_WEIGHTS_PATH}/kvpilot-compiled" if spec.cache.weights and hub else ""
    # A user's own PersistentVolumeClaim for weights never holds compiled code: every engine that shares the claim would
    # run the code.
    if spec.cache.compile_claim_name:
        compiled = _COMPILE_PATH
    if compiled and all(one.name != COMPILED for one in spec.engine.env):
        env.append({"name": COMPILED, "value": compiled})
    empty = {"value": ""}
    return [*env, *((empty if one.value_from is None else {}) | one.as_written() for one in spec.engine.env)]


def _volumes(service: str, spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # Tensor parallel workers communicate through /dev/shm; the container's default of 64 MiB is too small.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    scheme, _, rest = spec.model.source.partition("://")
    if scheme == "pvc":
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": rest.partition("/")[0]}})
        mounts.append({"name": "model", "mountPath": _WEIGHTS_PATH, "readOnly": True})
    elif scheme == "oci":
        volumes.append({"name": "model", "image": {"reference": rest, "pullPolicy": "IfNotPresent"}})
        mounts.append({"name": "model", "mountPath": _WEIGHTS_PATH, "readOnly": True})
    elif scheme == "hf" and (spec.cache.weights or spec.cache.weights_claim_name):
        claim = spec.cache.weights_claim_name or names.weights_claim(service)
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "model", "mountPath": _WEIGHTS_PATH})
    sources = (one.source for one in spec.model.adapters if one.source.startswith("pvc://"))
    for index, claim in enumerate(sorted({source.removeprefix("pvc://").partition("/")[0] for source in sources})):
        name = f"adapters-{index}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": f"{_ADAPTERS_PATH}/{claim}", "readOnly": True})
    if spec.cache.compile_claim_name:
        volumes.append({"name": "compile", "persistentVolumeClaim": {"claimName": spec.cache.compile_claim_name}})
        mounts.append({"name": "compile", "mountPath": _COMPILE_PATH})
    return volumes, mounts
