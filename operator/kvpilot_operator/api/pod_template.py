"""spec.engine.podTemplate: its schema, its rules, and the access to nodes that an administrator may allow.

The schema is that of Kubernetes' own client, reduced to the fields in `ALLOWED`, with `LIMITS` and `RULES`. The API
server refuses all other fields.
"""

from collections.abc import Collection, Iterator, Mapping

from msgspec import Meta

from kvpilot_operator.api.record import LABEL, NAME, Json, Rule

POD_TEMPLATE = Meta(max_length=2)
"""Marker of the field that gets the schema of a Pod's template in the CRD."""

ALLOWED: Mapping[str, tuple[str, ...]] = {
    "V1PodTemplateSpec": ("metadata", "spec"),
    "V1ObjectMeta": ("labels", "annotations"),
    "V1PodSpec": (
        "nodeSelector", "affinity", "topologySpreadConstraints", "tolerations", "schedulerName", "priorityClassName",
        "runtimeClassName", "serviceAccountName", "imagePullSecrets", "containers", "initContainers", "volumes",
        "resourceClaims", "securityContext", "hostIPC", "hostNetwork", "hostPID",
    ),
    "V1Container": (
        "name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports", "resources", "volumeMounts",
        "startupProbe", "readinessProbe", "livenessProbe", "restartPolicy", "securityContext",
    ),
    "V1ContainerPort": ("containerPort", "name", "protocol"),
    "V1EnvVarSource": ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"),
    "V1VolumeMount": ("name", "mountPath", "subPath", "readOnly"),
    "V1Probe": (
        "exec", "httpGet", "tcpSocket", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold",
        "failureThreshold",
    ),
    "V1SecurityContext": (
        "allowPrivilegeEscalation", "capabilities", "privileged", "readOnlyRootFilesystem", "runAsUser", "runAsGroup",
        "runAsNonRoot", "seccompProfile",
    ),
    "V1PodSecurityContext": (
        "runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "fsGroupChangePolicy", "supplementalGroups",
        "seccompProfile",
    ),
    "V1Volume": (
        "name", "configMap", "csi", "emptyDir", "hostPath", "image", "nfs", "persistentVolumeClaim", "projected",
        "secret",
    ),
    "V1VolumeProjection": ("configMap", "secret", "serviceAccountToken"),
}  # fmt: skip
"""Allowed fields of each model of Kubernetes' client. A model that is missing here may have all its fields."""

_NAMED = ("containers", "initContainers", "volumes", "resourceClaims", "claims")
KEYS = {**dict.fromkeys(_NAMED, "name"), "volumeMounts": "mountPath"}
"""Field by which a merge matches the items of a list, by the name of the list. Other lists are replaced whole."""

_QUANTITY = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "pattern": r"^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$",
    "maxLength": 32,
}
_LABEL = {"minLength": 1, "maxLength": 63, "pattern": f"^{LABEL}$"}
_NAME = {"minLength": 1, "maxLength": 253, "pattern": f"^{NAME}$"}
_LABEL_VALUE = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
_NAMES = (
    "V1PodSpec.serviceAccountName", "V1PodSpec.priorityClassName", "V1PodSpec.runtimeClassName",
    "V1PodSpec.schedulerName", "V1LocalObjectReference.name", "V1SecretVolumeSource.secretName",
    "V1ConfigMapVolumeSource.name", "V1PersistentVolumeClaimVolumeSource.claimName",
)  # fmt: skip
LIMITS: Mapping[str, Mapping[str, Json]] = {
    "V1ObjectMeta.labels": {"additionalProperties": _LABEL_VALUE},
    "V1Container.name": _LABEL,
    "V1Volume.name": _LABEL,
    "V1EnvVar.name": {"maxLength": 256},
    **dict.fromkeys(_NAMES, _NAME),
    "V1ResourceRequirements.requests": {"additionalProperties": _QUANTITY},
    "V1ResourceRequirements.limits": {"additionalProperties": _QUANTITY},
    "V1VolumeResourceRequirements.requests": {"additionalProperties": _QUANTITY},
    "V1EmptyDirVolumeSource.sizeLimit": {"type": "string", **{k: v for k, v in _QUANTITY.items() if len(k) < 10}},
    # Allow no path with a part . or .., because such a mount could hide one of kvpilot's.
    "V1VolumeMount.mountPath": {
        "maxLength": 512,
        "pattern": r"^/+(([^/.][^/]*|[.][^/.][^/]*|[.][.][^/]+)/+)*([^/.][^/]*|[.][^/.][^/]*|[.][.][^/]+)?$",
    },
    "V1SeccompProfile.type": {"enum": ["RuntimeDefault", "Localhost"]},
}
"""Schemas that replace or narrow those of Kubernetes' client, by model and field."""

