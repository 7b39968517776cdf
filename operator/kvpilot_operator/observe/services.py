"""The services as kopf's watch tells of them, without those that are gone and of which it does not tell.

After HTTP 410 kopf lists again, and what was deleted meanwhile is missing from that list, which it never says. So each
list of kopf's is followed by one of ours, of names alone, and what is not on it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.cluster.cache import Name, Store
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.render.names import API_VERSION, KIND

log = logging.getLogger(__name__)

_BACKOFF = Backoff(0.2, 5.0)


class ServiceFeed:
    """Keeps a Store like the services of some namespaces (of all, where "" is the one); `filled` once it is like them.

    `take` is told each event of kopf's watch, `listed` the namespace that kopf has listed from its beginning.
    """

    def __init__(self, cluster: Cluster, store: Store[Any, Any], namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._store = store
        self._lists: asyncio.Queue[str] = asyncio.Queue()
        self._unlisted = set(namespaces)
        self._told: set[Name] = set()
        self._awaited: set[Name] = set()
        self.filled = asyncio.Event()

    def take(self, event: str | None, obj: Object) -> None:
        """One event: ADDED, MODIFIED, DELETED, or None for an object of a list."""
        try:
            if event == "DELETED":
                self._store.drop(obj)
            else:
                self._store.put(obj)
        finally:
            # One that nobody can make sense of is told, too.
            if not self.filled.is_set():
                name = (obj["metadata"]["namespace"], obj["metadata"]["name"])
                self._told.add(name)
                self._awaited.discard(name)
                self._fill()

    def listed(self, namespace: str) -> None:
        """kopf has listed the services anew, and tells of each of them now."""
        self._lists.put_nowait(namespace)

    async def run(self) -> None:
        """Follow every list of kopf's by one of names, until cancelled."""
        while True:
            namespace = await self._lists.get()
            for pause in _BACKOFF:
                try:
                    names, version = await self._cluster.names(API_VERSION, KIND, namespace)
                    break
                except ClusterError as error:
                    log.warning("services not listed, again in %.1f s: %s", pause, error)
                    await asyncio.sleep(pause)
            self._store.keep_only(namespace, names, version)
            if not self.filled.is_set():
                self._unlisted.discard(namespace)
                self._awaited |= names - self._told
                self._fill()

    def _fill(self) -> None:
        if not self._unlisted and not self._awaited:
            self._told.clear()
            self.filled.set()
