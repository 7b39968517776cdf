"""/metrics checked by TokenReview and SubjectAccessReview of a real API server, with the operator's own rights."""

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry, Gauge

from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.rest import HANGS, until
from kvpilot_localcluster.toolbox.helm import render
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.control.http import MetricsAccess, serve_http
from support.rights import until_may

CHART = Path(__file__).parents[2] / "charts" / "kvpilot"
CORE = "/api/v1/namespaces/default"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
READER = "default:kvpilot-operator:metrics-reader"


def token(plane: ControlPlane, account: str) -> str:
    """Return a new token of a ServiceAccount."""
    body = {"spec": {"audiences": ["https://kubernetes.default.svc"]}}
    answer = plane.rest.create(f"{CORE}/serviceaccounts/{account}/token", body)
    return str(answer["status"]["token"])


def user(account: str) -> str:
    return f"system:serviceaccount:default:{account}"


def bind(plane: ControlPlane, name: str, role: str, account: str) -> None:
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    body = {"metadata": {"name": name}, "roleRef": ref, "subjects": [subject]}
    plane.rest.create(f"{RBAC}/clusterrolebindings", body)


@pytest.fixture(scope="module", autouse=True)
def accounts(plane: ControlPlane) -> None:
    """Create the chart's roles, a Prometheus account that may read metrics, and a tenant's account that may not."""
    until(lambda: plane.rest.get(f"{CORE}/serviceaccounts/default"), "the default account")
    for name in ("kvpilot-operator", "prometheus", "tenant"):
        plane.rest.create(f"{CORE}/serviceaccounts", {"metadata": {"name": name}})
    values = {"metrics": {"authentication": True}, "crds": {"enabled": False}}
    for one in render(CHART, values, "--skip-tests", namespace="default"):
        if one["kind"] in ("ClusterRole", "ClusterRoleBinding"):
            plane.rest.create(f"{RBAC}/{one['kind'].lower()}s", one)
    bind(plane, "prometheus", READER, "prometheus")
    page = {"path": "/metrics", "verb": "get"}
    until_may(plane.rest, user("prometheus"), nonResourceAttributes=page)
    for group, kind in (("authentication", "tokenreviews"), ("authorization", "subjectaccessreviews")):
        right = {"group": f"{group}.k8s.io", "resource": kind, "verb": "create"}
        until_may(plane.rest, user("kvpilot-operator"), resourceAttributes=right)


@pytest_asyncio.fixture
async def port(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[int]:
    """Serve the operator's endpoints. They query the API server as the operator's own ServiceAccount."""
    known = yaml.safe_load(plane.kubeconfig.read_text())
    known["users"] = [{"name": "operator", "user": {"token": token(plane, "kvpilot-operator")}}]
    known["contexts"][0]["context"]["user"] = "operator"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(known))
    configuration = Configuration()
    await config.load_kube_config(config_file=str(tmp_path / "kubeconfig"), client_configuration=configuration)
    cluster = Cluster(ApiClient(configuration))
    registry = CollectorRegistry()
    Gauge("kvpilot_leader", "-", registry=registry).set(1)
    number = free_port()
    runner = await serve_http("127.0.0.1", number, registry, asyncio.Event(), MetricsAccess(cluster))
    yield number
    await runner.cleanup()
    await cluster.close()


async def get(port: int, path: str, authorization: str | None = None) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    return await asyncio.to_thread(ask)


async def test_an_account_with_the_right_reads_metrics(plane: ControlPlane, port: int) -> None:
    status, page = await get(port, "/metrics", f"Bearer {token(plane, 'prometheus')}")
    assert (status, "kvpilot_leader 1.0" in page) == (200, True)


async def test_an_account_without_the_right_gets_403_and_the_name_of_the_right(plane: ControlPlane, port: int) -> None:
    status, text = await get(port, "/metrics", f"Bearer {token(plane, 'tenant')}")
    assert status == 403
    assert "system:serviceaccount:default:tenant may not get /metrics" in text
    assert "kvpilot_leader" not in text


@pytest.mark.parametrize("header", [None, "Bearer made-up", "Basic cHJvbWV0aGV1czp4"])
async def test_without_a_valid_token_nobody_reads_metrics(port: int, header: str | None) -> None:
    status, text = await get(port, "/metrics", header)
    assert (status, "kvpilot_leader" in text) == (401, False)


async def test_the_token_of_a_deleted_account_is_refused(plane: ControlPlane, port: int) -> None:
    plane.rest.create(f"{CORE}/serviceaccounts", {"metadata": {"name": "gone"}})
    bind(plane, "gone", READER, "gone")
    kept = token(plane, "gone")
    plane.rest.delete(f"{CORE}/serviceaccounts/gone")

    async def answer() -> int:
        return (await get(port, "/metrics", f"Bearer {kept}"))[0]

    # The API server's authorizer reads a cache of accounts, which lags behind its storage.
    began = time.monotonic()
    while await answer() != 401:
        assert time.monotonic() - began < HANGS


async def test_the_kubelets_probes_need_no_token(port: int) -> None:
    assert (await get(port, "/healthz"))[0] == 200
    assert (await get(port, "/readyz"))[0] == 503
