"""What one service may cost the operator, at every door through which a tenant's bytes come in.

The operator's container has 512 MiB. A fleet of 2,000 services and 6,000 pods takes up to 368 of them
(docs/benchmarks/fleet.md), so that all doors together, with every place taken and every answer as large as it may be,
get `ALL_DOORS_BYTES`, and what is kept of specs and packs `KEPT_BYTES`; the rest is the allocator's.

A door bounds three things. Bytes: an answer that exceeds `read_bytes` is refused while it is read, and reading one
takes at most `held_bytes` of memory (docs/benchmarks/operator-doors.md has what they take). Work: parsers are linear in
what they read, and what they read is bounded; no timer is needed. Places: a service holds at most `share` of them, and
who holds one for longer than `patience_seconds` gives way to those who wait (`Places`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

from kvpilot_operator.errors import OverBudget, PlaceLost

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class Door:
    """The limits of one door.

    `quick` places are for those that take no longer than `patience_seconds`, which is what keeps the others from
    waiting; who takes longer moves to one of the `slow` ones.
    """

    what: str
    read_bytes: int
    held_bytes: int
    quick: int
    slow: int
    share: int
    patience_seconds: float

    @property
    def most_bytes(self) -> int:
        """The memory that this door takes at most."""
        return self.held_bytes * (self.quick + self.slow)


ALL_DOORS_BYTES = 112 * _MIB
KEPT_BYTES = 16 * _MIB

# A page of vLLM is some 50 KiB for each data parallel rank, so 20 ranks behind one server. It is read chunk by chunk
# and never held: what is held are the socket's buffers, a chunk and a line. A healthy engine answers within 10 ms; 450
# pages a second (control/pilot.py) then take 5 places, and the rest are for engines that are slow.
METRICS = Door("a page of metrics", 1 * _MIB, 192 * _KIB, quick=64, slow=192, share=8, patience_seconds=0.5)
METRICS_SOCKET_BYTES = 64 * _KIB
# The longest line of a vLLM 0.32 (its cache_config_info) has 1.1 KiB and 37 labels.
METRICS_LINE_BYTES = 16 * _KIB
METRICS_LABELS = 128

# A pack has 32 KiB at most (probes/packs.py). The API server sends whole objects, of up to 1.5 MiB: a ConfigMap with
# more beside the pack than this is refused before it is parsed.
CONFIG_MAP = Door("a ConfigMap", 256 * _KIB, 1 * _MIB, quick=8, slow=0, share=2, patience_seconds=15.0)

# The answers of a probe, one at a time: 8,192 tokens of a filled prompt are 64 KiB of JSON. A run takes some seconds on
# a GPU and half a minute on a CPU; the patience is what a good service waits at most behind engines that hang.
CANARY_PROBE = Door("a probe of a canary", 512 * _KIB, 512 * _KIB, quick=16, slow=32, share=1, patience_seconds=5.0)
# Those of replicas that serve have places of their own: a canary never waits behind a thousand of them.
CHECK = Door("a check of a replica", 512 * _KIB, 512 * _KIB, quick=16, slow=32, share=1, patience_seconds=5.0)

DOORS = (METRICS, CONFIG_MAP, CANARY_PROBE, CHECK)

# Kept over the fleet, in caches that count bytes: verdicts over specs, and packs that were read.
SPEC_CACHE_BYTES = 8 * _MIB
PACK_CACHE_BYTES = 4 * _MIB
# One spec that is larger is judged each time, and not kept.
SPEC_CACHE_ITEM_BYTES = 64 * _KIB


async def read_body(chunks: AsyncIterator[bytes], most: int, where: str) -> bytes:
    """All of an answer's body; OverBudget as soon as it has more than `most` bytes, which names `where`."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > most:
            raise OverBudget(f"{where}: more than {most} bytes")
        body += chunk
    return bytes(body)


