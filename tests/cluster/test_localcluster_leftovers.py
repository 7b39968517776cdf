"""No process outlives its pod or the cluster, checked over the whole machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpilot_localcluster import procs
from kvpilot_localcluster.cluster import LocalCluster, down
from kvpilot_localcluster.rest import until
from support.tenants import Tenant, container


def running(mark: str) -> list[str]:
    """Return the command lines of processes that contain `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in line and int(folder.name) != os.getpid() and procs.start_time(int(folder.name)) is not None:
                found.append(line)
    return found


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Tenant]:
    """Yield a separate cluster, which the test may stop and kill."""
    with LocalCluster(tmp_path / "own", backoff=0.1) as cluster:
        yield Tenant(cluster, "default")


def run_family(tenant: Tenant, name: str, mark: str) -> None:
    """Create a pod whose process has a child, a grandchild in another session, and a hanging exec probe."""
    wait = f"tail -f /dev/null {mark}"
    script = f"trap '' TERM; {wait} & setsid sh -c '{wait}; true' & {wait}; true"
    probe = {"exec": {"command": ["sh", "-c", f"{wait}; true"]}, "periodSeconds": 1, "failureThreshold": 100}
    tenant.run(name, container(command=["bash", "-c", script], livenessProbe=probe), terminationGracePeriodSeconds=1)


def test_pods_that_are_deleted_while_they_start_leave_no_process(tenant: Tenant, tmp_path: Path) -> None:
    mark = str(tmp_path / "none")
    names = [f"pod-{number}" for number in range(24)]
    for number, name in enumerate(names):
        run_family(tenant, name, mark)
        if number >= 4:
            tenant.delete(names[number - 4], grace=number % 2)
    for name in names[-4:]:
        tenant.delete(name, grace=0)
    for name in names:
        tenant.until_gone(name)
    folder = tenant.cluster.folder / "node/pods"
    pods = {pod["metadata"]["uid"] for pod in tenant.cluster.rest.get("/api/v1/pods")["items"]}
    until(lambda: {entry.name for entry in folder.iterdir()} <= pods, "their folders are gone")
    assert running(mark) == []


def test_a_stopped_cluster_leaves_no_process(own: Tenant, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        run_family(own, name, str(tmp_path / "none"))
    own.wait_ready("one")
    own.cluster.stop()
    assert running(str(tmp_path)) == []


def test_a_cluster_ends_if_its_parent_is_killed(tmp_path: Path) -> None:
    # All processes of the pod have its folder in their command lines, and no other process uses that folder.
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom kvpilot_localcluster.cluster import LocalCluster\n"
        "LocalCluster(Path(sys.argv[1])).start()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "own")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "up\n"
            assert len(running(str(tmp_path))) >= 5
        finally:
            starter.kill()
    until(lambda: running(str(tmp_path)) == [], "all processes have ended")


def test_a_cluster_with_a_killed_agent_leaves_no_process(own: Tenant, tmp_path: Path) -> None:
    run_family(own, "runs", str(tmp_path / "none"))
    own.wait_ready("runs")
    for number in range(4):
        run_family(own, f"starts-{number}", str(tmp_path / "none"))
    own.cluster.agent.send_signal(signal.SIGKILL)
    own.cluster.agent.wait()
    until(lambda: running(str(tmp_path / "none")), "the processes that it started continue")
    assert down(tmp_path / "own")
    assert running(str(tmp_path)) == []
