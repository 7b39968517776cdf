"""Start pods only if the service owns every object that they refer to by name, such as a claim or a Service."""

from __future__ import annotations

from collections.abc import Sequence

from kvpilot_operator.act.ownership import is_owned, own
from kvpilot_operator.api.names import REVISION_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import NameTaken, NotStarted
from kvpilot_operator.render.objects import group_service
from kvpilot_operator.render.workloads import KINDS, LEADER_WORKER_SET
from kvpilot_operator.state.decision import Manifest
from kvpilot_operator.state.snapshot import Snapshot

Reference = tuple[str, str, str]
"""apiVersion, kind and name."""


def starts_pods(s: Snapshot, manifest: Manifest) -> bool:
    """Return True if writing this manifest creates pods."""
    if manifest["kind"] not in KINDS:
        return bool(manifest["kind"] == "Job" and s.prefetch is None)
    there = s.deployments.get(manifest["metadata"]["labels"][REVISION_LABEL])
    replicas: int = manifest["spec"]["replicas"]
    return replicas > (there.replicas if there is not None else 0)


async def hold(cluster: Cluster, s: Snapshot, named: Sequence[Reference], kind: str, name: str) -> None:
    """Return once the pods of this workload or Job may start; raise NotStarted, or Conflict as `own` does."""
    for api_version, needed, about in named:
        found = await cluster.find(Ref(api_version, needed, s.key.namespace, about))
        if found is None:
            raise NotStarted(kind, needed, s.key.namespace, about, missing=True)
        try:
            own(s, needed, found)
        except NameTaken as error:
            raise NotStarted(kind, needed, s.key.namespace, about, missing=False) from error
    if kind == LEADER_WORKER_SET.name:
        await _claim_names_of_groups(cluster, s, name)


async def _claim_names_of_groups(cluster: Cluster, s: Snapshot, name: str) -> None:
    """Create the headless Service by which workers find their leader, or check that the service or the set owns it.

    LeaderWorkerSet uses any Service with the set's name, and creates one only if none exists.
    """
    found = await cluster.find(Ref("v1", "Service", s.key.namespace, name))
    if found is None:
        await cluster.create(group_service(s.key, s.uid, name))
        return
    made = s.objects.get((LEADER_WORKER_SET.name, name))
    if made is not None and made.owned and is_owned(found, made.uid):
        return
    try:
        own(s, "Service", found)
    except NameTaken as error:
        raise NotStarted(LEADER_WORKER_SET.name, "Service", s.key.namespace, name, missing=False) from error
