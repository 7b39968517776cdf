"""`kubectl kvpilot plan SERVICE`: run `kvpilot plan` for the service's model on its GPU."""

import shlex
from collections.abc import Iterator

from kvpilot_cli.plan import command as plan
from kvpilot_cli.plan import service
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.gpus import gpu_of_labels
from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import DONE, REFUSED, Forbidden, Missing, ToolError
from kvpilot_kubectl.fields import Json, at, items, text


def show(cluster: Cluster, name: str, *, gpu: str | None, model: str | None) -> int:
    """Print the plan. If there is none, `kvpilot plan` has printed the reason to stderr."""
    obj = cluster.service(name)
    try:
        argv = service.arguments(obj, gpu or gpu_of(cluster, obj), model)
    except PlanError as error:
        raise ToolError(str(error)) from error
    print(f"$ kvpilot plan {shlex.join(argv)}", flush=True)
    return DONE if plan.main(argv) == 0 else REFUSED


def gpu_of(cluster: Cluster, obj: Json) -> str:
    """Return the service's GPU: from its pods' nodes, else from its spec's selector, else from its last trial.

    Raises:
        ToolError: no source names a GPU, or one names several.
    """
    by_nodes = service.known_gpus(_by_nodes(cluster, text(obj, "metadata", "name")))
    for known in (by_nodes, service.selected_gpus(obj), service.known_gpus(_tried(obj))):
        if len(known) > 1:
            raise ToolError(f"the service has several kinds of GPU ({' and '.join(known)}): name one with --gpu")
        if known:
            return known[0]
    raise ToolError("no node, node selector or trial names the service's GPU: name it, for example --gpu H100-80GB")


def _by_nodes(cluster: Cluster, name: str) -> Iterator[str]:
    """Yield the GPUs of the pods' nodes. Stop without an error if the user may not read nodes, like most users."""
    try:
        for node in {text(pod, "spec", "nodeName") for pod in cluster.pods(name)} - {""}:
            found = cluster.node(node)
            yield text(gpu_of_labels(at(found, "metadata", "labels"), at(found, "status", "allocatable")))
    except (Forbidden, Missing):
        return


def _tried(obj: Json) -> Iterator[str]:
    """Yield the GPU of the newest trial, because earlier trials may have had another GPU."""
    yield from (text(one, "gpu") for one in list(items(obj, "status", "history"))[:1])
