"""The local cluster runs pods as a kubelet would, on a real control plane."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localcluster import controlplane, procs
from localcluster.cluster import LocalCluster
from localcluster.pod import LOGS_ANNOTATION
from localcluster.rest import ApiError, until

Json = dict[str, Any]

# Answers every request with its own name; healthy while the file HEALTHY does not say otherwise.
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


def field(path: str) -> Json:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def container(**more: Any) -> Json:
    return {"name": "main", "image": "python:3.11", **more}


def web(version: str, **more: Any) -> Json:
    """A container that serves its version over HTTP."""
    env = [{"name": "POD_IP", **field("status.podIP")}, {"name": "NAME", "value": version}]
    probe = {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    return container(
        command=["python3", "-c", SERVER],
        env=env,
        ports=[{"name": "http", "containerPort": 8000}],
        readinessProbe=probe,
        volumeMounts=[{"name": "state", "mountPath": "/state"}],
        **more,
    )


class Tenant:
    """One namespace of the cluster."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.core = f"/api/v1/namespaces/{namespace}"
        self.apps = f"/apis/apps/v1/namespaces/{namespace}"

    def run(self, name: str, *containers: Json, labels: Json | None = None, **spec: Any) -> None:
        spec.setdefault("volumes", [{"name": "state", "emptyDir": {}}])
        body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"containers": list(containers), **spec}}
        path = f"{self.core}/pods"
        until(lambda: self.cluster.rest.get(f"{self.core}/serviceaccounts/default").get("secrets"), "service account")
        self.cluster.rest.create(path, body)

    def pod(self, name: str) -> Json:
        found: Json = self.cluster.rest.get(f"{self.core}/pods/{name}")
        return found

    def status(self, name: str) -> Json:
        found: Json = (self.pod(name)["status"].get("containerStatuses") or [{}])[0]
        return found

    def wait(self, name: str, question: Callable[[Json], Any], what: str, seconds: float = 20) -> Json:
        """Wait for something to be true of the first container's status."""
        return dict(until(lambda: question(s := self.status(name)) and s, f"{name}: {what}", seconds=seconds))

    def wait_ready(self, *names: str) -> None:
        for name in names:
            self.wait(name, lambda status: status.get("ready"), "ready")

    def log(self, name: str, run: int = 0) -> str:
        folder = self.pod(name)["metadata"]["annotations"][LOGS_ANNOTATION]
        return (Path(folder) / "main" / f"{run}.log").read_text()

    def delete(self, name: str, **more: Any) -> None:
        self.cluster.rest.delete(f"{self.core}/pods/{name}", **more)

    def until_gone(self, name: str, seconds: float = 20) -> None:
        def gone() -> bool:
            try:
                self.pod(name)
            except ApiError as error:
                return error.status == 404
            return False

        until(gone, f"{name} is gone", seconds=seconds)

    def serve(self, name: str, selector: Json) -> str:
        body = {
            "metadata": {"name": name},
            "spec": {"selector": selector, "ports": [{"port": 80, "targetPort": "http"}]},
        }
        return str(self.cluster.rest.create(f"{self.core}/services", body)["spec"]["clusterIP"])


@pytest.fixture
def tenant(cluster: LocalCluster, namespace: str) -> Tenant:
    return Tenant(cluster, namespace)


