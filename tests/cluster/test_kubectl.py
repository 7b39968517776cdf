"""`kubectl kvpilot` as a user's process, against a real API server (Kubernetes 1.20) with the real CRD."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster import certs
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import define
from support.model_cluster import ModelCluster
from support.rights import until_may
from support.services import manifest

Json = Any
ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("kubectl-kvpilot")
SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices"
BAD = "int4_per_token_head"


def kvpilot(kubeconfig: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run kubectl-kvpilot as a user would, with KUBECONFIG."""
    env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return subprocess.run([PROGRAM, *argv], capture_output=True, text=True, check=False, env=env, timeout=600)


@dataclass
class World:
    """API server with one service in mode Fixed. The operator has denied its dtype."""

    plane: ControlPlane
    without_crd: subprocess.CompletedProcess[str]
    status: Json = field(default_factory=dict)

    def run(self, *argv: str) -> str:
        """Return the stdout of a command. Check that the command succeeds with an empty stderr."""
        done = kvpilot(self.plane.kubeconfig, *argv, "-n", "models")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def refused(self, *argv: str, kubeconfig: Path | None = None) -> str:
        """Return the only line that a failing command prints on stderr."""
        done = kvpilot(kubeconfig or self.plane.kubeconfig, *argv)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        return line

    def service(self) -> Json:
        """Return the service as the API server has it."""
        return self.plane.rest.get(f"{SERVICES}/chat")


@pytest.fixture(scope="module")
def world(plane: ControlPlane) -> World:
    world = World(plane, kvpilot(plane.kubeconfig, "status"))
    define(plane.rest, [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))])
    cluster = ModelCluster(manifest(kvCache={"mode": "Fixed", "dtype": "auto"}), bad=frozenset({BAD}))
    cluster.settle()
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": BAD}))
    cluster.settle()
    plane.rest.create(SERVICES, {**cluster.obj, "metadata": {"name": "chat", "namespace": "models"}})
    world.status = json.loads(json.dumps(cluster.status))
    # The denials have dates of the simulated cluster, so move their ends into the future.
    for one in world.status["kvCache"]["denied"]:
        one["until"] = "2999-01-01T00:00:00Z"
    plane.rest.merge(f"{SERVICES}/chat/status", {"status": world.status})
    return world


def test_without_the_crd_the_error_says_that_kvpilot_is_missing(world: World) -> None:
    assert world.without_crd.returncode == 1
    assert "kvpilot is not installed there" in world.without_crd.stderr


def test_status_prints_one_line_per_service_or_all_about_one_service(world: World) -> None:
    head, row = world.run("status").splitlines()
    assert head.split()[:7] == ["NAME", "READY", "SERVING", "REASON", "DTYPE", "REVISION", "REPLICAS"]
    revision = world.status["stable"]["revision"]
    assert row.split()[:7] == ["chat", "False", "True", "DtypeDenied", "auto", revision, "1/1"]
    assert "Stalled=True (DtypeDenied)" in row
    whole = world.run("status", "chat")
    assert all(f"\n{one['type']} " in whole for one in world.status["conditions"])
    everywhere = kvpilot(world.plane.kubeconfig, "status", "-A").stdout.splitlines()
    assert everywhere[1].split()[:2] == ["models", "chat"]


def test_why_prints_the_journal_of_the_service(world: World) -> None:
    text = world.run("why", "chat")
    for one in world.status["decisions"]:
        assert one["message"] in text


@pytest.mark.parametrize(("command", "paused"), [("pause", True), ("resume", False)])
def test_pause_and_resume_write_the_spec_with_their_own_field_manager(world: World, command: str, paused: bool) -> None:
    before = world.service()
    assert f" is {'paused' if paused else 'not paused'}: " in world.run(command, "chat")
    after = world.service()
    assert after["spec"]["rollout"]["paused"] is paused
    assert {**after["spec"], "rollout": {}} == {**before["spec"], "rollout": {}}
    assert after["status"] == before["status"]
    assert "kubectl-kvpilot" in {one["manager"] for one in after["metadata"]["managedFields"]}


def test_a_missing_service_is_an_error_that_names_it(world: World) -> None:
    assert "'chit' not found" in world.refused("why", "chit", "-n", "models")
    nothing = kvpilot(world.plane.kubeconfig, "status", "-n", "empty")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert nothing.stderr == "no services found in namespace empty\n"


@pytest.fixture(scope="module")
def reader(world: World) -> Path:
    """Return a user who may only read services of the namespace."""
    rules = [{"apiGroups": ["kvpilot.io"], "resources": ["quantizedllmservices"], "verbs": ["get", "list"]}]
    of_rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/models"
    world.plane.rest.create(f"{of_rbac}/roles", {"metadata": {"name": "reader"}, "rules": rules})
    bound = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "User", "name": "reader"}],
    }
    world.plane.rest.create(f"{of_rbac}/rolebindings", bound)
    right = {"namespace": "models", "verb": "list", "group": "kvpilot.io", "resource": "quantizedllmservices"}
    until_may(world.plane.rest, "reader", resourceAttributes=right)
    return user(world, "reader")


def user(world: World, name: str) -> Path:
    """Return a client configuration for a new user, who has only the rights that are bound to this name."""
    certs.certificate(world.plane.folder, name, f"/CN={name}")
    return certs.kubeconfig(world.plane.folder, name, world.plane.rest.server)


def test_a_user_without_a_right_is_told_which_one_is_missing(world: World, reader: Path) -> None:
    for argv, verb in ((("status",), "list"), (("status", "chat"), "get"), (("pause", "chat"), "get")):
        line = world.refused(*argv, "-n", "models", kubeconfig=user(world, "stranger"))
        assert f"`kubectl auth can-i {verb} quantizedllmservices.kvpilot.io -n models`" in line
    assert "can-i patch quantizedllmservices" in world.refused("pause", "chat", "-n", "models", kubeconfig=reader)


def test_a_user_who_may_only_read_services_gets_status_and_journal(world: World, reader: Path) -> None:
    why = kvpilot(reader, "why", "chat", "-n", "models")
    assert (why.returncode, why.stderr) == (0, "")
    assert world.status["decisions"][0]["message"] in why.stdout
    status = kvpilot(reader, "status", "chat", "-n", "models")
    assert (status.returncode, status.stderr) == (0, "")
    assert "\nReady " in status.stdout


def test_retry_writes_an_annotation_that_names_the_last_trial_and_does_not_change_the_spec(world: World) -> None:
    before, last = world.service(), world.status["history"][0]
    assert "be tried again at once" in world.run("retry", "chat")
    after = world.service()
    assert after["metadata"]["annotations"]["kvpilot.io/canary"] == f"retry@{last['revision']}/{last['time']}"
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], before["metadata"]["generation"])
    assert "has no canary" in world.refused("abort", "chat", "-n", "models")
