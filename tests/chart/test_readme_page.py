"""The commands of README's section "On your cluster", run in bash in the local cluster, with a cheap engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from support.pages_shell import ROOT, Shell, blocks

pytestmark = pytest.mark.timeout(1800)

# Commands that the test does not run, with the reason.
ELSEWHERE = {
    "docker build": "there is no container engine, and its base images come from the network",
    "docker push": "there is no registry",
    "pip install": "tests/images/test_bare_install.py",
}


@pytest.fixture
def shell(cluster: LocalCluster, installable: Path, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path, cluster.kubeconfig, installable)
    shell.remove_kvpilot()
    shell("kubectl delete namespace models kvpilot-system --ignore-not-found")  # left behind by tests of other pages
    yield shell
    shell("helm uninstall kvpilot --namespace kvpilot-system --ignore-not-found")
    shell("kubectl delete crd quantizedllmservices.kvpilot.io --ignore-not-found")
    # Delete the namespaces first, so that no new pods start. Then end the engine without a minute of draining.
    shell("kubectl delete namespace models kvpilot-system --wait=false")
    shell("kubectl -n models delete pods --all --grace-period=1")
    shell("kubectl delete namespace models kvpilot-system --ignore-not-found")


def test_pasted_commands_install_the_operator_and_explain_a_ready_service(shell: Shell) -> None:
    text = (ROOT / "README.md").read_text().partition("\n## On your cluster\n")[2].partition("\n## ")[0]
    (block,) = blocks(text)
    assert all(name in block for name in ELSEWHERE)
    pasted = "".join(line for line in block.splitlines(keepends=True) if not line.startswith(tuple(ELSEWHERE)))
    told = shell(pasted)
    assert "quantizedllmservice.kvpilot.io/chat condition met" in told
    assert "models/chat: auto serves" in told.partition("condition met")[2]
