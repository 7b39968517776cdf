"""Kubernetes Events about a service, for people. They are core/v1 Events, which every version of kubectl shows."""

import logging

from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.decision import Event
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.times import utc

log = logging.getLogger(__name__)

REPORTER = "kvpilot-operator"


async def post(cluster: Cluster, s: Snapshot, event: Event) -> None:
    """Post an event. Log a failure but do not raise it: the status also has the decision."""
    try:
        await cluster.create(event_manifest(s, event))
    except ClusterError as error:
        log.warning("event not posted: %s", error, extra={"service": str(s.key), "reason": event.reason})


def event_manifest(s: Snapshot, event: Event) -> Object:
    """Return a core/v1 Event that `kubectl describe` and `kubectl get events` show with the service."""
    time = utc(s.now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{s.key.name}.", "namespace": s.key.namespace},
        "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **s.key._asdict(), "uid": s.uid},
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": REPORTER},
        "reportingComponent": REPORTER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
