"""The local cluster runs pods on a real control plane as a kubelet would, from start to end."""

import itertools
import json
import os
import re
import signal
import time
from pathlib import Path

from kvpilot_localcluster import controlplane, procs
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.pod import LOGS_ANNOTATION
from kvpilot_localcluster.rest import until
from support.tenants import Json, Tenant, container


def running_processes(mark: str) -> list[int]:
    """Return the processes, except shims, whose environment names `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


EACH_SECOND = {"periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 60}
"""Probe settings: the first failure counts, and a slow machine causes no failure."""


def test_a_failing_liveness_probe_restarts_the_container(tenant: Tenant) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/state/hung"]}, **EACH_SECOND}
    mounts = [{"name": "state", "mountPath": "/state"}]
    # The first run creates /state/hung, which makes the probe fail. It has set the trap before, so the file is removed
    # when the run ends, and the second run starts without the file.
    script = (
        "[ -e /state/once ] || { trap 'rm /state/hung; exit 3' TERM; touch /state/once /state/hung; }; sleep 900 & wait"
    )
    tenant.run("hangs", container(command=["bash", "-c", script], livenessProbe=probe, volumeMounts=mounts))
    status = tenant.wait("hangs", lambda status: status.get("restartCount") == 1 and status["ready"], "restarted")
    assert status["lastState"]["terminated"]["exitCode"] == 3


def test_liveness_and_readiness_wait_for_the_startup_probe(tenant: Tenant, tmp_path: Path) -> None:
    up = {"exec": {"command": ["test", "-e", "/state/up"]}, **EACH_SECOND}
    may_start, asked = tmp_path / "may-start", tmp_path / "asked"
    first = {"command": ["sh", "-c", f"echo >> {asked}; test -e /state/up"]}
    tenant.run(
        "slow",
        container(
            command=["bash", "-c", f"until [ -e {may_start} ]; do sleep 0.1; done; touch /state/up; exec sleep 900"],
            startupProbe={**up, "exec": first, "failureThreshold": 900},
            livenessProbe=up,
            readinessProbe=up,
            volumeMounts=[{"name": "state", "mountPath": "/state"}],
        ),
        terminationGracePeriodSeconds=1,
    )
    status = tenant.wait("slow", lambda status: status.get("state", {}).get("running"), "running")
    assert (status["started"], status["ready"]) == (False, False)
    until(lambda: asked.exists() and len(asked.read_text()) >= 3, "the liveness probe would have failed by now")
    may_start.touch()
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
    _, second, third = (after - before for before, after in itertools.pairwise(times))
    assert second >= 0.9  # pauses of one and then two seconds, longer on a busy machine
    assert third >= 1.9


def test_a_deleted_pod_becomes_unready_then_runs_prestop_then_gets_sigterm(tenant: Tenant) -> None:
    # Each step waits until the test has seen the previous one.
    until_there = "until [ -e /state/{} ]; do sleep 0.1; done"
    script = (
        f"trap 'echo term; {until_there.format('end')}; echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    )
    stop = f"echo hook >> /state/log; {until_there.format('go')}; echo hooked >> /state/log"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", stop]}}}
    mounts = [{"name": "state", "mountPath": "/state"}]
    tenant.run("ends", container(command=["bash", "-c", script], lifecycle=hook, volumeMounts=mounts))
    tenant.wait_ready("ends")
    until(lambda: tenant.log("ends") == "up\n", "its first output")
    logs = Path(tenant.pod("ends")["metadata"]["annotations"][LOGS_ANNOTATION]) / "main/0.log"
    state = tenant.cluster.folder / "node/pods" / tenant.pod("ends")["metadata"]["uid"] / ".volumes/state/log"
    tenant.delete("ends")

    def unready() -> bool:
        conditions = {one["type"]: one["status"] for one in tenant.pod("ends")["status"]["conditions"]}
        return bool(conditions["Ready"] == "False")

    until(unready, "not ready while it still runs")
    assert logs.read_text() == "up\n"
    state.with_name("go").touch()
    until(lambda: state.read_text() == "hook\nhooked\n", "the hook has ended")
    state.with_name("end").touch()
    tenant.until_gone("ends")
    assert logs.read_text() == "up\nterm\nbye\n"


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(tenant: Tenant) -> None:
    tenant.run(
        "deaf",
        container(
            command=["bash", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"],
            env=[{"name": "MARK", "value": "deaf"}],
        ),
        terminationGracePeriodSeconds=1,
    )
    tenant.wait_ready("deaf")
    until(lambda: tenant.log("deaf") == "deaf\n", "it ignores SIGTERM from now on")
    assert running_processes("deaf")
    started = time.monotonic()
    tenant.delete("deaf")
    tenant.until_gone("deaf")
    assert time.monotonic() - started >= 1
    assert running_processes("deaf") == []


def test_a_restarted_agent_finds_the_processes_of_the_killed_one(tenant: Tenant, tmp_path: Path) -> None:
    def marked(name: str, script: str) -> Json:
        return container(command=["bash", "-c", script], env=[{"name": "MARK", "value": name}])

    tenant.run("stays", marked("stays", "exec sleep 600"))
    may_end = tmp_path / "may-end"
    tenant.run("ends", marked("ends", f"until [ -e {may_end} ]; do sleep 0.1; done"), restartPolicy="Never")
    tenant.run("goes", marked("goes", "exec sleep 600"))
    tenant.wait_ready("stays", "ends", "goes")
    for name in ("stays", "ends", "goes"):
        until(lambda name=name: running_processes(name), "the process runs, not only its shim")
    before = tenant.pod("stays")["status"], running_processes("stays")
    tenant.cluster.agent.send_signal(signal.SIGKILL)
    tenant.cluster.agent.wait()
    tenant.delete("goes", grace=0)
    may_end.touch()
    until(lambda: running_processes("ends") == [], "one process ends while no agent runs")
    assert running_processes("stays") == before[1]
    tenant.cluster.start_agent()
    end = tenant.wait("ends", lambda s: s["state"].get("terminated"), "the status reports its end")["state"][
        "terminated"
    ]
    assert end["exitCode"] == 0
    until(lambda: running_processes("goes") == [], "the pod that was deleted meanwhile ends")
    after = tenant.pod("stays")["status"]
    assert (after["podIP"], after["containerStatuses"]) == (before[0]["podIP"], before[0]["containerStatuses"])
    assert running_processes("stays") == before[1]
    tenant.delete("stays", grace=1)
    tenant.until_gone("stays")
    assert running_processes("stays") == []


def test_a_pod_keeps_its_gpus_if_the_agent_is_killed(tenant: Tenant) -> None:
    def shown(count: int) -> Json:
        script = 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 600'
        return container(command=["bash", "-c", script], resources={"limits": {"nvidia.com/gpu": str(count)}})

    def devices(name: str) -> set[str]:
        until(lambda: tenant.log(name).endswith("\n"), "it prints its GPUs")
        return set(tenant.log(name).strip().split(","))

    tenant.run("keeps", shown(3))
    tenant.wait_ready("keeps")
    kept, before = devices("keeps"), tenant.status("keeps")
    tenant.cluster.agent.send_signal(signal.SIGKILL)
    tenant.cluster.agent.wait()
    tenant.cluster.start_agent()
    tenant.run("comes", shown(1))
    tenant.wait_ready("comes")
    assert (len(kept), devices("comes") & kept) == (3, set())
    assert tenant.status("keeps") == before
    tenant.delete("keeps", grace=0)
    tenant.until_gone("keeps")
    tenant.run("follows", shown(3))
    tenant.wait_ready("follows")
    assert devices("follows") == kept
    for name in ("comes", "follows"):
        tenant.delete(name, grace=0)
        tenant.until_gone(name)


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


def test_simulated_gpus_are_scheduled_by_number(tenant: Tenant) -> None:
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
    """Wait until one of the pods `fits` and `waits` is bound to a node, and return the pod `fits`."""
    until(lambda: any("nodeName" in tenant.pod(name)["spec"] for name in ("fits", "waits")), "one is bound")
    return tenant.pod("fits")


def test_the_next_start_ends_a_cluster_whose_parent_was_killed(tmp_path: Path) -> None:
    # One record names a killed process, and one a process ID that another process has now.
    child = procs.spawn(tmp_path / "etcd.pid", ["sleep", "600"], log=tmp_path / "log")
    mine = json.dumps({"pid": os.getpid(), "start": 1})
    (tmp_path / "kube-apiserver.pid").write_text(mine)
    assert controlplane.sweep(tmp_path) == ["etcd"]
    assert child.poll() is not None
    assert not list(tmp_path.glob("*.pid"))


def test_the_documentation_has_the_versions_of_the_programs(cluster: LocalCluster) -> None:
    assert re.fullmatch(r"v1\.20\.2", cluster.rest.get("/version")["gitVersion"])


def test_a_running_pod_is_ready_while_its_readiness_gate_is_open(tenant: Tenant) -> None:
    gate = {"conditionType": "my.io/gate"}
    tenant.run("gated", container(command=["sleep", "900"]), readinessGates=[gate], terminationGracePeriodSeconds=1)
    tenant.wait_ready("gated")
    path = f"{tenant.core}/pods/gated/status"

    def ready() -> str:
        return next(one["status"] for one in tenant.pod("gated")["status"]["conditions"] if one["type"] == "Ready")

    assert ready() == "False"
    for word in ("True", "False"):
        condition = {"type": gate["conditionType"], "status": word}
        strategic = "application/strategic-merge-patch+json"
        tenant.cluster.rest.call("PATCH", path, {"status": {"conditions": [condition]}}, content=strategic)
        until(lambda word=word: ready() == word, f"Ready is {word}")
