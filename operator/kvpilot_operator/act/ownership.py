"""Whose is an object? Nothing is written to, or deleted of, what does not name the service by its uid as an owner.

A write carries the uid of the object that it is meant for, so another one that has taken its name meanwhile is left
alone (the server answers with a conflict). Server-side apply has no such way to say "only if there is none", so a free
name is claimed by creating the object without what makes it act, which fails where somebody was quicker.
"""

from __future__ import annotations

from typing import Any

from kvpilot_operator.api.names import KIND, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import Conflict, NameTaken
from kvpilot_operator.state.decision import Manifest
from kvpilot_operator.state.snapshot import Snapshot


def is_owned(obj: Object, uid: str) -> bool:
    """Whether the service with this uid is an owner."""
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def own(s: Snapshot, kind: str, found: Object) -> str:
    """The uid of an object that the service owns.

    Raises:
        NameTaken: it is somebody else's.
        Conflict: it is an earlier service's of this name, and about to be collected.
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
    """What is created to claim the manifest's name: a Service or a budget that selects nothing, an empty ConfigMap, a
    pool that selects what is admitted, a route that is attached nowhere, a whole claim, Job or LeaderWorkerSet, which
    ask nothing of what is there.

    Fields that may be dropped later must not be in it: whoever creates a field keeps it, beside who applies it. The one
    that has to be, a pool's endpoint picker, is taken away by a write of its own. None for a Deployment: its selector
    is immutable, so the server itself refuses to merge ours into another one.
    """
    if manifest["kind"] == "Deployment":
        return None
    claimed = {part: manifest[part] for part in ("apiVersion", "kind", "metadata")}
    if manifest["kind"] == "InferencePool":
        # It cannot be without a selector, nor without its picker before v1.6 of the extension. Who is not admitted is
        # not picked, whatever it selects.
        labels = {SERVICE_LABEL: manifest["spec"]["selector"]["matchLabels"][SERVICE_LABEL]}
        claimed["spec"] = {**manifest["spec"], "selector": {"matchLabels": labels}}
    elif manifest["kind"] == "HTTPRoute":
        claimed["spec"] = {}
    elif "spec" in manifest:
        claimed["spec"] = {name: value for name, value in manifest["spec"].items() if name != "selector"}
    return claimed
