"""Groups of pods that form one engine: a leader, its workers, and the LeaderWorkerSet that creates both.

The leader, pod NAME-<group>, alone takes requests. A worker, pod NAME-<group>-<worker>, computes its share.
"""

from __future__ import annotations

import copy
from typing import Any

from kvpilot_operator.api.names import ENGINE_CONTAINER, GROUP_LABEL, SERVICE_LABEL

_MASTER_PORT = 29501
"""Port of the leader where workers find it; it closes when the leader ends."""
_LEADER, _WORKER = "--node-rank=0", "--node-rank=$(LWS_WORKER_INDEX)"
_OF_SERVERS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")


def arguments(nodes: int) -> list[str]:
    """Return a leader's arguments: tensor parallelism within a node, pipeline parallelism across nodes."""
    if nodes == 1:
        return []
    return [
        f"--pipeline-parallel-size={nodes}",
        f"--nnodes={nodes}",
        _LEADER,
        "--master-addr=$(LWS_LEADER_ADDRESS)",
        f"--master-port={_MASTER_PORT}",
        "--distributed-executor-backend=mp",
    ]


def worker_template(leader: dict[str, Any]) -> dict[str, Any]:
    """Return the template of a leader's workers."""
    template = copy.deepcopy(leader)
    labels, pod = template["metadata"]["labels"], template["spec"]
    del labels[SERVICE_LABEL]
    labels["app.kubernetes.io/name"] = "kvpilot-worker"
    for spread in pod.get("topologySpreadConstraints", ()):
        if SERVICE_LABEL in spread["labelSelector"].get("matchLabels", {}):
            spread["labelSelector"]["matchLabels"] = {GROUP_LABEL: labels[GROUP_LABEL]}
    engine = next(one for one in pod["containers"] if one["name"] == ENGINE_CONTAINER)
    for name in _OF_SERVERS:
        engine.pop(name, None)
    engine["args"] = [*(_WORKER if one == _LEADER else one for one in engine["args"]), "--headless"]
    engine["lifecycle"] = {"preStop": {"exec": {"command": _while_the_leader_lives(pod)}}}
    return template


def _while_the_leader_lives(pod: dict[str, Any]) -> list[str]:
    """Return a command that waits until the leader has finished its requests and ended."""
    # End before the kubelet kills the worker.
    seconds = max(pod["terminationGracePeriodSeconds"] - 10, 1)
    leader = f"/dev/tcp/${{LWS_LEADER_ADDRESS}}/{_MASTER_PORT}"
    return ["timeout", str(seconds), "bash", "-c", f"while : 2>/dev/null <{leader}; do sleep 1; done"]


def group_spec(template: dict[str, Any], replicas: int, nodes: int, gates: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` of a LeaderWorkerSet of `replicas` groups; `gates` are readiness gates of leaders.

    Ranks of an engine cannot restart one by one, so the whole group restarts if a pod ends.
    """
    leader = {**template, "spec": {**template["spec"], **gates}}
    return {
        "replicas": replicas,
        "leaderWorkerTemplate": {
            "size": nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": worker_template(template),
        },
    }
