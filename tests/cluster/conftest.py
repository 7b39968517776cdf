"""Real clusters on loopback, started once per test session."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster import build, procs
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.rest import Rest, until
from support.operator_pair import Operator
from support.tenants import Tenant

CRDS = Path(__file__).parents[2] / "crds"
_NUMBERS = itertools.count(1)


def _definitions() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Yield the local cluster with the CRD and one node of four simulated GPUs. Containers restart after one second."""
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(folder, backoff=1.0, resources={"nvidia.com/gpu": "4"}) as running:
        define(running.rest, _definitions())
        yield running
        running.check()


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Yield a control plane without nodes and without the CRD, with the namespaces `models` and `empty`."""
    with ControlPlane(tmp_path_factory.mktemp("plane"), build.build()) as running:
        for name in ("models", "empty"):
            running.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})
        yield running
        running.check()


@pytest.fixture
def namespace(cluster: LocalCluster) -> Iterator[str]:
    """Create a namespace on `cluster` for one test, and delete it afterwards."""
    name = f"test-{next(_NUMBERS)}"
    cluster.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    # Do not wait until the pods are gone: that can take their grace period.
    cluster.rest.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def tenant(cluster: LocalCluster, namespace: str) -> Tenant:
    """Return a `Tenant`: the namespace with helpers for tests."""
    return Tenant(cluster, namespace)


@pytest.fixture(scope="module")
def operator(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Start an operator process that is connected to `cluster`, and yield it."""
    folder: Path = tmp_path_factory.mktemp("operator")
    one = Operator("a", folder, cluster.kubeconfig)
    try:
        until(lambda: answers(one), "the operator is ready")
        yield one
    finally:
        procs.end(folder / "operator-a.pid", grace=10)


def answers(operator: Operator) -> bool:
    try:
        return operator.ready
    except OSError:
        return False


@pytest.fixture
def rest(cluster: LocalCluster, operator: Operator) -> Rest:
    """Return a client with the administrator's rights on `cluster`, while the operator runs."""
    return cluster.rest
