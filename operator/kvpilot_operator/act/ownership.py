"""Ownership of objects: the operator writes or deletes only objects that name the service's uid as an owner.

Each write carries the uid of its object, so that the server refuses it for another object of the name. Server-side
apply cannot say "only if there is none", so the operator claims a free name first, by creating the object.
"""

from __future__ import annotations

from typing import Any

from kvpilot_operator.api.names import KIND, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import Conflict, NameTaken
from kvpilot_operator.state.decision import Manifest
from kvpilot_operator.state.snapshot import Snapshot


def is_owned(obj: Object, uid: str) -> bool:
    """Return True if the service with this uid is an owner."""
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def own(s: Snapshot, kind: str, found: Object) -> str:
    """Return the uid of an object that the service owns.

    Raises:
        NameTaken: the object has another owner.
        Conflict: it belongs to an earlier service of this name, and is about to be deleted.
    """
    metadata = found["metadata"]
    if is_owned(found, s.uid):
        return str(metadata["uid"])
    owners = metadata.get("ownerReferences") or ()
    if any((owner.get("kind"), owner.get("name")) == (KIND, s.key.name) for owner in owners):
        words = f"{kind} {metadata['name']} is an earlier service's of this name, and not collected yet"
        raise Conflict("PATCH", f"{s.key.namespace}/{metadata['name']}", 409, words)
    raise NameTaken(kind, s.key.namespace, metadata["name"])


def claim(manifest: Manifest) -> dict[str, Any] | None:
    """Return an object that claims the manifest's name and does nothing yet; None for a Deployment.

    A Deployment needs no claim: its selector is immutable, so the server refuses to merge ours into another one. Leave
    out fields that a later apply may drop, because their creator keeps them.
    """
    if manifest["kind"] == "Deployment":
        return None
    claimed = {part: manifest[part] for part in ("apiVersion", "kind", "metadata")}
    if manifest["kind"] == "InferencePool":
        # A pool needs a selector, and before v1.6 of the extension also a picker. Pods that are not admitted get no
        # requests.
        labels = {SERVICE_LABEL: manifest["spec"]["selector"]["matchLabels"][SERVICE_LABEL]}
        claimed["spec"] = {**manifest["spec"], "selector": {"matchLabels": labels}}
    elif manifest["kind"] == "HTTPRoute":
        claimed["spec"] = {}
    elif "spec" in manifest:
        claimed["spec"] = {name: value for name, value in manifest["spec"].items() if name != "selector"}
    return claimed
