"""Compute a pod's status, as a kubelet would report it, from the states of its containers. This module does no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a container's process. Times are seconds since the epoch. `finished` is None while it runs."""

    identity: str
    started: float
    finished: float | None = None
    exit_code: int = 0
    signal: int = 0
    message: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ContainerView:
    """State of a container, as its status shows it.

    Attributes:
        waiting: reason and message if no process runs now but another will start; else None.
        run: the present or the last run.
        previous: the run before it.
        restarts: number of runs before `run`.
        ready: True if the readiness probe passes. A finished init container is ready, too.
        started: True if the startup probe has passed.
    """

    name: str
    image: str
    waiting: tuple[str, str] | None = ("ContainerCreating", "")
    run: Run | None = None
    previous: Run | None = None
    restarts: int = 0
    ready: bool = False
    started: bool = False

    @property
    def running(self) -> bool:
        """Return True if a process of the container runs now."""
        return self.waiting is None and self.run is not None and self.run.finished is None

    @property
    def finished(self) -> bool:
        """Return True if the process has ended and no other one will start."""
        return self.waiting is None and self.run is not None and self.run.finished is not None

    @property
    def succeeded(self) -> bool:
        """Return True if the container has finished with exit code 0."""
        return self.finished and self.run is not None and self.run.exit_code == 0


def timestamp(seconds: float) -> str:
    """Return a time as Kubernetes writes it: whole seconds, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _terminated(run: Run) -> Json:
    reason = run.reason or ("Completed" if run.exit_code == 0 else "Error")
    state: Json = {
        "exitCode": run.exit_code,
        "reason": reason,
        "startedAt": timestamp(run.started),
        "finishedAt": timestamp(run.finished or run.started),
        "containerID": run.identity,
    }
    if run.signal:
        state["signal"] = run.signal
    if run.message:
        state["message"] = run.message
    return {"terminated": state}


def container_status(view: ContainerView) -> Json:
    """Return the ContainerStatus of a container."""
    last = view.previous
    if view.waiting is not None:
        reason, message = view.waiting
        state: Json = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        last = view.run or view.previous
    elif view.run is None:
        state = {"waiting": {"reason": "ContainerCreating"}}
    elif view.run.finished is None:
        state = {"running": {"startedAt": timestamp(view.run.started)}}
    else:
        state = _terminated(view.run)
    status: Json = {
        "name": view.name,
        "image": view.image,
        "imageID": f"local://{view.image}" if view.run else "",
        "ready": view.ready,
        "started": view.started,
        "restartCount": view.restarts,
        "state": state,
        "lastState": _terminated(last) if last is not None and last.finished is not None else {},
    }
    if view.run is not None:
        status["containerID"] = view.run.identity
    return status


def phase(policy: str, inits: Sequence[ContainerView], mains: Sequence[ContainerView]) -> str:
    """Return the pod's phase.

    Args:
        policy: the restart policy: Always, OnFailure or Never.
        inits: the init containers.
        mains: the other containers.
    """
    if any(view.finished and not view.succeeded for view in inits):
        return "Failed"
    if not all(view.succeeded for view in inits):
        return "Pending"
    if any(view.run is None for view in mains):
        return "Pending"
    if policy != "Always" and all(view.finished for view in mains):
        return "Succeeded" if all(view.succeeded for view in mains) else "Failed"
    return "Running"


def _verdicts(
    now_phase: str,
    inits: Sequence[ContainerView],
    mains: Sequence[ContainerView],
    going: bool,
    gates: Mapping[str, bool],
) -> dict[str, tuple[bool, str, str]]:
    """Return the pod's conditions by type, each as (status, reason, message)."""
    done = now_phase in ("Succeeded", "Failed")
    pending = [view.name for view in inits if not view.succeeded]
    initialized = (not pending, "" if not pending else "ContainersNotInitialized", _incomplete(pending))
    lagging = [view.name for view in mains if not view.ready]
    if now_phase == "Succeeded":
        containers = (False, "PodCompleted", "")
        initialized = (True, "PodCompleted", "")
    elif lagging or done:
        containers = (False, "ContainersNotReady", f"containers with unready status: [{' '.join(lagging)}]")
    else:
        containers = (True, "", "")
    ready = containers
    closed = [gate for gate, open_ in gates.items() if not open_]
    if ready[0] and closed:
        ready = (False, "ReadinessGatesNotReady", f"readiness gates not open: [{' '.join(closed)}]")
    if ready[0] and going:
        ready = (False, "PodTerminating", "the pod is being deleted")
    return {"Initialized": initialized, "Ready": ready, "ContainersReady": containers}


def _incomplete(names: Sequence[str]) -> str:
    return f"containers with incomplete status: [{' '.join(names)}]" if names else ""


def pod_status(
    pod: Mapping[str, Any],
    inits: Sequence[ContainerView],
    mains: Sequence[ContainerView],
    *,
    address: str,
    host: str,
    started: float,
    now: float,
    going: bool = False,
) -> Json:
    """Return the status of a pod.

    Args:
        pod: the pod as last seen. An unchanged condition keeps the time that it has there.
        inits: the init containers.
        mains: the other containers.
        address: the pod's IP address.
        host: the node's IP address.
        started: time when the node accepted the pod, in seconds since the epoch.
        now: present time in seconds since the epoch.
        going: True if the pod is being deleted, and so is not ready.
    """
    before = {entry["type"]: entry for entry in pod.get("status", {}).get("conditions", [])}
    gates = {
        gate["conditionType"]: before.get(gate["conditionType"], {}).get("status") == "True"
        for gate in pod["spec"].get("readinessGates") or []
    }
    current = phase(pod["spec"].get("restartPolicy", "Always"), inits, mains)
    conditions = []
    verdicts = {**_verdicts(current, inits, mains, going, gates), "PodScheduled": (True, "", "")}
    for kind, (true, reason, message) in verdicts.items():
        status = "True" if true else "False"
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        # Conditions are merged by their type, so only an explicit null removes a value of an earlier state.
        entry = {"type": kind, "status": status, "reason": reason or None, "message": message or None}
        conditions.append({**entry, "lastProbeTime": None, "lastTransitionTime": since or timestamp(now)})
    return {
        "phase": current,
        "conditions": conditions,
        "hostIP": host,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": timestamp(started),
        "initContainerStatuses": [container_status(view) for view in inits],
        "containerStatuses": [container_status(view) for view in mains],
    }
