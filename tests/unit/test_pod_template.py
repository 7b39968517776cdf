"""engine.podTemplate: the fields that users may add to engine pods, and those that they may not change."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pod_templates import TEMPLATES

from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.pod_template import KINDS
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.render.engine import pod_template, revision, strategic_merge
from support.bad_manifests import BAD
from support.crd import apply_defaults, refused, root_schema
from support.kinds import unknown
from support.services import KEY, manifest, spec_of

Json = Any
SCHEMA = root_schema()["properties"]["spec"]["properties"]["engine"]["properties"]["podTemplate"]
SIDECAR = {
    "name": "proxy",
    "image": "example.org/proxy:1",
    "args": ["--upstream=http://127.0.0.1:8000"],
    "ports": [{"containerPort": 8443, "protocol": protocol} for protocol in ("TCP", "UDP")],
    "volumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
}
FULL: Json = {
    "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "llm"}, "annotations": {"example.org/team": "search"}},
    "spec": {
        "containers": [
            SIDECAR,
            {
                "name": "engine",
                "volumeMounts": [{"name": "templates", "mountPath": "/templates"}],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "resources": {"claims": [{"name": "gpu"}]},
            },
        ],
        "initContainers": [{"name": "fetch", "image": "example.org/fetch:1", "command": ["fetch"]}],
        "volumes": [
            {"name": "certificates", "secret": {"secretName": "certificates"}},
            {"name": "templates", "configMap": {"name": "templates"}},
        ],
        "schedulerName": "volcano",
        "securityContext": {"supplementalGroups": [44]},
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    },
}


def engine(pod_template: Json, **more: Json) -> dict[str, Json]:
    return manifest(engine={"image": "i", "podTemplate": pod_template, **more})


def rendered(given_template: Json, **more: Json) -> dict[str, Json]:
    return pod_template(KEY.name, spec_of(engine(given_template, **more)), "k4v4")


def containers(template: Mapping[str, Json]) -> dict[str, Json]:
    return {one["name"]: one for one in template["spec"]["containers"]}


def test_every_allowed_field_reaches_the_pod() -> None:
    assert faults(engine(FULL), ["capabilities"]) == ()
    template = rendered(FULL, resources={"limits": {"memory": "8Gi"}})
    pod, found = template["spec"], containers(template)
    assert template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "llm"
    assert template["metadata"]["annotations"] == {"example.org/team": "search"}
    assert list(found) == ["engine", "proxy"]
    assert found["proxy"] == SIDECAR
    assert found["engine"]["resources"] == {"limits": {"memory": "8Gi"}, "claims": [{"name": "gpu"}]}
    assert {"name": "templates", "mountPath": "/templates"} in found["engine"]["volumeMounts"]
    assert [one["name"] for one in pod["volumes"]] == ["shm", "certificates", "templates"]
    assert pod["initContainers"] == FULL["spec"]["initContainers"]
    assert pod["resourceClaims"] == FULL["spec"]["resourceClaims"]
    assert pod["schedulerName"] == "volcano"
    assert unknown("V1PodTemplateSpec", template, "template") == []


def test_a_security_context_is_merged_over_the_restricted_defaults() -> None:
    template = rendered(FULL | {"spec": FULL["spec"] | {"securityContext": {"runAsUser": 1000}}})
    own = containers(template)["engine"]["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    plain = rendered({})["spec"]["securityContext"]
    assert template["spec"]["securityContext"] == plain | {"runAsUser": 1000}


def test_an_empty_pod_template_gives_the_same_revision_as_none() -> None:
    old = pod_template(KEY.name, spec_of(manifest(engine={"image": "i"})), "k4v4")
    empty = {"metadata": {"labels": {}}, "spec": {"containers": [], "volumes": [], "securityContext": {}}}
    assert rendered({}) == rendered(empty) == old


def test_a_changed_template_is_a_new_revision_and_another_spelling_is_not() -> None:
    first = {"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}}
    same = {"spec": {"securityContext": {"fsGroup": 1000, "runAsUser": 1000}}}
    other = {"spec": {"securityContext": {"runAsUser": 1001, "fsGroup": 1000}}}
    assert revision(rendered(first)) == revision(rendered(same))
    assert len({revision(rendered(one)) for one in ({}, first, other)}) == 3


def test_a_pod_on_the_nodes_network_still_finds_services_by_name() -> None:
    assert rendered({"spec": {"hostNetwork": True}})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "dnsPolicy" not in rendered({"spec": {"hostNetwork": False}})["spec"]


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "administrator"], ids=lambda bad: bad.name)
def test_access_to_the_node_is_refused_unless_its_own_kind_is_allowed(bad) -> None:
    (fault,) = faults(bad.manifest)
    kind = re.search(r"add (\w+) to engines.hostAccess", fault.message)[1]
    assert faults(bad.manifest, [kind]) == ()
    assert faults(bad.manifest, set(KINDS) - {kind}) == (fault,)


def test_the_operator_judges_services_by_its_allowed_host_access() -> None:
    about = {"namespace": "a", "name": "good", "uid": "u", "generation": 1, "resourceVersion": "1"}
    service = engine({"spec": {"hostIPC": True}}) | {"metadata": about}
    for allowed, accepted in (((), False), (("hostNetwork",), False), (("hostIPC",), True)):
        cache = InformerCache(None, (), allowed)
        cache.services.put(service)
        view = cache.services.get("a", "good")
        assert (view.spec is not None) == accepted
        assert accepted or view.faults[0].field == "spec.engine.podTemplate.spec.hostIPC"


def own_mounts() -> set[str]:
    """Return kvpilot's mount paths in an engine that uses every kind of volume."""
    obj = engine({}, resources={"limits": {"cpu": 1}})
    obj["spec"]["cache"] = {"weightsClaimName": "w", "compileClaimName": "c"}
    obj["spec"]["model"]["adapters"] = [{"name": "sql", "source": "pvc://a/sql"}]
    pod = pod_template(KEY.name, spec_of(apply_defaults(obj)), "k4v4")["spec"]
    return {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}


