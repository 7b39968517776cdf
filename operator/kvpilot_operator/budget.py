"""What one service may cost the operator, at every door through which a tenant's bytes come in.

The operator's container has 512 MiB. A fleet of 2,000 services and 6,000 pods takes up to 368 of them
(docs/benchmarks/fleet.md), so that all doors together, with every place taken and every answer as large as it may be,
get `ALL_DOORS_BYTES`; the rest is the allocator's.

A door bounds three things. Bytes: an answer that exceeds `read_bytes` is refused while it is read, and reading one
takes at most `held_bytes` of memory (docs/benchmarks/operator-doors.md has what they take). Work: parsers are linear in
what they read, and what they read is bounded; pages of metrics, which are read for ever, have a rate besides
(`METRICS_WORK_PER_SECOND`). Places: a service holds at most `share` of them,
tenants (namespaces) take turns, and who holds one for longer than `patience_seconds` gives way to those who wait
(`Places`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass

from kvpilot_operator.errors import OverBudget, PlaceLost

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class Door:
    """The limits of one door.

    `quick` places are for those that take no longer than `quick_seconds`, which is what keeps the others from waiting;
    who takes longer moves to one of the `slow` ones. Where these are taken, too, who waits gets the place of one that
    has got on with nothing for `patience_seconds`.
    """

    what: str
    read_bytes: int
    held_bytes: int
    quick: int
    slow: int
    share: int
    quick_seconds: float
    patience_seconds: float

    @property
    def most_bytes(self) -> int:
        """The memory that this door takes at most."""
        return self.held_bytes * (self.quick + self.slow)


ALL_DOORS_BYTES = 128 * _MIB

# A page of vLLM is some 50 KiB for each data parallel rank, so 20 ranks behind one server. It is read chunk by chunk
# and never held: what is held are the socket's buffers, a chunk and a line. A healthy engine answers within 10 ms; 450
# pages a second (control/pilot.py) then take 5 places, and the rest are for engines that are slow.
METRICS = Door(
    "a page of metrics", 1 * _MIB, 192 * _KIB, quick=64, slow=192, share=8, quick_seconds=0.5, patience_seconds=0.5
)
METRICS_SOCKET_BYTES = 32 * _KIB
# The longest line of a vLLM 0.32 (its cache_config_info) has 1.1 KiB. A rank has some 300 lines.
METRICS_LINE_BYTES = 16 * _KIB
METRICS_LINES = 16_384
METRICS_CHUNK_BYTES = 32 * _KIB
# A chunk is read in steps of so many lines, 0.7 ms of the event loop at most and of a real page 0.3 ms. So many steps,
# and of one service one, are taken before whatever else is ready has its turn: a fleet of 2,000 services has some 1,400
# a second.
METRICS_STEP_LINES = 256
METRICS_TURN = Door(
    "a step of a page", METRICS_CHUNK_BYTES, 0, quick=4, slow=0, share=1, quick_seconds=60.0, patience_seconds=60.0
)
# Work is counted in lines, and a line more for each 128 bytes: 2.5 us. A service may take so much for each of its pods:
# one with 20 ranks, of 9,000, is asked every 4.5 s, and one whose page is as large as it may be every 12 s.
METRICS_WORK_BYTES = 128
METRICS_WORK_PER_SECOND = 2_000

# A pack has 32 KiB at most (probes/packs.py). The API server sends whole objects, of up to 1.5 MiB: a ConfigMap with
# more beside the pack than this is refused before it is parsed.
CONFIG_MAP = Door(
    "a ConfigMap", 256 * _KIB, 1 * _MIB, quick=4, slow=0, share=1, quick_seconds=15.0, patience_seconds=15.0
)

# All packs of one service that it brings itself.
PACKS_BYTES = 128 * _KIB

# A run holds its prompts (0.5 MiB of text, or a baseline of 1.1 MiB), the question that is asked and a line of the
# answer or the tokens of a prompt; with the built-in packs some 0.5 MiB. It takes some seconds on a GPU and half a
# minute on a CPU, and no engine is silent for longer than the patience but one that hangs, or that computes a very long
# prompt. Behind engines that hang a good service waits for a second while slow places are free, else for the patience.
# No prompt has more than the 65,536 tokens that a baseline keeps, of 10 bytes each.
CANARY_PROBE = Door(
    "a probe of a canary", 640 * _KIB, 2 * _MIB, quick=8, slow=8, share=1, quick_seconds=1.0, patience_seconds=5.0
)
# Those of replicas that serve have places of their own: a canary never waits behind a thousand of them.
CHECK = Door(
    "a check of a replica", 640 * _KIB, 2 * _MIB, quick=8, slow=8, share=1, quick_seconds=1.0, patience_seconds=5.0
)

# Reconciles and captures read ConfigMaps each by themselves.
DOORS = (METRICS, CONFIG_MAP, CONFIG_MAP, CANARY_PROBE, CHECK)


async def read_body(chunks: AsyncIterator[bytes], most: float, where: str) -> bytes:
    """All of an answer's body; OverBudget as soon as it has more than `most` bytes, which names `where`."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > most:
            raise OverBudget(f"{where}: more than {most} bytes")
        body += chunk
    return bytes(body)


