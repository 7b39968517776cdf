"""The two kinds of workloads that run a revision's pods: Deployment, and LeaderWorkerSet for multi-node replicas."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_operator.api import names

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of workload, such as a Deployment. Its `spec.replicas` is the number of a revision's replicas."""

    name: str
    api_version: str
    optional: bool
    """True if the kind is a custom resource whose definition a cluster may lack."""
    template: tuple[str, ...]
    """Path in `spec` of the template of pods that take requests."""
    pods_owner: str
    """Kind of the objects (apps/v1) that own the pods that take requests."""
    owner_is_named: str
    """Pattern of such an owner's name. NAME stands for the workload's name. A pattern with a final dash is a prefix."""

    def pod_template(self, workload: Object) -> Object:
        """Return the template of pods that take requests; {} if there is none."""
        found: Any = workload.get("spec") or {}
        for part in self.template:
            found = found.get(part) or {}
        return found if isinstance(found, Mapping) else {}

    def owns(self, owner: Object, name: str) -> bool:
        """Return True if a pod's owner reference points to an object of the workload of this name."""
        wanted, found = self.owner_is_named.replace("NAME", name), _controller(owner, self.pods_owner)
        return found.startswith(wanted) if wanted.endswith("-") else found == wanted


DEPLOYMENT = Kind("Deployment", "apps/v1", False, ("template",), "ReplicaSet", "NAME-")
LEADER_WORKER_SET = Kind(
    "LeaderWorkerSet",
    names.LEADER_WORKER_SET_API,
    True,
    ("leaderWorkerTemplate", "leaderTemplate"),
    "StatefulSet",
    "NAME",
)
KINDS = {kind.name: kind for kind in (DEPLOYMENT, LEADER_WORKER_SET)}


def makes(service: str, revision: str, owner: Object) -> bool:
    """Return True if a pod with this owner reference takes requests for the revision."""
    return any(kind.owns(owner, names.deployment_name(service, revision)) for kind in KINDS.values())


def leader_of(service: str, revision: str, owner: Object) -> str | None:
    """Return the leader of a worker with this owner reference. The worker's StatefulSet has the leader's name."""
    name = _controller(owner, LEADER_WORKER_SET.pods_owner)
    return name if name.startswith(f"{names.deployment_name(service, revision)}-") else None


def _controller(owner: Object, kind: str) -> str:
    """Return the name in an owner reference to a controller of this kind, of apps/v1; "" for any other."""
    ours = owner.get("controller") and str(owner.get("apiVersion", "")).startswith("apps/")
    return str(owner.get("name", "")) if ours and owner.get("kind") == kind else ""


# A group is one engine over several nodes. Its leader takes all requests, and its workers compute parts of each step.
_MASTER_PORT = 29501
"""Port at which workers reach their leader. It closes when the leader ends."""
_LEADER, _WORKER = "--node-rank=0", "--node-rank=$(LWS_WORKER_INDEX)"
_OF_SERVERS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")


def group_arguments(nodes: int) -> list[str]:
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
    """Return the pod template of the workers of a multi-node group, made from their leader's."""
    template = copy.deepcopy(leader)
    labels, pod = template["metadata"]["labels"], template["spec"]
    del labels[names.SERVICE_LABEL]
    labels["app.kubernetes.io/name"] = "kvpilot-worker"
    for spread in pod.get("topologySpreadConstraints", ()):
        if names.SERVICE_LABEL in spread["labelSelector"].get("matchLabels", {}):
            spread["labelSelector"]["matchLabels"] = {names.GROUP_LABEL: labels[names.GROUP_LABEL]}
    engine = next(one for one in pod["containers"] if one["name"] == names.ENGINE_CONTAINER)
    for name in _OF_SERVERS:
        engine.pop(name, None)
    engine["args"] = [*(_WORKER if one == _LEADER else one for one in engine["args"]), "--headless"]
    engine["lifecycle"] = {"preStop": {"exec": {"command": _while_the_leader_lives(pod)}}}
    return template


def _while_the_leader_lives(pod: dict[str, Any]) -> list[str]:
    """Return a command that waits until the leader has finished its requests and ended."""
    # The command must end before the kubelet kills the worker.
    seconds = max(pod["terminationGracePeriodSeconds"] - 10, 1)
    leader = f"/dev/tcp/${{LWS_LEADER_ADDRESS}}/{_MASTER_PORT}"
    return ["timeout", str(seconds), "bash", "-c", f"while : 2>/dev/null <{leader}; do sleep 1; done"]


def group_spec(template: dict[str, Any], replicas: int, nodes: int, gates: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` of a LeaderWorkerSet of `replicas` groups. `gates` has the readiness gates of the leaders.

    If one pod ends, its whole group restarts, because the ranks of an engine cannot restart one by one.
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
