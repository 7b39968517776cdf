"""Has somebody else changed what an object should be? Its version tells, as far as an object has one that does."""

from __future__ import annotations

from kvpilot_operator.cluster.client import Object


def version_of(kind: str, obj: Object) -> str:
    """Moves when a Deployment's spec or a Service changes; empty for other kinds, of which nobody can tell."""
    if kind == "Deployment":
        # Its resourceVersion moves with every pod that comes or goes.
        return str(obj["metadata"].get("generation", ""))
    return str(obj["metadata"].get("resourceVersion", "")) if kind == "Service" else ""