@dataclass(eq=False, slots=True)
class Place:
    """One place of a pool, while a task holds it or waits for it."""

    service: Hashable
    tenant: Hashable
    patience: float
    task: asyncio.Task[object]
    since: float = 0.0
    moved: float = 0.0
    """When it was taken, and when its holder last got on (the loop's clock)."""
    lost: bool = False

    def progress(self) -> None:
        """Tell that the work goes on: of those that hold a slow place, the one that is silent for longest loses it."""
        self.moved = asyncio.get_running_loop().time()

    @property
    def silent_until(self) -> float:
        """Until when its holder may say nothing before it may lose the place."""
        return self.moved + self.patience


class Places:
    """The places of a door, shared out fairly.

    The next place is the tenant's that holds the fewest, and of its services each has its turn, whatever number of
    requests they have waiting. A holder gives its quick place to those who wait once it has had it for `quick_seconds`,
    and goes on in a slow one. Where these are all taken, a tenant with more places than the one that waits loses its
    most silent one; among tenants with as many, the place that has been silent for longest is lost, if that was for
    longer than its patience. So however many engines of one tenant hang, another tenant gets a place after
    `quick_seconds`, or after `patience_seconds` where every place is another tenant's; and among themselves who waits
    gets one after `patience_seconds * (1 + services that wait / quick)`.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self._quick: dict[Place, None] = {}
        """In the order in which they were taken."""
        self._slow: dict[Place, None] = {}
        self._held: Counter[Hashable] = Counter()
        self._tenants: Counter[Hashable] = Counter()
        """Places that services, and that tenants hold."""
        self._waiting: dict[Hashable, deque[tuple[Place, asyncio.Future[None]]]] = {}
        self._turns: dict[Hashable, dict[Hashable, None]] = {}
        """By tenant, in the order of their turns, services that wait and hold less than their share, in theirs."""
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def of(
        self, service: Hashable, tenant: Hashable, patience_seconds: float | None = None
    ) -> AsyncIterator[Place]:
        """A place for one piece of work of a tenant's service: waits for it, and gives it back.

        Work that lost its place and begins anew may be given more patience than the door's, or it might never end.

        Raises:
            PlaceLost: others have got the place; the work is cancelled.
        """
        task, cancelled = asyncio.current_task(), None
        assert task is not None  # noqa: S101 - whoever waits is a task
        cancelling = task.cancelling()
        place = Place(service, tenant, patience_seconds or self.door.patience_seconds, task)
        await self._enter(place)
        try:
            yield place
        except asyncio.CancelledError as error:
            cancelled = error
            raise
        finally:
            self._leave(place)
            if place.lost and task.uncancel() <= cancelling and cancelled is not None:
                held = asyncio.get_running_loop().time() - place.since
                raise PlaceLost(f"{self.door.what}: stopped after {held:.1f} s, others wait") from cancelled

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._quick) + len(self._slow)

    async def _enter(self, place: Place) -> None:
        asked = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(place.service, deque())
        queue.append((place, asked))
        self._queue_up(place)
        self._share_out()
        try:
            await asked
        except asyncio.CancelledError:
            if place in self._quick or place in self._slow:
                self._leave(place)
            else:
                with contextlib.suppress(ValueError):  # its turn may have come when it was cancelled already
                    queue.remove((place, asked))
                self._queue_up(place)
            raise

    def _leave(self, place: Place) -> None:
        """Give a place back; one that was lost is gone already."""
        if self._drop(place):
            self._share_out()

    def _take(self, place: Place, now: float) -> None:
        place.since = place.moved = now
        self._quick[place] = None
        self._held[place.service] += 1
        self._tenants[place.tenant] += 1

    def _drop(self, place: Place) -> bool:
        lane = self._quick if place in self._quick else self._slow
        if place not in lane:
            return False
        del lane[place]
        for held, who in ((self._held, place.service), (self._tenants, place.tenant)):
            held[who] -= 1
            if not held[who]:
                del held[who]
        self._queue_up(place)
        return True

    def _queue_up(self, place: Place) -> None:
        """Keep `_turns` true for the service of this place."""
        service, turns = place.service, self._turns.get(place.tenant, {})
        if not self._waiting.get(service):
            self._waiting.pop(service, None)
        if service in self._waiting and self._held[service] < self.door.share:
            self._turns.setdefault(place.tenant, turns).setdefault(service)
        elif service in turns:
            del turns[service]
            if not turns:
                del self._turns[place.tenant]

    def _share_out(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._turns:
            tenant = min(self._turns, key=self._tenants.__getitem__)
            if len(self._quick) >= self.door.quick and not self._make_room(tenant, now):
                break
            service = next(iter(self._turns[tenant]))
            place, asked = self._waiting[service].popleft()
            if not asked.done():
                self._take(place, now)
                asked.set_result(None)
            # Both go to the end of their line.
            turns = self._turns.pop(tenant)
            del turns[service]
            if turns:
                self._turns[tenant] = turns
            self._queue_up(place)
        self._arm(now)

    def _make_room(self, tenant: Hashable, now: float) -> bool:
        """Free a quick place: its oldest holder moves on, if its time is over and a slow place is or becomes free."""
        oldest = next(iter(self._quick))
        if now < oldest.since + self.door.quick_seconds:
            return False
        if len(self._slow) >= self.door.slow:
            loser = self._loser(tenant, [*self._slow, oldest], now)
            if loser is None:
                return False
            self._drop(loser)
            loser.lost = True
            loser.task.cancel()
            if loser is oldest:
                return True
        del self._quick[oldest]
        self._slow[oldest] = None
        return True

    def _loser(self, tenant: Hashable, holders: Sequence[Place], now: float) -> Place | None:
        """Whose place this tenant gets: one of a tenant with at least two more, or else one that is silent too long."""
        most = max(self._tenants[place.tenant] for place in holders)
        if most >= self._tenants[tenant] + 2:
            return min((p for p in holders if self._tenants[p.tenant] == most), key=lambda place: place.moved)
        silent = min(holders, key=lambda place: place.silent_until)
        return silent if now >= silent.silent_until else None

    def _arm(self, now: float) -> None:
        """Look again when the oldest quick place has been held for long enough, if somebody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            quick = self.door.quick_seconds
            wait = max(next(iter(self._quick)).since + quick - now, quick / 10)
            self._timer = asyncio.get_running_loop().call_later(wait, self._share_out)
