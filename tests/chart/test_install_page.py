"""The commands of docs/install.md and docs/upgrade.md run on a real API server, section by section, in one cluster.

The chart is a copy without its minimum version, because the local API server is Kubernetes 1.20. Alternatives to the
first section (plain manifests, selected namespaces only) run after the page's commands for removal.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import Rest, until
from kvpilot_localcluster.toolbox.helm import helm
from kvpilot_localcluster.toolbox.kubectl import kubectl
from support.page_commands import Command, commands_of, options_of, subcommand

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in ("install.md", "upgrade.md"))
TOKEN = {"HF_TOKEN": "hf_example"}
HOME = "kvpilot-system"
# Commands of the page that the test skips, with the reason.
NOT_RUN = {
    "docker build": "there is no container engine, and its base images come from the network",
    "docker push": "there is no registry",
    "kubectl explain": "the core of 1.20 may never publish schemas that the newer server of definitions has",
    "kubectl -n models port-forward": "the node agent forwards no ports",
    "curl": "the command asks the forwarded port, where the cheap engine that replaces the model cannot chat",
}
# The local API server (Kubernetes 1.20) publishes CRDs without CEL rules, so clients must not validate against them.
UNCHECKED = {"helm": "--disable-openapi-validation", "kubectl": "--validate=false"}
# Kinds of the Prometheus operator, which is not installed.
ABSENT = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def section(title: str) -> list[Command]:
    """Return the commands of a section that the test runs."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return [one for one in commands_of(text, TOKEN) if not left_out(one)]


def left_out(one: Command) -> bool:
    return any(" ".join(one.words).startswith(name) for name in NOT_RUN)


def invocation(one: Command, *more: str) -> list[str]:
    """Return the command line that the test runs for a command of the page."""
    program, *rest = one.words
    unchecked = [UNCHECKED[program]] if subcommand(one.words)[0] in ("install", "upgrade", "apply") else []
    return [str({"helm": helm, "kubectl": kubectl}[program]()), *rest, *more, *unchecked]


class Person:
    """User who follows the page with their own kubeconfig, in a checkout."""

    def __init__(self, cluster: LocalCluster, chart: Path) -> None:
        self._chart = str(chart)
        self.rest: Rest = cluster.rest
        self._environment = {
            "KUBECONFIG": str(cluster.kubeconfig),
            "HOME": str(cluster.folder),
            "PATH": "/usr/bin:/bin",
        }

    def tries(self, one: Command, *more: str) -> subprocess.CompletedProcess[str]:
        command = [self._chart if word == "charts/kvpilot" else word for word in invocation(one, *more)]
        return subprocess.run(
            command, input=one.given, capture_output=True, text=True, check=False, env=self._environment, cwd=ROOT,
            timeout=900,
        )  # fmt: skip

    def runs(self, one: Command, *more: str) -> str:
        done = self.tries(one, *more)
        assert done.returncode == 0, (one.words, done.stderr)
        return done.stdout

    def refused(self, one: Command, *more: str) -> str:
        done = self.tries(one, *more)
        assert done.returncode == 1, (one.words, done.stdout)
        return done.stderr

    def watches(self, one: Command, column: str, value: str) -> str:
        """Read a command's continuous output until a column has this value. Then stop it and return the line."""
        with subprocess.Popen(invocation(one), stdout=subprocess.PIPE, text=True, env=self._environment) as shown:
            assert shown.stdout is not None
            heading = shown.stdout.readline().split()
            found = next(line for line in shown.stdout if line.split()[heading.index(column)] == value)
            shown.terminate()
        return found

    def has(self, path: str) -> bool:
        """Return True if the API server has an object at this path."""
        collection, _, name = path.rpartition("/")
        return any(one["metadata"]["name"] == name for one in self.rest.get(collection)["items"])

    def is_gone(self, path: str) -> None:
        until(lambda: not self.has(path), f"{path} is gone")


