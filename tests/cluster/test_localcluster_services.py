"""Services of the local cluster route only to the ready pods that they select."""

import socket
import threading
import urllib.request
from typing import Any

import pytest

from kvpilot_localcluster.rest import HANGS, until
from support.tenants import Json, Tenant, container, field

# Server that answers every request with its own name. It is healthy until the file /state/sick exists.
SERVER = """
import http.server, os, pathlib, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sick = self.path == "/healthz" and pathlib.Path("/state/sick").exists()
        self.send_response(503 if sick else 200)
        self.end_headers()
        self.wfile.write(os.environ["NAME"].encode())
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler)
def stop(number, frame):
    print("SIGTERM", flush=True)
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
server.serve_forever()
"""


def web(version: str, **more: Any) -> Json:
    """Return a container that serves its version over HTTP."""
    env = [{"name": "POD_IP", **field("status.podIP")}, {"name": "NAME", "value": version}]
    probe = {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    probe["timeoutSeconds"] = 60  # a slow machine must not fail the probe
    return container(
        command=["python3", "-c", SERVER],
        env=env,
        ports=[{"name": "http", "containerPort": 8000}],
        readinessProbe=probe,
        volumeMounts=[{"name": "state", "mountPath": "/state"}],
        **more,
    )


def fetch(address: str, port: int = 80, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=HANGS) as answer:
        return str(answer.read().decode())


def test_a_deployment_becomes_available_and_its_service_answers(tenant: Tenant) -> None:
    labels = {"app": "web"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [web("one")], "volumes": [{"name": "state", "emptyDir": {}}]},
    }
    body = {
        "metadata": {"name": "web"},
        "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
    }
    tenant.cluster.rest.create(f"{tenant.apps}/deployments", body)
    address = tenant.serve("web", labels)
    path = f"{tenant.apps}/deployments/web"
    until(lambda: tenant.cluster.rest.get(path)["status"].get("availableReplicas") == 2, "two available replicas")
    assert until(lambda: fetch(address), "an answer through the service") == "one"


def test_a_service_without_ready_endpoints_refuses_connections(tenant: Tenant) -> None:
    address = tenant.serve("nobody", {"app": "nobody"})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, 80), 1)


def test_a_selector_switch_loses_no_request(tenant: Tenant) -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "1"]}}}
    tenant.run("old", web("old", lifecycle=hook), labels={"version": "old"})
    tenant.run("new", web("new"), labels={"version": "new"})
    address = tenant.serve("switched", {"version": "old"})
    tenant.wait_ready("old", "new")
    until(lambda: fetch(address) == "old", "the old version answers")
    answers: list[list[str]] = [[], [], [], []]
    faults: list[str] = []
    stop = threading.Event()

    def hammer(mine: list[str]) -> None:
        while not stop.is_set():
            try:
                mine.append(fetch(address))
            except OSError as error:
                faults.append(repr(error))

    def each(more: int) -> list[int]:
        return [len(mine) + more for mine in answers]

    def reached(counts: list[int]) -> bool:
        return all(len(mine) >= count for mine, count in zip(answers, counts, strict=True))

    clients = [threading.Thread(target=hammer, args=(mine,)) for mine in answers]
    for client in clients:
        client.start()
    try:
        many = each(12)
        until(lambda: reached(many), "the old version has clients")
        tenant.cluster.rest.merge(f"{tenant.core}/services/switched", {"spec": {"selector": {"version": "new"}}})
        # Wait for each client, because the old version may still be answering one of its requests.
        until(lambda: all(mine[-1] == "new" for mine in answers), "the new version answers")
        tenant.delete("old")
        tenant.until_gone("old")
        many = each(12)
        until(lambda: reached(many), "the new version has clients")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert faults == []
    assert {"old", "new"} == {one for mine in answers for one in mine}


def test_a_failing_readiness_probe_takes_the_pod_out_of_its_service(tenant: Tenant) -> None:
    tenant.run("sick", web("sick"), labels={"app": "sick"})
    address = tenant.serve("sick", {"app": "sick"})
    tenant.wait_ready("sick")
    until(lambda: fetch(address), "an answer")
    volume = tenant.cluster.folder / "node/pods" / tenant.pod("sick")["metadata"]["uid"] / ".volumes/state"
    (volume / "sick").touch()
    tenant.wait("sick", lambda status: status["ready"] is False, "not ready")
    conditions = {one["type"]: one["status"] for one in tenant.pod("sick")["status"]["conditions"]}
    assert conditions == {"PodScheduled": "True", "Initialized": "True", "Ready": "False", "ContainersReady": "False"}

    def refused() -> bool:
        try:
            fetch(address)
        except OSError:
            return True
        return False

    until(refused, "the service refuses")
    (volume / "sick").unlink()
    tenant.wait_ready("sick")
    assert until(lambda: fetch(address), "an answer again") == "sick"
    assert tenant.status("sick")["restartCount"] == 0


def test_pods_of_one_name_in_two_namespaces_have_their_own_addresses(tenant: Tenant) -> None:
    tenant.cluster.rest.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    other = Tenant(tenant.cluster, "other")
    try:
        for one in (tenant, other):
            one.run("twin", web(one.core))
        for one in (tenant, other):
            one.wait_ready("twin")
            assert fetch(one.pod("twin")["status"]["podIP"], 8000) == one.core
        addresses = {one.pod("twin")["status"]["podIP"] for one in (tenant, other)}
        assert len(addresses) == 2
        assert all(address.startswith("127.0.") and address != "127.0.0.1" for address in addresses)
    finally:
        tenant.cluster.rest.delete("/api/v1/namespaces/other")
