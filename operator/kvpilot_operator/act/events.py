"""Post Kubernetes Events about a service, for people to read.

If a message repeats within an hour, only the count of its core/v1 Event rises ("3m (x5 over 12m)"). Every version of
kubectl shows that count, but not all versions show the `series` of events.k8s.io/v1.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import ClusterError, NotFound
from kvpilot_operator.state.decision import Event
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.times import utc

log = logging.getLogger(__name__)

REPORTER = "kvpilot-operator"
# Within this time, a repeated message raises the count of its Event.
SAME_SECONDS = 3600
# Largest number of Events whose counts are remembered. The oldest are forgotten first.
MAX_REMEMBERED = 32


@dataclass(slots=True)
class _Posted:
    name: str
    count: int
    last: datetime


class Events:
    """The poster of one service's Kubernetes Events. It counts repeated messages instead of posting them again."""

    __slots__ = ("_cluster", "_posted")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._posted: dict[Event, _Posted] = {}

    async def post(self, s: Snapshot, event: Event) -> None:
        """Post an event, or raise its count. Log a failure but do not raise it: the status also has the decision."""
        try:
            await self._post(s, event)
        except ClusterError as error:
            log.warning("event not posted: %s", error, extra={"service": str(s.key), "reason": event.reason})

    async def _post(self, s: Snapshot, event: Event) -> None:
        known = self._posted.pop(event, None)
        if known is not None and s.now - known.last < timedelta(seconds=SAME_SECONDS):
            patch = {"count": known.count + 1, "lastTimestamp": utc(s.now)}
            try:
                await self._cluster.merge(Ref("v1", "Event", s.key.namespace, known.name), patch)
            except NotFound:
                pass  # A person deleted the Event, or the server expired it: create it again.
            else:
                self._posted[event] = _Posted(known.name, known.count + 1, s.now)
                return
        made = await self._cluster.create(event_manifest(s, event))
        self._posted[event] = _Posted(made["metadata"]["name"], 1, s.now)
        while len(self._posted) > MAX_REMEMBERED:
            del self._posted[next(iter(self._posted))]


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