@pytest.fixture(scope="module")
def person(cluster: LocalCluster, installable: Path) -> Iterator[Person]:
    found = Person(cluster, installable)
    clear(found)
    # The page needs a shared storage class; a prepared volume stands in for it.
    spec = {
        "capacity": {"storage": "200Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(cluster.folder / "shared")},
    }
    found.rest.create("/api/v1/persistentvolumes", {"metadata": {"name": "shared"}, "spec": spec})
    yield found
    found.rest.delete("/api/v1/persistentvolumes/shared")


def clear(person: Person) -> None:
    """Remove the objects of other tests."""
    inline = Command(("kubectl", "delete", "-k", "config/base"), "")
    assert f"`{' '.join(inline.words)}`" in PAGE
    person.tries(inline, "--ignore-not-found")
    for name in ("models", "team-a"):
        if person.has(f"/api/v1/namespaces/{name}"):
            person.rest.delete(f"/api/v1/namespaces/{name}")
            person.is_gone(f"/api/v1/namespaces/{name}")


def test_every_section_of_the_install_page_with_commands_has_a_test() -> None:
    titles = re.findall(r"^## (.*)", PAGE, re.MULTILINE)
    run = [
        "With Helm", "With plain manifests", "Serve a model", "Some namespaces only", "Who may do what", "Upgrade",
        "Uninstall",
    ]  # fmt: skip
    assert [title for title in titles if section(title)] == run


def test_commands_that_are_not_run_have_existing_options_and_files() -> None:
    commands = [one for one in commands_of(PAGE, TOKEN) if left_out(one)]
    assert {name for name in NOT_RUN for one in commands if " ".join(one.words).startswith(name)} == NOT_RUN.keys()
    built, pushed = ([one for one in commands if one.words[1] == verb] for verb in ("build", "push"))
    tags = [one.words[one.words.index("-t") + 1] for one in built]
    assert [one.words[-1] for one in pushed] == tags
    for one in built:
        assert one.options == ("--platform", "-f", "-t")
        assert (ROOT / one.words[one.words.index("-f") + 1]).is_file()
        assert one.words[-1] == "."
    for one in commands:
        if one.words[0] == "kubectl":
            assert set(one.options) <= options_of(kubectl(), *subcommand(one.words)), one.words


def test_commands_within_the_text_have_existing_options() -> None:
    programs = {"kubectl": kubectl(), "helm": helm()}
    inline = re.findall(r"`((?:kubectl|helm) [^`]+)`", PAGE)
    assert len(inline) > 5
    for text in inline:
        one = Command(tuple(text.split()), "")
        assert set(one.options) <= options_of(programs[one.words[0]], *subcommand(one.words)), text


def test_the_helm_commands_install_two_operator_pods_and_a_lease(person: Person) -> None:
    install, test, pods = section("With Helm")
    assert "STATUS: deployed" in person.runs(install)
    assert re.search(r"Phase: +Succeeded", person.runs(test))
    found = person.runs(pods)
    assert len(re.findall(r"^pod/kvpilot-operator-\S+ +1/1 +Running", found, re.MULTILINE)) == 2
    assert "lease.coordination.k8s.io/kvpilot-operator" in found


def test_the_commands_that_serve_a_model_start_a_service_that_becomes_ready(person: Person) -> None:
    namespace, secret, apply, watch, describe = section("Serve a model")
    person.runs(namespace)
    person.runs(secret)
    assert person.rest.get("/api/v1/namespaces/models/secrets/hf")["data"]["token"]
    service = yaml.safe_load(apply.given)
    pushed = {one.words[-1] for one in commands_of(PAGE, TOKEN) if one.words[:2] == ("docker", "push")}
    assert service["spec"]["engine"]["image"] in pushed
    person.runs(apply)
    person.watches(watch, "READY", "True")
    assert "AccuracyVerified" in person.runs(describe)
    (curl,) = (one for one in commands_of(PAGE, TOKEN) if one.words[0] == "curl")
    assert served(person) == {json.loads(curl.words[-1])["model"]}


def served(person: Person) -> set[str]:
    """Return the models of the ready engines behind the page's service."""
    pods = person.rest.get("/api/v1/namespaces/models/pods?labelSelector=kvpilot.io/service=chat")["items"]
    ready = [pod for pod in pods if pod["status"]["containerStatuses"][0]["ready"]]
    told = [argument.partition("=") for pod in ready for argument in pod["spec"]["containers"][0]["args"]]
    return {value for option, _, value in told if option == "--served-model-name"}


def test_the_command_on_rights_lists_those_of_the_operator_and_no_secrets(person: Person) -> None:
    (listed,) = section("Who may do what")
    rights = person.runs(listed)
    assert re.search(r"^quantizedllmservices\.kvpilot\.io/status .*patch", rights, re.MULTILINE)
    assert "secrets" not in rights


def test_the_upgrade_command_makes_a_second_revision_of_the_release(person: Person) -> None:
    upgrade, *_ = section("Upgrade")
    assert "REVISION: 2" in person.runs(upgrade)


def test_the_uninstall_commands_remove_the_operator_then_services_then_the_crd(person: Person) -> None:
    uninstall, services, definition = section("Uninstall")
    person.runs(uninstall)
    assert not person.has(f"/apis/apps/v1/namespaces/{HOME}/deployments/kvpilot-operator")
    assert person.has("/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices/chat")
    assert served(person) == {"chat"}
    person.runs(services)
    for path in ("/apis/apps/v1/namespaces/models/deployments", "/api/v1/namespaces/models/services"):
        assert person.rest.get(path)["items"] == []
    person.runs(definition)


def test_the_commands_for_some_namespaces_install_an_operator_for_one_namespace(person: Person) -> None:
    namespace, install = section("Some namespaces only")
    person.runs(namespace)
    # test_chart_scope.py covers two operators with different scopes.
    person.runs(install, "--set=replicaCount=0")
    assert person.has("/apis/apps/v1/namespaces/kvpilot-team-a/deployments/kvpilot-team-a-operator")
    assert person.has("/apis/rbac.authorization.k8s.io/v1/namespaces/team-a/rolebindings/kvpilot.io:operator")
    person.runs(Command(("helm", "uninstall", *install.words[2:3], "--namespace", "kvpilot-team-a"), ""))


def test_helm_adopts_a_crd_that_was_applied_by_hand(person: Person) -> None:
    install, *_ = section("With Helm")
    _, label, annotate = section("Upgrade")
    *_, definition = section("Uninstall")
    person.runs(definition)
    person.runs(Command(("kubectl", "apply", "-f", "config/base/crds.yaml"), ""))
    assert "cannot be imported into the current release" in person.refused(install, "--dry-run=server")
    person.runs(label)
    person.runs(annotate)
    person.runs(install, "--dry-run=server")


def test_the_commands_for_plain_manifests_deploy_the_operator(person: Person) -> None:
    first, *alternatives, rollout = section("With plain manifests")
    for one, *more in ((first,), *((one, "--dry-run=server") for one in alternatives)):
        done = person.tries(one, *more)
        assert "deployment.apps/kvpilot-operator" in done.stdout
        wrong = re.sub(r"^(Warning: .*|ensure CRDs are installed first)\n", "", done.stderr, flags=re.MULTILINE)
        for line in wrong.splitlines():
            assert re.fullmatch(rf'.*: no matches for kind "({"|".join(ABSENT)})" in version \S+', line), line
    assert "successfully rolled out" in person.runs(rollout)


def test_a_users_own_overlay_sets_the_image(person: Person, tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", PAGE, re.DOTALL)
    base = os.path.relpath(ROOT / "config/base", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../kvpilot/config/base", base))
    shown = person.runs(Command(("kubectl", "kustomize", str(tmp_path)), ""))
    (deployment,) = (one for one in yaml.safe_load_all(shown) if one["kind"] == "Deployment")
    (pushed, _) = (one.words[-1] for one in commands_of(PAGE, TOKEN) if one.words[:2] == ("docker", "push"))
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == pushed