class Place:
    """One place of a pool: `async with places.of(service) as place`."""

    def __init__(self, pool: Places, service: Hashable) -> None:
        self._pool = pool
        self.service = service
        self.since = self.moved = 0.0
        """When it was taken, and when its holder last got on (the loop's clock)."""
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._lost = False

    def progress(self) -> None:
        """Tell that the work goes on: of those that hold a slow place, the one that is silent for longest loses it."""
        self.moved = asyncio.get_running_loop().time()

    def lose(self) -> None:
        """Cancel what the place is held for; its `async with` raises PlaceLost."""
        self._lost = True
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> Place:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        await self._pool.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.leave(self)
        if self._lost and self._task is not None:
            mine = self._task.uncancel() <= self._cancelling
            if mine and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise PlaceLost(f"{self._pool.door.what}: stopped after {self.held():.1f} s, others wait") from error

    def held(self) -> float:
        """Seconds since it was taken."""
        return asyncio.get_running_loop().time() - self.since


class Places:
    """The places of a door, shared out fairly.

    Services take turns, whatever number of requests each of them has waiting. A holder gives its quick place to those
    who wait once it has had it for the door's patience, and goes on in a slow one. Where these are all taken, the place
    that has been silent for longest is lost, if it was silent for longer than the patience. So however many engines
    hang, who waits gets a place after `patience_seconds * (1 + services that wait / quick)`.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self._quick: dict[Place, None] = {}
        """In the order in which they were taken."""
        self._slow: dict[Place, None] = {}
        self._held: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[tuple[Place, asyncio.Future[None]]]] = {}
        self._turns: dict[Hashable, None] = {}
        """Services that wait and hold less than their share, in the order of their turns."""
        self._timer: asyncio.TimerHandle | None = None

    def of(self, service: Hashable) -> Place:
        """A place for one piece of work of this service; it is waited for in `async with`."""
        return Place(self, service)

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._quick) + len(self._slow)

    async def enter(self, place: Place) -> None:
        """Wait for a place."""
        asked = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(place.service, deque())
        queue.append((place, asked))
        self._queue_up(place.service)
        self._share_out()
        try:
            await asked
        except asyncio.CancelledError:
            if place in self._quick or place in self._slow:
                self.leave(place)
            else:
                queue.remove((place, asked))
                self._queue_up(place.service)
            raise

    def leave(self, place: Place) -> None:
        """Give a place back; one that was lost is gone already."""
        if self._drop(place):
            self._share_out()

    def _drop(self, place: Place) -> bool:
        lane = self._quick if place in self._quick else self._slow
        if place not in lane:
            return False
        del lane[place]
        held = self._held[place.service] - 1
        if held:
            self._held[place.service] = held
        else:
            del self._held[place.service]
        self._queue_up(place.service)
        return True

    def _queue_up(self, service: Hashable) -> None:
        """Keep `_turns` true for this service."""
        if not self._waiting.get(service):
            self._waiting.pop(service, None)
            self._turns.pop(service, None)
        elif self._held.get(service, 0) < self.door.share:
            self._turns.setdefault(service)
        else:
            self._turns.pop(service, None)

    def _share_out(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._turns and (len(self._quick) < self.door.quick or self._make_room(now)):
            service = next(iter(self._turns))
            del self._turns[service]
            place, asked = self._waiting[service].popleft()
            if not asked.done():
                place.since = place.moved = now
                self._quick[place] = None
                self._held[service] = self._held.get(service, 0) + 1
                asked.set_result(None)
            self._queue_up(service)
        self._arm(now)

    def _make_room(self, now: float) -> bool:
        """Free a quick place: its oldest holder moves on, if its time is over and a slow place is or becomes free."""
        oldest = next(iter(self._quick))
        if now < oldest.since + self.door.patience_seconds:
            return False
        if len(self._slow) >= self.door.slow:
            silent = min(chain(self._slow, [oldest]), key=lambda place: place.moved)
            if now < silent.moved + self.door.patience_seconds:
                return False
            self._drop(silent)
            silent.lose()
            if silent is oldest:
                return True
        del self._quick[oldest]
        self._slow[oldest] = None
        return True

    def _arm(self, now: float) -> None:
        """Look again when the oldest quick place has been held for long enough, if somebody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            patience = self.door.patience_seconds
            wait = max(next(iter(self._quick)).since + patience - now, patience / 10)
            self._timer = asyncio.get_running_loop().call_later(wait, self._share_out)
