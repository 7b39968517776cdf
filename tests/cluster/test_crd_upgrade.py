"""Services survive when their CRD is replaced."""

import copy
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import DEFINITIONS, define, served_paths, undefine
from kvpilot_localcluster.rest import ApiError, Rest, until
from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.api.names import KIND, PLURAL
from support.crd import load_crd
from support.model_cluster import ModelCluster
from support.services import manifest
from support.tenants import Tenant

Json = dict[str, Any]


@dataclass(frozen=True)
class Defined:
    """CRD on one server, with a user's operations on its services."""

    plane: ControlPlane
    group: str

    @property
    def rest(self) -> Rest:
        """Client of the administrator on the server with the CRD."""
        return self.plane.rest

    @property
    def path(self) -> str:
        """Path of the CRD."""
        return f"{DEFINITIONS}/{PLURAL}.{self.group}"

    def services(self, version: str = "v1alpha1") -> str:
        """Return the path of services in the namespace `default`, in this API version."""
        return f"/apis/{self.group}/{version}/namespaces/default/{PLURAL}"

    def definition(self, change: Callable[[Json], None] = lambda _: None) -> Json:
        """Return the CRD of crds/ with another group and other changes."""
        made = copy.deepcopy(dict(load_crd()))
        made["metadata"]["name"] = f"{PLURAL}.{self.group}"
        made["spec"]["group"] = self.group
        change(made)
        return made

    def create(self, definition: Json) -> None:
        """Create the CRD, and wait until it is served."""
        define(self.rest, [definition])

    def replace(self, definition: Json) -> None:
        """Change the CRD, and wait until the server applies it."""
        now = self.rest.get(self.path)["metadata"]["resourceVersion"]
        metadata = {**definition["metadata"], "resourceVersion": now}
        self.rest.call("PUT", self.path, {**definition, "metadata": metadata})
        for path in served_paths(definition):
            until(partial(self.rest.get, path), f"{path} is served")

    def manifest(self, name: str, version: str = "v1alpha1", **spec: Any) -> Json:
        """Return a service as a user writes it."""
        whole = {"model": {"source": "hf://Qwen/Qwen3-8B"}, "engine": {"image": "kvpilot/runtime:1"}, **spec}
        return {"apiVersion": f"{self.group}/{version}", "kind": KIND, "metadata": {"name": name}, "spec": whole}

    def apply(self, manifest: Json, *flags: str) -> None:
        """Run kubectl apply."""
        done = subprocess.run(
            [kubectl(), "--kubeconfig", self.plane.kubeconfig, "apply", "--validate=false", "-f", "-", *flags],
            input=json.dumps(manifest), capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def get(self, name: str, version: str = "v1alpha1") -> Json:
        """Return the stored service."""
        found: Json = self.rest.get(f"{self.services(version)}/{name}")
        return found

    def would_be(self, manifest: Json, version: str = "v1alpha1") -> Json:
        """Return a new service with the server's defaults, by a dry run."""
        made: Json = self.rest.create(f"{self.services(version)}?dryRun=All", manifest)
        return made

    def remove(self) -> None:
        """Delete the CRD with all its services, and wait until they are gone."""
        undefine(self.rest, self.definition())


def with_successor(definition: Json, *, stored: str) -> None:
    """Serve v1beta1 beside v1alpha1 with the same schema and no webhook. One of them is the storage version."""
    (alpha,) = definition["spec"]["versions"]
    beta = {**copy.deepcopy(alpha), "name": "v1beta1"}
    definition["spec"]["versions"] = [{**one, "storage": one["name"] == stored} for one in (alpha, beta)]
    definition["spec"]["conversion"] = {"strategy": "None"}


_NUMBERS = itertools.count(1)


@pytest.fixture
def defined(cluster: LocalCluster) -> Iterator[Defined]:
    """Yield an API group for one test, without a CRD."""
    made = Defined(cluster.plane, f"upgrade-{next(_NUMBERS)}.kvpilot.io")
    yield made
    made.remove()


def auto_by_default(definition: Json) -> None:
    """Change the CRD to an old one, in which Auto was the default mode."""
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    mode = spec["properties"]["kvCache"]["properties"]["mode"]
    assert mode["default"] == "Recommend"
    mode["default"] = "Auto"


def mode(service: Json) -> str:
    found: str = service["spec"]["kvCache"]["mode"]
    return found


def test_an_old_service_keeps_the_former_default_auto_and_a_new_one_gets_recommend(
    defined: Defined,
) -> None:
    defined.create(defined.definition(auto_by_default))
    told_nothing = {
        "absent": defined.manifest("absent"),
        "no-mode": defined.manifest("no-mode", kvCache={"ladder": ["fp8"]}),
        "null": defined.manifest("null", kvCache={"mode": None}),
    }
    for one in told_nothing.values():
        defined.apply(one)
    applied_by_server = defined.manifest("by-server")
    defined.apply(applied_by_server, "--server-side")
    line = defined.manifest("line", kvCache={"mode": "Auto"})
    defined.apply(line)

    defined.replace(defined.definition())
    until(
        lambda: mode(defined.would_be(defined.manifest("new"))) == "Recommend", "the server applies the new definition"
    )

    old = ("absent", "no-mode", "null", "by-server", "line")
    assert {name: mode(defined.get(name)) for name in old} == dict.fromkeys(old, "Auto")
    listed = defined.rest.get(defined.services())["items"]
    assert {mode(one) for one in listed} == {"Auto"}

    # The stored default stays if the user applies the manifest again, or if others or the operator write the object.
    for one in told_nothing.values():
        defined.apply({**one, "spec": {**one["spec"], "replicas": 2}})
    defined.apply(
        {**applied_by_server, "spec": {**applied_by_server["spec"], "replicas": 2}},
        "--server-side",
        "--force-conflicts",
    )
    for name in (*told_nothing, "by-server"):
        found = defined.rest.merge(f"{defined.services()}/{name}/status", {"status": {"replicas": 2}})
        assert (mode(found), found["spec"]["replicas"], found["status"]["replicas"]) == ("Auto", 2, 2)

    # A user who replaces the object, or removes the line, gets the new default.
    now = defined.get("absent")["metadata"]["resourceVersion"]
    whole = {**told_nothing["absent"], "metadata": {"name": "absent", "resourceVersion": now}}
    assert mode(defined.rest.call("PUT", f"{defined.services()}/absent", whole)) == "Recommend"
    defined.apply(defined.manifest("line"))
    assert mode(defined.get("line")) == "Recommend"
    # A new object gets the new default, too.
    defined.rest.delete(f"{defined.services()}/null")
    defined.apply(told_nothing["null"])
    assert mode(defined.get("null")) == "Recommend"


ALPHA, BETA = "v1alpha1", "v1beta1"
EXAMPLES = Path(__file__).parents[2] / "examples"


def examples(defined: Defined) -> dict[str, Json]:
    """Return every service of examples/, each under its own name, in the API group of the test."""
    found = {}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == KIND:
                found[path.stem] = defined.manifest(path.stem) | {"spec": document["spec"]}
    return found


def a_status() -> Json:
    """Return the status that the operator writes after memory pressure, a trial and a promotion."""
    cluster = ModelCluster(
        manifest(kvCache={"pressure": {"sustainedSeconds": 30}}, canary={"steps": []}), demand=9000, start_ticks=2
    )
    cluster.until(lambda status: status.last_trial is not None)
    found: Json = json.loads(json.dumps(cluster.status))
    assert {"canary", "decisions", "history", "url", "observedRevision"} - set(found) <= {"canary"}
    return found


def content(service: Json) -> Json:
    """Return an object's content, which does not depend on the API version of the request."""
    metadata = {name: service["metadata"][name] for name in ("name", "uid", "generation")}
    return {"metadata": metadata, "spec": service["spec"], "status": service.get("status")}


def beside(defined: Defined, stored: str) -> Json:
    """Return the CRD with v1alpha1 and v1beta1."""
    return defined.definition(partial(with_successor, stored=stored))


def without_alpha(definition: Json) -> None:
    """Change the CRD to one that has only v1beta1."""
    with_successor(definition, stored=BETA)
    del definition["spec"]["versions"][0]


def test_v1alpha1_becomes_v1beta1_without_a_webhook_and_no_service_changes(defined: Defined) -> None:
    defined.create(defined.definition())
    for name, one in examples(defined).items():
        defined.rest.create(defined.services(), one)
        defined.rest.merge(f"{defined.services()}/{name}/status", {"status": a_status()})
    names = sorted(examples(defined))
    before = {name: content(defined.get(name)) for name in names}

    for stored in (ALPHA, BETA):
        defined.replace(beside(defined, stored))
        for version in (ALPHA, BETA):
            assert {name: content(defined.get(name, version)) for name in names} == before

    # Clients of either version see each other's writes in the spec, the status and the scale.
    name = names[0]
    for writer, reader, replicas in ((ALPHA, BETA, 3), (BETA, ALPHA, 4)):
        scale = defined.rest.get(f"{defined.services(writer)}/{name}/scale")
        scale["spec"]["replicas"] = replicas
        defined.rest.call("PUT", f"{defined.services(writer)}/{name}/scale", scale)
        defined.rest.merge(f"{defined.services(writer)}/{name}/status", {"status": {"replicas": replicas}})
        found = defined.get(name, reader)
        assert (found["spec"]["replicas"], found["status"]["replicas"]) == (replicas, replicas)
    # If a client applies a field in one version and then omits it in the other version, the server removes the field.
    defined.apply(defined.manifest("applied", ALPHA, replicas=3, kvCache={"mode": "Auto"}), "--server-side")
    defined.apply(defined.manifest("applied", BETA, replicas=3), "--server-side")
    assert mode(defined.get("applied", ALPHA)) == "Recommend"

    # v1alpha1 may be removed once every object has been rewritten. Before that, the server refuses.
    with pytest.raises(ApiError, match="storedVersions"):
        defined.replace(defined.definition(without_alpha))
    listed = defined.rest.get(defined.services(BETA))["items"]
    for one in listed:
        path = f"{defined.services(BETA)}/{one['metadata']['name']}"
        defined.rest.call("PUT", path, {"apiVersion": f"{defined.group}/{BETA}", "kind": KIND, **one})
    defined.rest.merge(f"{defined.path}/status", {"status": {"storedVersions": [BETA]}})
    defined.replace(defined.definition(without_alpha))
    until(lambda: not served(defined, ALPHA), "v1alpha1 is not served any more")
    after = {one["metadata"]["name"]: content(one) for one in defined.rest.get(defined.services(BETA))["items"]}
    assert after == {one["metadata"]["name"]: content(one) for one in listed}


def served(defined: Defined, version: str) -> bool:
    try:
        defined.rest.get(defined.services(version))
    except ApiError as error:
        assert error.status == 404
        return False
    return True


def test_a_field_of_only_one_version_is_lost_by_a_write_in_the_other_version(defined: Defined) -> None:
    """Both versions must have the same schema while both are served."""

    def wider(definition: Json) -> None:
        with_successor(definition, stored=BETA)
        schema = definition["spec"]["versions"][1]["schema"]["openAPIV3Schema"]
        schema["properties"]["spec"]["properties"]["note"] = {"type": "string", "description": "new"}

    defined.create(defined.definition(wider))
    defined.rest.create(defined.services(BETA), defined.manifest("wide", BETA, note="kept"))
    assert defined.get("wide", BETA)["spec"]["note"] == "kept"
    old = defined.get("wide", ALPHA)
    assert "note" not in old["spec"]
    defined.rest.call("PUT", f"{defined.services(ALPHA)}/wide", old)
    assert "note" not in defined.get("wide", BETA)["spec"]


def test_the_next_apply_writes_the_new_api_version_into_owner_references(tenant: Tenant) -> None:
    path = f"{tenant.core}/configmaps/owned?fieldManager=kvpilot-operator"
    for version in (ALPHA, BETA):
        owner = {
            "apiVersion": f"kvpilot.io/{version}",
            "kind": KIND,
            "name": "chat",
            "uid": "5d1c1e0e-0000-4000-8000-1",
        }
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [owner]}}
        made = tenant.cluster.rest.call("PATCH", path, body, content="application/apply-patch+yaml")
        assert [one["apiVersion"] for one in made["metadata"]["ownerReferences"]] == [f"kvpilot.io/{version}"]