_OF_ENGINE = ("image", "command", "args", "env", "envFrom", "ports", "startupProbe", "readinessProbe", "livenessProbe",
              "restartPolicy")  # fmt: skip
_INJECTED = (
    "seccomp.security.alpha.kubernetes.io/", "container.seccomp.security.alpha.kubernetes.io/",
    "security.alpha.kubernetes.io/", "seccomp-profile.kubernetes.cri-o.io", "kubernetes.io/config.",
    "scheduler.alpha.kubernetes.io/", "cdi.k8s.io/", "nvidia.cdi.k8s.io/", "io.kubernetes.cri", "io.containerd.",
    "io.katacontainers.", "run.oci.", "dev.gvisor.", "sidecar.istio.io/userVolume",
    "sidecar.istio.io/bootstrapOverride",
)  # fmt: skip
_APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/"
_REQUIRED_NODES = ".spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
_OWN_PORTS = Rule(
    ".ports",
    "!has(self.ports) || self.ports.all(port, port.containerPort != 8000 && (!has(port.name) || port.name != 'http'))",
    "port 8000 and the port name http are the engine's: use others",
)


def _one_of(*fields: str) -> Rule:
    given = ", ".join(f"has(self.{field})" for field in fields)
    named = f"{', '.join(fields[:-1])} and {fields[-1]}"
    return Rule("", f"[{given}].exists_one(given, given)", f"it needs exactly one of {named}: set one")


