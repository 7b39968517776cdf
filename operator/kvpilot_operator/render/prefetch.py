"""Render the Job that fills the PersistentVolumeClaim for weights before engines start.

The Job's pod resembles an engine's pod, but has no GPU.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvpilot_operator.api import names
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.engine import COMPILED, claim_label, model_location, pod_template
from kvpilot_operator.render.objects import owned
from kvpilot_operator.state.snapshot import ServiceKey

# Retry practically for ever, because the user may remove the cause (a missing token, a blocked network) at any time.
_ATTEMPTS = 1_000_000
_RESOURCES = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}
# Hide the GPUs, because some runtime classes give every container all GPUs of a node by default.
_NO_GPU = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
_ENGINES_ALONE = (
    "containers", "initContainers", "resourceClaims", "topologySpreadConstraints", "hostIPC", "hostNetwork", "hostPID",
    "dnsPolicy", "terminationGracePeriodSeconds",
)  # fmt: skip
_COPIED = ("image", "imagePullPolicy", "securityContext")


def claim_name(service: str, spec: Spec) -> str:
    """Return the name of the PersistentVolumeClaim that the Job fills."""
    return spec.cache.weights_claim_name or names.weights_claim(service)


def identity(service: str, spec: Spec) -> str:
    """Return a hash (8 hex digits) of the claim and its content. If the hash changes, the claim is filled again."""
    content = json.dumps([claim_name(service, spec), *_arguments(spec)]).encode()
    return hashlib.sha256(content).hexdigest()[:8]


def job(key: ServiceKey, uid: str, spec: Spec, *, assigned_user: bool) -> dict[str, Any]:
    """Return the prefetch Job. Its pod has the engines' placement, user, variables, volumes and secrets, but no GPU."""
    template = pod_template(key.name, spec, spec.kv_cache.baseline, assigned_user=assigned_user)
    engine = next(one for one in template["spec"]["containers"] if one["name"] == names.ENGINE_CONTAINER)
    metadata = template["metadata"]
    labels = {name: value for name, value in metadata["labels"].items() if name not in names.OWN_LABELS}
    ours = {
        "app.kubernetes.io/name": "kvpilot-prefetch",
        "app.kubernetes.io/instance": key.name,
        "app.kubernetes.io/managed-by": "kvpilot",
        # Do not set the service's label, or a Service would select this pod.
        names.PREFETCH_LABEL: key.name,
        **claim_label(key.name, spec),
    }
    container = {
        "name": names.PREFETCH_CONTAINER,
        **{field: engine[field] for field in _COPIED if field in engine},
        "command": ["kvpilot-prefetch"],
        "args": [*_arguments(spec), f"--port={names.ENGINE_PORT}"],
        "env": [
            *([] if any(one["name"] == _NO_GPU["name"] for one in engine["env"]) else [_NO_GPU]),
            *(one for one in engine["env"] if one["name"] != COMPILED),
        ],
        "ports": [{"name": "http", "containerPort": names.ENGINE_PORT, "protocol": "TCP"}],
        "volumeMounts": [one for one in engine["volumeMounts"] if not _engines_alone(one)],
        "resources": _RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod = {
        **{field: value for field, value in template["spec"].items() if field not in _ENGINES_ALONE},
        "containers": [container],
        "volumes": [one for one in template["spec"]["volumes"] if not _engines_alone(one)],
        "restartPolicy": "OnFailure",
    }
    spec_of_job = {
        "backoffLimit": _ATTEMPTS,
        "template": {"metadata": {**metadata, "labels": {**labels, **ours}}, "spec": pod},
    }
    made = owned(key, uid, ("batch/v1", "Job", names.prefetch_job(key.name)), spec=spec_of_job)
    content = hashlib.sha256(json.dumps(spec_of_job, sort_keys=True).encode()).hexdigest()[:8]
    made["metadata"]["annotations"] = {names.IDENTITY_ANNOTATION: f"{identity(key.name, spec)}-{content}"}
    return made


def _arguments(spec: Spec) -> list[str]:
    arguments = [f"--model={model_location(spec)}"]
    if spec.model.revision is not None:
        arguments.append(f"--revision={spec.model.revision}")
    hub = sorted({one.source.removeprefix("hf://") for one in spec.model.adapters if one.source.startswith("hf://")})
    return [*arguments, *(f"--adapter={name}" for name in hub)]


def _engines_alone(volume: Mapping[str, Any]) -> bool:
    """Return True for a volume or mount that kvpilot adds only for engines."""
    return volume["name"] in ("shm", "compile") or str(volume["name"]).startswith("adapters-")
