"""Ownership of objects: the operator writes or deletes only objects that name the service's uid as an owner.

Each write carries the object's uid, so the server refuses the write if another object has taken the name. Server-side
apply cannot require that an object is new. So the operator first claims a free name with a plain create.
"""

from collections.abc import Sequence
from typing import Any

from kvpilot_operator.api.names import KIND, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import Conflict, NameTaken, NotStarted
from kvpilot_operator.render.objects import group_service
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from kvpilot_operator.state.decision import Manifest, Reference
from kvpilot_operator.state.snapshot import Snapshot


def is_owned(obj: Object, uid: str) -> bool:
    """Return True if the service with this uid is an owner of the object."""
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def own(s: Snapshot, kind: str, found: Object) -> str:
    """Return the uid of an object that the service owns. Raise NameTaken if it has another owner.

    Raise Conflict if the owner is an earlier service of this name: the garbage collector is about to delete the object.
    """
    metadata = found["metadata"]
    if is_owned(found, s.uid):
        return str(metadata["uid"])
    owners = metadata.get("ownerReferences") or ()
    if any((owner.get("kind"), owner.get("name")) == (KIND, s.key.name) for owner in owners):
        words = f"{kind} {metadata['name']} belongs to an earlier service of this name, and is not deleted yet"
        raise Conflict("PATCH", f"{s.key.namespace}/{metadata['name']}", 409, words)
    raise NameTaken(kind, s.key.namespace, metadata["name"])


def claim(manifest: Manifest) -> dict[str, Any] | None:
    """Return a placeholder to create first, which reserves the manifest's name and has no effect; None if not needed.

    A Deployment needs no claim: its selector is immutable, so the server refuses to merge our manifest into another
    Deployment. The placeholder has only fields of the manifest, because a later apply cannot remove other fields.
    """
    if manifest["kind"] == "Deployment":
        return None
    claimed = {part: manifest[part] for part in ("apiVersion", "kind", "metadata")}
    if manifest["kind"] == "InferencePool":
        # A pool needs a selector, and before v1.6 of the API extension also a picker. The selector may match all our
        # pods, because pods that are not admitted get no requests.
        labels = {SERVICE_LABEL: manifest["spec"]["selector"]["matchLabels"][SERVICE_LABEL]}
        claimed["spec"] = {**manifest["spec"], "selector": {"matchLabels": labels}}
    elif "spec" in manifest:
        claimed["spec"] = {name: value for name, value in manifest["spec"].items() if name != "selector"}
    return claimed


async def hold(cluster: Cluster, s: Snapshot, named: Sequence[Reference], kind: str, name: str) -> None:
    """Check, before a workload starts new pods, that the service owns the objects (`named`) that these pods need.

    Raise NotStarted if such an object is missing or has another owner, and Conflict as `own` does.
    """
    for api_version, needed, about in named:
        found = await cluster.find(Ref(api_version, needed, s.key.namespace, about))
        if found is None:
            raise NotStarted(kind, needed, s.key.namespace, about, missing=True)
        _own_before_start(s, kind, needed, found)
    if kind == LEADER_WORKER_SET.name:
        await _claim_names_of_groups(cluster, s, name)


async def _claim_names_of_groups(cluster: Cluster, s: Snapshot, name: str) -> None:
    """Create the headless Service by which workers find their leader, or check who owns an existing one.

    LeaderWorkerSet would use any Service with the set's name, even somebody else's. So the owner must be our service or
    the set.
    """
    found = await cluster.find(Ref("v1", "Service", s.key.namespace, name))
    if found is None:
        await cluster.create(group_service(s.key, s.uid, name))
        return
    made = s.objects.get((LEADER_WORKER_SET.name, name))
    if made is not None and made.owned and is_owned(found, made.uid):
        return
    _own_before_start(s, LEADER_WORKER_SET.name, "Service", found)


def _own_before_start(s: Snapshot, kind: str, needed: str, found: Object) -> None:
    try:
        own(s, needed, found)
    except NameTaken as error:
        raise NotStarted(kind, needed, s.key.namespace, found["metadata"]["name"], missing=False) from error