RULES: Mapping[str, tuple[Rule, ...]] = {
    ".metadata": (
        Rule(
            ".labels",
            "!has(self.labels) || self.labels.all(key, !key.startsWith('kvpilot.io/') && "
            "!(key in ['app.kubernetes.io/name', 'app.kubernetes.io/instance', 'app.kubernetes.io/managed-by']))",
            "podTemplate has a label of kvpilot.io, or app.kubernetes.io/name, instance or managed-by: kvpilot "
            "finds its pods by them: remove it, and use a prefix of your own",
        ),
        Rule(
            ".annotations",
            "!has(self.annotations) || self.annotations.all(key, !key.startsWith('kvpilot.io/'))",
            "podTemplate has an annotation of kvpilot.io: remove it, and use a prefix of your own",
        ),
        Rule(
            ".annotations",
            f"!has(self.annotations) || self.annotations.all(key, !key.startsWith('{_APP_ARMOR}') || "
            "self.annotations[key] == 'runtime/default' || self.annotations[key].startsWith('localhost/'))",
            "podTemplate turns AppArmor off by an annotation: remove it, or name runtime/default or a profile as "
            "localhost/PROFILE",
        ),
        Rule(
            ".annotations",
            "!has(self.annotations) || !self.annotations.exists(key, "
            + " || ".join(f"key.startsWith('{prefix}')" for prefix in _INJECTED)
            + ")",
            "podTemplate has an annotation by which a kubelet, a container runtime or an injector changes the security "
            "context, devices or volumes of a pod (docs/pods.md): remove it, and use the fields of podTemplate.spec",
        ),
    ),
    ".spec.containers[]": (
        Rule(
            "",
            "self.name != 'engine' || !("
            + " || ".join(f"has(self.{field})" for field in _OF_ENGINE)
            + " || has(self.resources) && (has(self.resources.requests) || has(self.resources.limits)))",
            "kvpilot sets the image, command, arguments, variables, ports, probes, requests and limits of the "
            "container engine: remove them here, and use spec.engine.image, spec.engine.extraArgs, spec.engine.env, "
            "spec.engine.resources and spec.engine.startupTimeoutSeconds",
        ),
        Rule(
            ".volumeMounts",
            "self.name != 'engine' || !has(self.volumeMounts) || self.volumeMounts.all(mount, !mount.mountPath.matches("
            "'^/+((models|compile-cache|dev(/+shm)?|adapters(/+[^/]+)?)/*)?$'))",
            "kvpilot mounts /models, /adapters, /compile-cache and /dev/shm of the engine itself: use another "
            "mountPath, not one of these or a folder above one, or spec.model, spec.cache or the size of the volume "
            "shm",
        ),
        _OWN_PORTS,
    ),
    ".spec.initContainers[]": (
        Rule(".name", "self.name != 'engine'", "engine is the name of kvpilot's own container: use another name"),
        _OWN_PORTS,
    ),
    ".spec.volumes[]": (
        _one_of(
            "configMap", "csi", "emptyDir", "hostPath", "image", "nfs", "persistentVolumeClaim", "projected", "secret"
        ),
        Rule(
            ".name",
            "!(self.name in ['model', 'compile']) && !self.name.startsWith('adapters-') && "
            "(self.name != 'shm' || has(self.emptyDir))",
            "model, compile and adapters-N are volumes of kvpilot, and shm is an emptyDir: use another name",
        ),
    ),
    f"{_REQUIRED_NODES}.nodeSelectorTerms[].matchExpressions[]": (
        Rule(
            ".values",
            "!(self.operator in ['Gt', 'Lt']) || "
            "has(self.values) && size(self.values) == 1 && self.values[0].matches('^[0-9]{1,18}$')",
            "nodeAffinity: Gt and Lt compare with one whole number: set exactly one value",
        ),
    ),
    ".spec.volumes[].projected.sources[]": (_one_of("configMap", "secret", "serviceAccountToken"),),
    ".spec.resourceClaims[]": (_one_of("resourceClaimName", "resourceClaimTemplateName"),),
}
"""CEL rules by the place in the template that they check."""

KINDS = ("capabilities", "hostIPC", "hostNetwork", "hostPID", "hostPath", "privileged")
"""Kinds of access to nodes that Pod Security "baseline" refuses. An administrator may allow each of them
(`--allow-host-access`)."""

_BASELINE_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip


def host_access(pod_template: Mapping[str, Json], allowed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (field, message) for each access to the node that is not `allowed`. Fields are paths in the template."""
    pod = pod_template.get("spec", {})
    asked = [(kind, kind, "true") for kind in ("hostIPC", "hostNetwork", "hostPID") if pod.get(kind)]
    for index, volume in enumerate(pod.get("volumes", ())):
        if "hostPath" in volume:
            asked.append(("hostPath", f"volumes[{index}].hostPath", repr(volume["hostPath"]["path"])))
    containers = [(group, *one) for group in ("initContainers", "containers") for one in enumerate(pod.get(group, ()))]
    for group, index, container in containers:
        field, context = f"{group}[{index}].securityContext", container.get("securityContext", {})
        if context.get("privileged"):
            asked.append(("privileged", f"{field}.privileged", "true"))
        added = [one for one in context.get("capabilities", {}).get("add", ()) if one not in _BASELINE_CAPABILITIES]
        if added:
            asked.append(("capabilities", f"{field}.capabilities.add", ", ".join(added)))
    for kind, field, shown in asked:
        if kind not in allowed:
            remedy = f"remove it, or let its administrator add {kind} to engines.hostAccess of kvpilot's chart"
            text = f"is {shown}: engines of this cluster may not reach into their node: {remedy}"
            yield f".spec.{field}", text
