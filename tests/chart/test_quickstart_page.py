"""The commands of docs/quickstart.md, with the operator outside the cluster and cheap engines."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import until
from support.pages_shell import ROOT, Shell, blocks, section

pytestmark = pytest.mark.timeout(1800)

RUNTIME = "registry.example.com/kvpilot/runtime:0.1.0"
# Commands of the page that the test does not run as they are, with the reason.
ELSEWHERE = {
    "export KUBECONFIG": "the shell has it",
    "pip install": "tests/images/test_bare_install.py",
    "kvpilot-operator": "started below, on a free port",
    "kubectl get qllm -w": "does not end",
}


def commands(block: str) -> str:
    """Return the lines of a block that this test runs as they are."""
    return "".join(line for line in block.splitlines(keepends=True) if not line.strip().startswith(tuple(ELSEWHERE)))


@pytest.fixture(scope="module")
def shell(cluster: LocalCluster, installable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "crds").symlink_to(ROOT / "crds")
    (folder / "examples").mkdir()
    for name, image in (
        ("smollm2", "kvpilot/runtime-smollm2:dev"),
        ("llama3-8b-h200", "ghcr.io/kvpilot/runtime:0.1.0"),
    ):
        text = (ROOT / f"examples/{name}.yaml").read_text()
        assert image in text
        (folder / f"examples/{name}.yaml").write_text(text.replace(image, RUNTIME))
    shell = Shell(folder, cluster.kubeconfig, installable)
    shell.remove_kvpilot()
    yield shell
    shell("kubectl delete crd quantizedllmservices.kvpilot.io --ignore-not-found")


@pytest.fixture(scope="module")
def operator(shell: Shell, cluster: LocalCluster) -> Iterator[None]:
    """Run the operator as the page does."""
    text = section("quickstart.md", "On a cluster")
    assert all(word in section("quickstart.md", "Without a cluster") + text for word in ELSEWHERE)
    install, _ = blocks(text)
    shell(commands(install))
    # A server serves a kind some seconds after its definition is applied.
    shell("until kubectl get qllm; do sleep 1; done")
    program = [str(Path(sys.executable).with_name("kvpilot-operator")), "--http-host=127.0.0.1"]
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    with (shell.folder / "operator.log").open("wb") as log:
        process = subprocess.Popen([*program, f"--http-port={free_port()}"], env=environment, stdout=log, stderr=log)
    yield
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_the_commands_beside_the_demo_show_its_service(shell: Shell, operator: None) -> None:
    shell("kubectl apply -f examples/smollm2.yaml && kubectl wait qllm/smollm2 --for=condition=Ready --timeout=10m")
    (look,) = blocks(section("quickstart.md", "Without a cluster"))
    assert "smollm2" in shell(commands(look))


def test_a_service_is_applied_and_can_be_asked(shell: Shell, operator: None) -> None:
    _, apply = blocks(section("quickstart.md", "On a cluster"))
    assert "created" in shell(commands(apply))
    until(
        lambda: "Reconciling" in shell("kubectl get qllm -o jsonpath='{.items[*].status.conditions[*].type}'"),
        "a status",
    )
    (name,) = shell("kubectl get qllm -o name | grep -v smollm2").split()
    service = name.rpartition("/")[2]
    assert service in shell(f"kubectl kvpilot why {service}")
    assert "Ready" in shell(f"kubectl kvpilot status {service}")