PARTS = ("", ".", "..", "models", "adapters", "a", "compile-cache", "dev", "shm", "data")


@given(st.lists(st.sampled_from(PARTS), max_size=5))
@example(["", "models"])
@example([".", "models"])
@example(["dev", ".", "shm"])
def test_no_spelling_of_a_path_hides_a_mount_of_kvpilot(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    mounts = [{"name": "v", "mountPath": path}]
    found = refused(engine({"spec": {"containers": [{"name": "engine", "volumeMounts": mounts}]}}))
    plain = PurePosixPath("/", *filter(None, parts))
    ours = [PurePosixPath(one) for one in own_mounts()]
    over = any(one == plain or plain in one.parents for one in ours) or plain.parent == PurePosixPath("/adapters")
    assert bool(found) == (over or not {".", ".."}.isdisjoint(parts))


def test_a_pod_field_that_the_api_does_not_allow_is_unknown() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    assert not {"hostUsers", "nodeName", "dnsPolicy", "restartPolicy"} & set(spec)
    assert not {"lifecycle", "volumeDevices"} & set(spec["containers"]["items"]["properties"])


@pytest.mark.parametrize(
    ("volumes", "size"),
    [([], "2Gi"), ([{"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}], "8Gi")],
)
def test_shared_memory_has_a_default_size_and_grows_by_offloaded_blocks(volumes: Json, size: str) -> None:
    template = {"spec": {"volumes": volumes}}
    plain = rendered(template)["spec"]["volumes"][0]
    assert plain == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    obj = engine(template)
    obj["spec"]["kvCache"] = {"offload": {"cpuMemoryGiB": 4}}
    grown = pod_template(KEY.name, spec_of(obj), "k4v4")["spec"]["volumes"][0]
    assert grown["emptyDir"]["sizeLimit"] == f"{int(size[:-2]) + 4}Gi"


def lost(ours: Json, found: Json, path: str) -> Iterator[str]:
    """Yield the paths at which our own template changed. Users may set the engine's permissions."""
    if path.endswith(".securityContext"):
        return
    if isinstance(ours, dict):
        for name, value in ours.items():
            yield from lost(value, found.get(name), f"{path}.{name}") if name in found else (f"{path}.{name}",)
    elif isinstance(ours, list) and path.rpartition(".")[2] in ("containers", "volumes", "volumeMounts"):
        for index, value in enumerate(ours):
            yield from lost(value, found[index], f"{path}[{index}]")
    elif ours != found:
        yield path


def beyond_baseline(template: Mapping[str, Json]) -> Iterator[str]:
    """Yield the rules of Pod Security "baseline" that a pod template violates.

    tests/unit/test_pod_security.py checks "restricted".
    """
    pod = template["spec"]
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from ("hostPath" for volume in pod["volumes"] if "hostPath" in volume)
    contexts = [pod["securityContext"]]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container.get("securityContext", {})
        contexts.append(context)
        if context.get("privileged"):
            yield "privileged"
        if not set(context.get("capabilities", {}).get("add", ())) <= {"CHOWN"}:
            yield "capabilities"
        yield from ("hostPort" for port in container.get("ports", ()) if "hostPort" in port)
    yield from ("seccomp" for one in contexts if one.get("seccompProfile", {}).get("type") == "Unconfined")
    yield from (
        "AppArmor"
        for value in template["metadata"].get("annotations", {}).items()
        if value[1] == "unconfined" and "apparmor" in value[0]
    )


@pytest.mark.slow
@given(TEMPLATES, st.sets(st.sampled_from(KINDS)))
@settings(max_examples=150, deadline=None)
def test_accepted_templates_keep_kvpilots_fields_and_satisfy_baseline(given_template: Json, allowed: set[str]) -> None:
    obj = engine(given_template, resources={"limits": {"cpu": 1}}) | {}
    obj["spec"]["cache"] = {"weightsClaimName": "w", "compileClaimName": "c"}
    obj["spec"]["model"]["adapters"] = [{"name": "sql", "source": "pvc://a/sql"}]
    assume(not refused(obj))
    found = pod_template(KEY.name, spec_of(obj), "k4v4")
    assert faults(obj, allowed) or set(beyond_baseline(found)) <= allowed
    plain = engine({}, resources={"limits": {"cpu": 1}})
    plain["spec"] |= {name: obj["spec"][name] for name in ("cache", "model")}
    ours = pod_template(KEY.name, spec_of(plain), "k4v4")
    for one in (ours, found):
        # This label is a hash of all other fields, so it differs.
        del one["metadata"]["labels"]["kvpilot.io/revision"]
    assert list(lost(ours, found, "template")) == []


MAPS = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "metadata"]), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict))


@given(MAPS, MAPS)
def test_a_merged_template_has_every_field_of_the_users_and_changes_neither_input(base: Json, patch: Json) -> None:
    before = copy.deepcopy((base, patch))
    merged = strategic_merge(base, patch)
    assert (base, patch) == before
    assert strategic_merge(merged, patch) == merged
    assert strategic_merge(base, {}) == base
    assert merged.keys() == base.keys() | patch.keys()
