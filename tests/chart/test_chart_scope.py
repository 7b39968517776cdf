"""No service has two operators: Helm refuses a second operator, and only one operator has rights on the service.

The tests use a real API server and Helm. The releases have no pods.
"""

import subprocess

import pytest
import yaml

from kvpilot_localcluster import build
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.rest import until
from kvpilot_localcluster.toolbox.helm import HelmRefused, render, run_helm
from kvpilot_localcluster.toolbox.kubectl import kubectl

QUIET = {"replicaCount": 0, "crds": {"enabled": False}, "rbac": {"aggregate": False}}


class Releases:
    """Releases in one API server."""

    def __init__(self, plane, chart):
        self._rest = plane.rest
        self._kubeconfig = plane.kubeconfig
        self._chart = chart
        for name in ("models", "team-a", "team-b"):
            self._rest.create("/api/v1/namespaces", {"metadata": {"name": name}})

    def put(self, namespace, *watched, verb="install"):
        """Install or upgrade the release `kvpilot` of a namespace."""
        where = ("--kubeconfig", self._kubeconfig, "--namespace", namespace)
        flags = ("--create-namespace",)
        return run_helm(verb, "kvpilot", self._chart, *where, *flags, values=QUIET | {"watchNamespaces": list(watched)})

    def remove(self, *namespaces):
        for namespace in namespaces:
            run_helm("uninstall", "kvpilot", "--kubeconfig", self._kubeconfig, "--namespace", namespace, "--wait")

    def apply(self, namespace):
        """Render the chart and apply it without Helm."""
        manifests = yaml.safe_dump_all(render(self._chart, QUIET, "--skip-tests", namespace=namespace))
        command = [kubectl(), "--kubeconfig", self._kubeconfig, "apply", "-f", "-"]
        done = subprocess.run(command, input=manifests, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def may_write(self, namespace, where):
        """Ask the API server if a release's operator may write Deployments in this namespace."""
        asked = {"verb": "patch", "group": "apps", "resource": "deployments", "namespace": where}
        user = f"system:serviceaccount:{namespace}:kvpilot-operator"
        body = {"spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked}}
        return self._rest.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"]


@pytest.fixture(scope="module")
def releases(tmp_path_factory, installable):
    with ControlPlane(tmp_path_factory.mktemp("scope"), build.build()) as plane:
        yield Releases(plane, installable)


def test_a_second_operator_of_the_whole_cluster_is_refused_with_the_name_of_the_first(releases):
    releases.put("one")
    with pytest.raises(HelmRefused, match=r"release one/kvpilot manages every namespace already .* watchNamespaces"):
        releases.put("two")
    releases.put("one", verb="upgrade")
    releases.remove("one")
    releases.put("two")
    releases.remove("two")


def test_an_operator_of_a_namespace_is_refused_beside_one_of_the_whole_cluster_and_the_other_way_round(releases):
    releases.put("one")
    with pytest.raises(HelmRefused, match="release one/kvpilot manages every namespace already"):
        releases.put("two", "team-a")
    releases.remove("one")
    releases.put("two", "team-a")
    with pytest.raises(HelmRefused, match="release two/kvpilot manages namespace team-a already"):
        releases.put("one")
    releases.remove("two")


def test_operators_of_different_namespaces_live_side_by_side_and_may_not_share_one(releases):
    releases.put("one", "team-a")
    releases.put("two", "team-b")
    with pytest.raises(HelmRefused, match="release one/kvpilot manages namespace team-a already"):
        releases.put("two", "team-b", "team-a", verb="upgrade")
    assert [releases.may_write("one", where) for where in ("team-a", "team-b", "models")] == [True, False, False]
    assert [releases.may_write("two", where) for where in ("team-a", "team-b", "models")] == [False, True, False]
    releases.remove("one", "two")


def test_without_helm_the_rights_pass_to_the_last_operator_and_two_never_hold_them(releases):
    releases.put("one")
    assert releases.may_write("one", "models")
    releases.apply("team-a")
    until(lambda: releases.may_write("team-a", "models"), "the second operator has the rights")
    assert not releases.may_write("one", "models")
    releases.remove("one")


def test_helm_refuses_a_second_operator_beside_one_that_it_did_not_install(releases):
    releases.apply("team-b")
    with pytest.raises(HelmRefused, match="an operator that Helm did not install manages every namespace already"):
        releases.put("two")
