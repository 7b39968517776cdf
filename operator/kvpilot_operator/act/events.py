"""Kubernetes Events about a service."""

from __future__ import annotations

from kvpilot_operator.cluster.client import Object
from kvpilot_operator.render.names import API_VERSION, KIND
from kvpilot_operator.state.decision import Event
from kvpilot_operator.state.snapshot import Snapshot


def event_manifest(s: Snapshot, event: Event) -> Object:
    """A core/v1 Event that `kubectl describe` and `kubectl get events` show with the service."""
    time = s.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{s.key.name}-", "namespace": s.key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": s.key.namespace,
            "name": s.key.name,
            "uid": s.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": "kvpilot-operator"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
