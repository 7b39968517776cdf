"""Every pod of the operator passes Pod Security "restricted". The test checks each rule of the standard."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvpilot_operator.api.spec import parse
from kvpilot_operator.render.engine import pod_template
from support.crd import apply_defaults

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
EVERYTHING: dict[str, Any] = {
    "model": {"source": "hf://Qwen/Qwen3-8B", "tokenSecretRef": {"name": "hf"}},
    "engine": {
        "image": "example.org/runtime:1",
        "podTemplate": {
            "spec": {
                "serviceAccountName": "models",
                "runtimeClassName": "nvidia",
                "priorityClassName": "high",
                "imagePullSecrets": [{"name": "pull"}],
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            }
        },
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    },
    "cache": {"weightsClaimName": "models", "compileClaimName": "vllm-compile"},
}


def spec_with(source: str) -> dict[str, Any]:
    return {"model": {"source": source}, "engine": {"image": "example.org/runtime:1"}}


SPECS = {
    "everything": EVERYTHING,
    "hub": spec_with("hf://Qwen/Qwen3-8B"),
    "claim": spec_with("pvc://models/qwen"),
    "file": spec_with("file:///models/qwen"),
}


def template(spec: dict[str, Any], dtype: str = "k4v4", **on: bool) -> dict[str, Any]:
    return pod_template("chat", parse(apply_defaults({"metadata": {"name": "chat"}, "spec": spec})), dtype, **on)


def violations(template: Mapping[str, Any]) -> Iterator[str]:
    """Yield each rule of Pod Security "baseline" and "restricted" (Linux) that a pod template violates."""
    pod, annotations = template["spec"], template["metadata"].get("annotations", {})
    whole = pod.get("securityContext", {})
    containers = [one for kind in ("initContainers", "containers", "ephemeralContainers") for one in pod.get(kind, ())]
    if any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    for volume in pod.get("volumes", ()):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume type {sorted(volume.keys() - {'name'})[0]}"
    if any(name.startswith("container.apparmor.security.beta") for name in annotations):
        yield "AppArmor annotation"
    if whole.get("sysctls"):
        yield "sysctls"
    yield from _context(whole, "pod")
    for container in containers:
        yield from _container(container, whole)


def _container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    name, own = container["name"], container.get("securityContext", {})
    yield from _context(own, name)
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may escalate privileges"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if "ALL" not in own.get("capabilities", {}).get("drop", ()):
        yield f"{name}: does not drop ALL"
    if not set(own.get("capabilities", {}).get("add", ())) <= {"NET_BIND_SERVICE"}:
        yield f"{name}: adds capabilities"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield f"{name}: may run as root"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{name}: no seccomp profile"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{name}: host port"
    handlers = [container.get(probe, {}) for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    handlers += container.get("lifecycle", {}).values()
    if any(handler.get(how, {}).get("host") for handler in handlers for how in ("httpGet", "tcpSocket")):
        yield f"{name}: a probe of another host"


def _context(context: Mapping[str, Any], where: str) -> Iterator[str]:
    if context.get("runAsUser") == 0:
        yield f"{where}: runs as root"
    if context.get("runAsNonRoot") is False:
        yield f"{where}: asks to run as root"
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield f"{where}: seccomp is off"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield f"{where}: AppArmor is off"
    if context.get("seLinuxOptions", {}).keys() & {"user", "role"}:
        yield f"{where}: SELinux user or role"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{where}: Windows host process"


@pytest.mark.parametrize("dtype", ["auto", "k4v4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_engine_pod_passes_every_rule_of_restricted(spec: dict[str, Any], dtype: str) -> None:
    assert list(violations(template(spec, dtype))) == []


def beyond_restricted_v2(template: Mapping[str, Any]) -> Iterator[str]:
    """Yield OpenShift's objections to a pod under SCC restricted-v2.

    These include users and groups outside the namespace's range.
    """
    pod = template["spec"]
    ids = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
    contexts = [pod.get("securityContext", {}), *(one.get("securityContext", {}) for one in pod["containers"])]
    yield from (name for context in contexts for name in ids if name in context)
    yield from violations(template)


@pytest.mark.parametrize("dtype", ["auto", "k4v4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_on_openshift_a_pod_names_no_user(spec: dict[str, Any], dtype: str) -> None:
    assert list(beyond_restricted_v2(template(spec, dtype, assigned_user=True))) == []
    assert list(beyond_restricted_v2(template(spec, dtype))) == ["runAsUser", "runAsGroup", "fsGroup"]


def test_on_openshift_a_user_in_the_pod_template_is_kept() -> None:
    engine = {"image": "i", "podTemplate": {"spec": {"securityContext": {"fsGroup": 1000650000}}}}
    found = template({"model": {"source": "file:///m"}, "engine": engine}, assigned_user=True)
    assert found["spec"]["securityContext"]["fsGroup"] == 1000650000
    assert "runAsUser" not in found["spec"]["securityContext"]


def test_pod_security_restricted_refuses_only_the_image_volume_of_a_model_from_a_registry() -> None:
    found = list(violations(template(spec_with("oci://example.org/models/qwen:1"))))
    assert found == ["volume type image"]


def test_the_rules_find_what_a_pod_without_security_context_breaks() -> None:
    bare = template(spec_with("file:///models/qwen"))
    del bare["spec"]["securityContext"], bare["spec"]["containers"][0]["securityContext"]
    assert set(violations(bare)) == {
        "engine: may escalate privileges",
        "engine: does not drop ALL",
        "engine: may run as root",
        "engine: no seccomp profile",
    }


def test_an_engine_gets_no_api_token_unless_a_service_account_is_named() -> None:
    assert template(spec_with("file:///m"))["spec"]["automountServiceAccountToken"] is False
    assert template(EVERYTHING)["spec"]["automountServiceAccountToken"] is True


def test_a_pod_refers_to_secrets_and_contains_none() -> None:
    env = {one["name"]: one for one in template(EVERYTHING)["spec"]["containers"][0]["env"]}
    assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    assert env["A"] == {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
