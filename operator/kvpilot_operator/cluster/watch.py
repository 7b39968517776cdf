"""Keep a Store equal to a collection of the API server: list, watch, resume, and list again after errors."""

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.cluster.cache import Name, Store
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.transport import REMEDIES
from kvpilot_operator.errors import ClusterError, Throttled

log = logging.getLogger(__name__)

# Short pauses, so that the end of an outage is noticed soon.
_BACKOFF = Backoff(0.2, 5.0)
# A watch that ends sooner counts as a failure, because a server or a proxy may end every watch immediately.
_SHORT_WATCH_SECONDS = 1.0
# Retry a missing kind after this time, because its definition may be installed later.
MISSING_SECONDS = 30.0
_MISSING = (403, 404)
_DENIALS = 6


@dataclass(eq=False)
class Reflector:
    """A Store's watch of one collection. `namespace` is empty for all namespaces.

    `filled` is set after the first list, or once the kind of an `optional` watch counts as missing. A kind that was
    served counts as missing only after `_DENIALS` answers with 403 or 404, because a starting server may not know its
    CRDs yet.
    """

    cluster: Cluster
    api_version: str
    kind: str
    namespace: str
    selector: str
    store: Store[Any, Any]
    optional: bool = False

    def __post_init__(self) -> None:
        self._version = ""
        self.filled = asyncio.Event()
        self.served = False
        self._denials = 0

    async def run(self) -> None:
        """Follow the collection until cancelled. Resume after a lost connection, list again after any other error."""
        failures = 0
        while True:
            pause = _BACKOFF.pause(failures)
            try:
                if not self._version:
                    await self._list()
                began = time.monotonic()
                events = self.cluster.watch(self.api_version, self.kind, self.namespace, self.selector, self._version)
                async for event, obj in events:
                    self.store.take(event, obj)
                    self._version = obj["metadata"]["resourceVersion"]
                    failures, pause = 0, _BACKOFF.first
                if time.monotonic() - began > _SHORT_WATCH_SECONDS:
                    continue
                wait = pause
            except ClusterError as error:
                if error.status:
                    self._version = ""
                if self.optional and error.status in _MISSING and self._is_missing(error):
                    await asyncio.sleep(MISSING_SECONDS)
                    continue
                wait = error.retry_after if isinstance(error, Throttled) else pause * random.uniform(0.8, 1.2)  # noqa: S311
                level = logging.DEBUG if error.status in (0, 410) else logging.WARNING
                remedy = REMEDIES.get(error.status, "")
                log.log(level, "watch of %s ended, again in %.1f s: %s%s", self.kind, wait, error, remedy)
            except Exception:
                # A failure in one collection must not stop the fleet.
                log.exception("watch of %s failed, again in %.1f s", self.kind, pause)
                self._version, wait = "", pause
            await asyncio.sleep(wait)
            failures += 1

    async def _list(self) -> None:
        names: set[Name] = set()
        version = ""
        async for items, listed in self.cluster.pages(self.api_version, self.kind, self.namespace, self.selector):
            version = listed
            for item in items:
                self.store.put(item)
                names.add((item["metadata"].get("namespace", ""), item["metadata"]["name"]))
            await asyncio.sleep(0)
        self.store.keep_only(self.namespace, names, version)
        self._version, self.served, self._denials = version, True, 0
        self.filled.set()

    def _is_missing(self, error: ClusterError) -> bool:
        """Count a denial (403 or 404). If the kind now counts as missing, empty the Store and return True."""
        self._denials += 1
        if self.served and self._denials < _DENIALS:
            return False
        if self.served or (error.status == 403 and not self.filled.is_set()):
            log.warning("the API server seems not to serve the kind %s: %s", self.kind, error)
        self.store.keep_only(self.namespace, (), "")
        self._version, self.served = "", False
        self.filled.set()
        return True
