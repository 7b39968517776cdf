"""kstatus' generic rules (sigs.k8s.io/cli-utils, pkg/kstatus/status), by which Flux and others judge an object.

This module also checks invariants of the resulting status.
"""

from collections.abc import Mapping
from typing import Any

from support.model_cluster import ModelCluster
from support.services import revision_of


def compute(obj: Mapping[str, Any]) -> str:
    """Return kstatus' result for an object: InProgress, Failed, Current or Terminating."""
    meta, status = obj["metadata"], obj.get("status") or {}
    if meta.get("deletionTimestamp"):
        return "Terminating"
    generation, observed = meta.get("generation"), status.get("observedGeneration")
    if generation is not None and observed is not None and generation != observed:
        return "InProgress"
    conditions = status.get("conditions", [])
    for one in conditions:
        if (one["type"], one["status"]) == ("Reconciling", "True"):
            return "InProgress"
        if (one["type"], one["status"]) == ("Stalled", "True"):
            return "Failed"
    # Ready is not a kstatus condition, but widely used, so kstatus checks it last.
    ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


def seen(cluster: ModelCluster) -> dict[str, Any]:
    """Return the QuantizedLLMService as a client of the API server reads it."""
    return {**cluster.obj, "status": cluster.status}


def tools_are_told_the_truth(cluster: ModelCluster) -> None:
    """Check after every write that Reconciling, Stalled, Ready and kstatus' result agree with each other."""
    status = cluster.parsed()
    told: dict[str, str] = {one.type: one.status for one in status.conditions}
    assert not told or {told["Reconciling"], told["Stalled"]} <= {"True", "False"}
    assert (told.get("Reconciling"), told.get("Stalled")) != ("True", "True")
    assert not told or (told["Ready"] == "True") == ((told["Reconciling"], told["Stalled"]) == ("False", "False"))
    assert all(one.reason != "Settled" for one in status.conditions if (one.type, one.status) == ("Stalled", "True"))
    if not cluster.status:
        return  # kstatus reports Current for an object without a status
    word = compute(seen(cluster))
    newest = status.observed_generation == cluster.obj["metadata"]["generation"]
    assert newest or word == "InProgress"
    assert status.canary is None or word != "Current"
    if word == "Current":
        assert status.stable is not None
        asked = cluster.obj["spec"]["kvCache"].get("dtype", status.stable.dtype)
        assert status.stable.revision == status.observed_revision == revision_of(cluster.obj, asked)
    if status.canary is not None and status.canary.stage != "RollingBack" and status.observed_revision is not None:
        assert status.stable is not None and status.observed_revision != status.stable.revision
    if newest and status.canary is not None and not cluster.obj["spec"]["rollout"]["paused"]:
        assert word == "InProgress"