def fetch(address: str, port: int = 80, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def running_processes(mark: str) -> list[int]:
    """Processes whose environment names `mark`, shims left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


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
    answers: list[str] = []
    faults: list[str] = []
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            try:
                answers.append(fetch(address))
            except OSError as error:
                faults.append(repr(error))

    clients = [threading.Thread(target=hammer) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        time.sleep(0.5)
        tenant.cluster.rest.merge(f"{tenant.core}/services/switched", {"spec": {"selector": {"version": "new"}}})
        until(lambda: answers and answers[-1] == "new", "the new version answers")
        tenant.delete("old")
        tenant.until_gone("old")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert faults == []
    assert {"old", "new"} == set(answers)
    assert len(answers) > 100


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


def test_a_failing_liveness_probe_restarts_the_container(tenant: Tenant) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/state/hung"]}, "periodSeconds": 1, "failureThreshold": 1}
    mounts = [{"name": "state", "mountPath": "/state"}]
    # The first run hangs itself up; the second finds the file gone.
    script = (
        "[ -e /state/once ] || { touch /state/once /state/hung; trap 'rm /state/hung; exit 3' TERM; }; sleep 60 & wait"
    )
    tenant.run("hangs", container(command=["bash", "-c", script], livenessProbe=probe, volumeMounts=mounts))
    status = tenant.wait("hangs", lambda status: status.get("restartCount") == 1 and status["ready"], "restarted")
    assert status["lastState"]["terminated"]["exitCode"] == 3


def test_liveness_and_readiness_wait_for_the_startup_probe(tenant: Tenant) -> None:
    up = {"exec": {"command": ["test", "-e", "/state/up"]}, "periodSeconds": 1, "failureThreshold": 1}
    tenant.run(
        "slow",
        container(
            command=["bash", "-c", "sleep 2.5; touch /state/up; exec sleep 600"],
            startupProbe={**up, "failureThreshold": 10},
            livenessProbe=up,
            readinessProbe=up,
            volumeMounts=[{"name": "state", "mountPath": "/state"}],
        ),
        terminationGracePeriodSeconds=1,
    )
    status = tenant.wait("slow", lambda status: status.get("state", {}).get("running"), "running")
    assert (status["started"], status["ready"]) == (False, False)
    tenant.wait_ready("slow")
    assert tenant.status("slow")["restartCount"] == 0


def test_a_crashing_container_is_restarted_with_growing_pauses(tenant: Tenant) -> None:
    tenant.run("crashes", container(command=["sh", "-c", "echo run; exit 7"]))

    def backing_off(status: Json) -> bool:
        return bool(status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff")

    assert tenant.wait("crashes", backing_off, "in back-off")["ready"] is False
    status = tenant.wait("crashes", lambda status: status.get("restartCount", 0) >= 3, "three restarts")
    assert status["lastState"]["terminated"]["exitCode"] == 7
    times = [
        (Path(tenant.pod("crashes")["metadata"]["annotations"][LOGS_ANNOTATION]) / "main" / f"{run}.log")
        .stat()
        .st_mtime
        for run in range(4)
    ]
    first, second, third = (after - before for before, after in itertools.pairwise(times))
    assert first < 0.9 <= second < third


def test_the_last_words_of_a_failed_container_are_in_its_status(tenant: Tenant) -> None:
    script = "for i in $(seq 200); do echo line $i; done; echo the reason >&2; exit 78"
    tenant.run(
        "words",
        container(command=["bash", "-c", script], terminationMessagePolicy="FallbackToLogsOnError"),
        restartPolicy="Never",
    )
    end = tenant.wait("words", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert end["exitCode"] == 78
    assert end["reason"] == "Error"
    assert end["message"].endswith("the reason\n")
    assert len(end["message"].splitlines()) == 80
    assert tenant.pod("words")["status"]["phase"] == "Failed"


def test_a_message_file_is_preferred_and_a_finished_pod_succeeds(tenant: Tenant) -> None:
    tenant.run("file", container(command=["sh", "-c", "echo -n kept > /dev/termination-log"]), restartPolicy="Never")
    end = tenant.wait("file", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert (end["exitCode"], end["reason"], end["message"]) == (0, "Completed", "kept")
    assert tenant.pod("file")["status"]["phase"] == "Succeeded"


def test_deletion_unreadies_then_runs_prestop_then_sigterm_then_waits(tenant: Tenant) -> None:
    script = "trap 'echo term; sleep 1; echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    hook = {
        "preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /state/log; sleep 1; echo hooked >> /state/log"]}}
    }
    mounts = [{"name": "state", "mountPath": "/state"}]
    tenant.run("ends", container(command=["bash", "-c", script], lifecycle=hook, volumeMounts=mounts))
    tenant.wait_ready("ends")
    until(lambda: tenant.log("ends") == "up\n", "its first words")
    logs = Path(tenant.pod("ends")["metadata"]["annotations"][LOGS_ANNOTATION]) / "main/0.log"
    state = tenant.cluster.folder / "node/pods" / tenant.pod("ends")["metadata"]["uid"] / ".volumes/state/log"
    tenant.delete("ends")

    def unready() -> bool:
        conditions = {one["type"]: one["status"] for one in tenant.pod("ends")["status"]["conditions"]}
        return bool(conditions["Ready"] == "False")

    until(unready, "not ready while it still runs", seconds=0.9)
    assert logs.read_text() == "up\n"
    until(lambda: state.read_text() == "hook\nhooked\n", "the hook has ended")
    tenant.until_gone("ends")
    assert logs.read_text() == "up\nterm\nbye\n"


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(tenant: Tenant) -> None:
    tenant.run(
        "deaf",
        container(
            command=["bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"], env=[{"name": "MARK", "value": "deaf"}]
        ),
        terminationGracePeriodSeconds=1,
    )
    tenant.wait_ready("deaf")
    assert running_processes("deaf")
    started = time.monotonic()
    tenant.delete("deaf")
    tenant.until_gone("deaf")
    assert 1 <= time.monotonic() - started < 4
    assert running_processes("deaf") == []


def test_a_killed_agent_comes_back_to_the_same_processes(tenant: Tenant) -> None:
    def marked(name: str, script: str) -> Json:
        return container(command=["bash", "-c", script], env=[{"name": "MARK", "value": name}])

    tenant.run("stays", marked("stays", "exec sleep 600"))
    tenant.run("ends", marked("ends", "exec sleep 2"), restartPolicy="Never")
    tenant.run("goes", marked("goes", "exec sleep 600"))
    tenant.wait_ready("stays", "ends", "goes")
    before = tenant.pod("stays")["status"], running_processes("stays")
    tenant.cluster.agent.send_signal(signal.SIGKILL)
    tenant.cluster.agent.wait()
    tenant.delete("goes", grace=0)
    time.sleep(2)
    assert running_processes("stays") == before[1]
    tenant.cluster.start_agent()
    end = tenant.wait("ends", lambda s: s["state"].get("terminated"), "its end is told")["state"]["terminated"]
    assert end["exitCode"] == 0
    until(lambda: running_processes("goes") == [], "what was deleted meanwhile is ended")
    after = tenant.pod("stays")["status"]
    assert (after["podIP"], after["containerStatuses"]) == (before[0]["podIP"], before[0]["containerStatuses"])
    assert running_processes("stays") == before[1]
    tenant.delete("stays", grace=1)
    tenant.until_gone("stays")
    assert running_processes("stays") == []


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


def test_an_unknown_image_waits_with_a_reason(tenant: Tenant) -> None:
    tenant.run("unknown", container(image="nowhere/nothing:1"))
    status = tenant.wait("unknown", lambda s: "Err" in s.get("state", {}).get("waiting", {}).get("reason", ""), "waits")
    assert "nowhere/nothing:1" in status["state"]["waiting"]["message"]
    assert tenant.pod("unknown")["status"]["phase"] == "Pending"


def test_a_command_that_does_not_exist_is_a_start_error(tenant: Tenant) -> None:
    tenant.run("typo", container(command=["no-such-program"]), restartPolicy="Never")
    end = tenant.wait("typo", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert end["reason"] == "StartError"
    assert "no-such-program" in end["message"]


def test_variables_come_from_fields_secrets_configmaps_and_resources(tenant: Tenant) -> None:
    rest = tenant.cluster.rest
    rest.create(f"{tenant.core}/configmaps", {"metadata": {"name": "c"}, "data": {"COLOUR": "blue", "file": "content"}})
    rest.create(f"{tenant.core}/secrets", {"metadata": {"name": "s"}, "stringData": {"word": "hush"}})
    env = [
        {"name": "POD_IP", **field("status.podIP")},
        {"name": "APP", **field("metadata.labels['app']")},
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}},
        {"name": "MIB", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "JOINED", "value": "$(WORD)-$(COLOUR)-$$(WORD)-$(NOBODY)"},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no", "optional": True}}},
    ]
    script = "import json, os, pathlib; print(json.dumps([dict(os.environ), pathlib.Path('/conf/file').read_text()]))"
    tenant.run(
        "env",
        container(
            command=["python3", "-c"],
            args=[script],
            env=env,
            envFrom=[{"configMapRef": {"name": "c"}}],
            resources={"limits": {"memory": "64Mi"}},
            volumeMounts=[{"name": "conf", "mountPath": "/conf"}],
        ),
        labels={"app": "shown"},
        restartPolicy="Never",
        volumes=[{"name": "conf", "configMap": {"name": "c"}}],
    )
    tenant.wait("env", lambda s: s.get("state", {}).get("terminated"), "ended")
    shown, content = json.loads(tenant.log("env"))
    assert content == "content"
    assert shown["POD_IP"] == tenant.pod("env")["status"]["podIP"]
    assert (shown["APP"], shown["WORD"], shown["MIB"], shown["COLOUR"]) == ("shown", "hush", "64", "blue")
    assert shown["JOINED"] == "hush-blue-$(WORD)-$(NOBODY)"
    assert "ABSENT" not in shown


def test_a_missing_configmap_is_waited_for(tenant: Tenant) -> None:
    tenant.run("early", container(command=["sleep", "60"], envFrom=[{"configMapRef": {"name": "late"}}]))
    tenant.wait(
        "early", lambda s: s.get("state", {}).get("waiting", {}).get("reason") == "CreateContainerConfigError", "waits"
    )
    tenant.cluster.rest.create(f"{tenant.core}/configmaps", {"metadata": {"name": "late"}, "data": {"A": "b"}})
    tenant.wait_ready("early")
    tenant.delete("early", grace=1)


def test_init_containers_run_one_after_the_other_before_the_rest(tenant: Tenant) -> None:
    mounts = [{"name": "state", "mountPath": "/state"}]

    def step(name: str, script: str) -> Json:
        return {**container(command=["sh", "-c", script], volumeMounts=mounts), "name": name}

    tenant.run(
        "steps",
        step("main", "cat /state/log"),
        initContainers=[step("a", "sleep 0.3; echo a >> /state/log"), step("b", "echo b >> /state/log")],
        restartPolicy="Never",
    )
    tenant.wait("steps", lambda s: s.get("state", {}).get("terminated"), "ended")
    assert tenant.log("steps") == "a\nb\n"
    assert [
        one["state"]["terminated"]["exitCode"] for one in tenant.pod("steps")["status"]["initContainerStatuses"]
    ] == [0, 0]


def test_pretended_gpus_are_scheduled_by_number(tenant: Tenant) -> None:
    for name in ("fits", "waits"):
        tenant.run(name, container(command=["sleep", "60"], resources={"limits": {"nvidia.com/gpu": "3"}}))
    first, second = ("fits", "waits") if "nodeName" in until_bound(tenant)["spec"] else ("waits", "fits")

    def unschedulable() -> bool:
        conditions = {one["type"]: one for one in tenant.pod(second)["status"].get("conditions") or []}
        return "Insufficient nvidia.com/gpu" in conditions.get("PodScheduled", {}).get("message", "")

    until(unschedulable, "the other is told why")
    tenant.delete(first, grace=0)
    tenant.wait_ready(second)
    tenant.delete(second, grace=0)


def until_bound(tenant: Tenant) -> Json:
    """The pod `fits` once one of the two is bound."""
    until(lambda: any("nodeName" in tenant.pod(name)["spec"] for name in ("fits", "waits")), "one is bound")
    return tenant.pod("fits")


def test_a_cluster_whose_starter_was_killed_is_ended_at_the_next_start(tmp_path: Path) -> None:
    # The record of a killed starter, and one whose number now belongs to someone else.
    child = procs.spawn(tmp_path / "etcd.pid", ["sleep", "600"], log=tmp_path / "log")
    mine = json.dumps({"pid": os.getpid(), "start": 1})
    (tmp_path / "kube-apiserver.pid").write_text(mine)
    assert controlplane.sweep(tmp_path) == ["etcd"]
    assert child.poll() is not None
    assert not list(tmp_path.glob("*.pid"))


def test_the_versions_are_what_the_documentation_says(cluster: LocalCluster) -> None:
    assert re.fullmatch(r"v1\.20\.2", cluster.rest.get("/version")["gitVersion"])


def test_logs_are_read_through_the_api_server(tenant: Tenant) -> None:
    tenant.run("talks", container(command=["sh", "-c", "echo one; echo two; sleep 60"]))
    tenant.wait_ready("talks")
    path = f"{tenant.core}/pods/talks/log"
    assert until(lambda: tenant.cluster.rest.call("GET", path) == "one\ntwo\n", "both lines")
    assert tenant.cluster.rest.call("GET", f"{path}?tailLines=1") == "two\n"
    with pytest.raises(ApiError, match="no such log"):
        tenant.cluster.rest.call("GET", f"{path}?previous=true")
    tenant.delete("talks", grace=0)
