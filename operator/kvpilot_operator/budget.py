"""What one service may cost the operator: limits on every kind of input that tenants send it.

The operator's container has 512 MiB. A fleet of 2,000 services and 6,000 pods takes up to 368 of them
(docs/benchmarks/fleet.md), so that all inputs together, with every permit taken and every answer as large as it may be,
get `ALL_INPUTS_BYTES`; the rest is the allocator's.

Three things are bounded. Bytes: an answer that exceeds `read_bytes` is refused while it is read, and reading one
takes at most `held_bytes` of memory (docs/benchmarks/operator-parsers.md has what they take). Work: parsers are linear
in what they read, and what they read is bounded; pages of metrics, which are read for ever, have a rate besides
(`METRICS_WORK_PER_SECOND`). Concurrency: a service holds at most `share` permits, tenants (namespaces) get them by
round robin, and who holds one for longer than `patience_seconds` gives way to those who wait (`Permits`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass

from kvpilot_operator.errors import OverBudget, PermitLost

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of one kind of input.

    `quick` permits are for those that take no longer than `quick_seconds`, which is what keeps the others from waiting;
    who takes longer moves to one of the `slow` ones. Where these are taken, too, who waits gets the permit of one that
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
        """The memory that this input takes at most."""
        return self.held_bytes * (self.quick + self.slow)


ALL_INPUTS_BYTES = 128 * _MIB

# A page of vLLM is some 50 KiB for each data parallel rank, so 20 ranks behind one server. It is read chunk by chunk
# and never held: what is held are the socket's buffers, a chunk and a line. A healthy engine answers within 10 ms; 450
# pages a second (control/pilot.py) then take 5 permits, and the rest are for engines that are slow.
METRICS = InputLimits(
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
METRICS_STEP = InputLimits(
    "a step of a page", METRICS_CHUNK_BYTES, 0, quick=4, slow=0, share=1, quick_seconds=60.0, patience_seconds=60.0
)
# Work is counted in lines, and a line more for each 128 bytes: 2.5 us. A service may take so much for each of its pods:
# one with 20 ranks, of 9,000, is asked every 4.5 s, and one whose page is as large as it may be every 12 s.
METRICS_WORK_BYTES = 128
METRICS_WORK_PER_SECOND = 2_000

# A pack has 32 KiB at most (probes/packs.py). The API server sends whole objects, of up to 1.5 MiB: a ConfigMap with
# more beside the pack than this is refused before it is parsed.
CONFIG_MAP = InputLimits(
    "a ConfigMap", 256 * _KIB, 1 * _MIB, quick=4, slow=0, share=1, quick_seconds=15.0, patience_seconds=15.0
)

# All packs of one service that it brings itself.
PACKS_BYTES = 128 * _KIB

# A run holds its prompts (0.5 MiB of text, or a baseline of 1.1 MiB), the question that is asked and a line of the
# answer or the tokens of a prompt; with the built-in packs some 0.5 MiB. It takes some seconds on a GPU and half a
# minute on a CPU, and no engine is silent for longer than the patience but one that hangs, or that computes a very long
# prompt. Behind engines that hang a good service waits for a second while slow permits are free, else for the patience.
# No prompt has more than the 65,536 tokens that a baseline keeps, of 10 bytes each.
CANARY_PROBE = InputLimits(
    "a probe of a canary", 640 * _KIB, 2 * _MIB, quick=8, slow=8, share=1, quick_seconds=1.0, patience_seconds=5.0
)
# Those of replicas that serve have permits of their own: a canary never waits behind a thousand of them.
CHECK = InputLimits(
    "a check of a replica", 640 * _KIB, 2 * _MIB, quick=8, slow=8, share=1, quick_seconds=1.0, patience_seconds=5.0
)

# Who reads /metrics is asked of the API server, in two requests. Each address has its share, so one that tries tokens
# leaves the others theirs; a request takes 15 s at most.
TOKEN_REVIEW = InputLimits(
    "a review of a token", 0, 0, quick=4, slow=0, share=2, quick_seconds=60.0, patience_seconds=60.0
)

# Reconciles and captures read ConfigMaps each by themselves.
INPUTS = (METRICS, CONFIG_MAP, CONFIG_MAP, CANARY_PROBE, CHECK)


async def read_body(chunks: AsyncIterator[bytes], most: float, where: str) -> bytes:
    """All of an answer's body; OverBudget as soon as it has more than `most` bytes, which names `where`."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > most:
            raise OverBudget(f"{where}: more than {most} bytes")
        body += chunk
    return bytes(body)


@dataclass(eq=False, slots=True)
class Permit:
    """One permit, while a task holds it or waits for it."""

    service: Hashable
    tenant: Hashable
    patience: float
    task: asyncio.Task[object]
    since: float = 0.0
    moved: float = 0.0
    """When it was taken, and when its holder last got on (the loop's clock)."""
    lost: bool = False

    def progress(self) -> None:
        """Tell that the work goes on: of those that hold a slow permit, the one that is silent for longest loses it."""
        self.moved = asyncio.get_running_loop().time()

    @property
    def silent_until(self) -> float:
        """Until when its holder may say nothing before it may lose the permit."""
        return self.moved + self.patience


class Permits:
    """A semaphore whose permits are shared out fairly, and can be taken back.

    The next permit is the tenant's that holds the fewest, and its services get theirs by round robin, whatever number
    of requests they have waiting. A holder gives its quick permit to those who wait once it has had it for
    `quick_seconds`, and goes on in a slow one. Where these are all taken, a tenant with more permits than the one that
    waits loses its most silent one; among tenants with as many, the permit that has been silent for longest is lost, if
    that was for longer than its patience. So however many engines of one tenant hang, another tenant gets a permit
    after `quick_seconds`, or after `patience_seconds` where every permit is another tenant's; and among themselves who
    waits gets one after `patience_seconds * (1 + services that wait / quick)`.
    """

    def __init__(self, limits: InputLimits) -> None:
        self.limits = limits
        self._quick: dict[Permit, None] = {}
        """In the order in which they were taken."""
        self._slow: dict[Permit, None] = {}
        self._held: Counter[Hashable] = Counter()
        self._tenants: Counter[Hashable] = Counter()
        """Permits that services, and that tenants hold."""
        self._waiting: dict[Hashable, deque[tuple[Permit, asyncio.Future[None]]]] = {}
        self._next: dict[Hashable, dict[Hashable, None]] = {}
        """By tenant, services that wait and hold less than their share; both in the order in which they are served."""
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def of(
        self, service: Hashable, tenant: Hashable, patience_seconds: float | None = None
    ) -> AsyncIterator[Permit]:
        """A permit for one piece of work of a tenant's service: waits for it, and gives it back.

        Work that lost its permit and begins anew may be given more patience than the others, or it might never end.

        Raises:
            PermitLost: others have got the permit; the work is cancelled.
        """
        task, cancelled = asyncio.current_task(), None
        assert task is not None  # noqa: S101 - whoever waits is a task
        cancelling = task.cancelling()
        permit = Permit(service, tenant, patience_seconds or self.limits.patience_seconds, task)
        await self._enter(permit)
        try:
            yield permit
        except asyncio.CancelledError as error:
            cancelled = error
            raise
        finally:
            self._leave(permit)
            if permit.lost and task.uncancel() <= cancelling and cancelled is not None:
                held = asyncio.get_running_loop().time() - permit.since
                raise PermitLost(f"{self.limits.what}: stopped after {held:.1f} s, others wait") from cancelled

    @property
    def taken(self) -> int:
        """How many permits are taken."""
        return len(self._quick) + len(self._slow)

    async def _enter(self, permit: Permit) -> None:
        asked = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(permit.service, deque())
        queue.append((permit, asked))
        self._queue_up(permit)
        self._share_out()
        try:
            await asked
        except asyncio.CancelledError:
            if permit in self._quick or permit in self._slow:
                self._leave(permit)
            else:
                with contextlib.suppress(ValueError):  # its turn may have come when it was cancelled already
                    queue.remove((permit, asked))
                self._queue_up(permit)
            raise

    def _leave(self, permit: Permit) -> None:
        """Give a permit back; one that was lost is gone already."""
        if self._drop(permit):
            self._share_out()

    def _take(self, permit: Permit, now: float) -> None:
        permit.since = permit.moved = now
        self._quick[permit] = None
        self._held[permit.service] += 1
        self._tenants[permit.tenant] += 1

    def _drop(self, permit: Permit) -> bool:
        lane = self._quick if permit in self._quick else self._slow
        if permit not in lane:
            return False
        del lane[permit]
        for held, who in ((self._held, permit.service), (self._tenants, permit.tenant)):
            held[who] -= 1
            if not held[who]:
                del held[who]
        self._queue_up(permit)
        return True

    def _queue_up(self, permit: Permit) -> None:
        """Keep `_next` true for the service of this permit."""
        service, services = permit.service, self._next.get(permit.tenant, {})
        if not self._waiting.get(service):
            self._waiting.pop(service, None)
        if service in self._waiting and self._held[service] < self.limits.share:
            self._next.setdefault(permit.tenant, services).setdefault(service)
        elif service in services:
            del services[service]
            if not services:
                del self._next[permit.tenant]

    def _share_out(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._next:
            tenant = min(self._next, key=self._tenants.__getitem__)
            if len(self._quick) >= self.limits.quick and not self._make_room(tenant, now):
                break
            service = next(iter(self._next[tenant]))
            permit, asked = self._waiting[service].popleft()
            if not asked.done():
                self._take(permit, now)
                asked.set_result(None)
            # Both go to the end of their line.
            services = self._next.pop(tenant)
            del services[service]
            if services:
                self._next[tenant] = services
            self._queue_up(permit)
        self._arm(now)

    def _make_room(self, tenant: Hashable, now: float) -> bool:
        """Free a quick permit: its oldest holder moves on, if its time is over and a slow permit is or becomes free."""
        oldest = next(iter(self._quick))
        if now < oldest.since + self.limits.quick_seconds:
            return False
        if len(self._slow) >= self.limits.slow:
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

    def _loser(self, tenant: Hashable, holders: Sequence[Permit], now: float) -> Permit | None:
        """Whose permit this tenant gets: of a tenant with at least two more, or else one that is silent too long."""
        most = max(self._tenants[permit.tenant] for permit in holders)
        if most >= self._tenants[tenant] + 2:
            return min((p for p in holders if self._tenants[p.tenant] == most), key=lambda permit: permit.moved)
        silent = min(holders, key=lambda permit: permit.silent_until)
        return silent if now >= silent.silent_until else None

    def _arm(self, now: float) -> None:
        """Look again when the oldest quick permit has been held for long enough, if somebody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next:
            quick = self.limits.quick_seconds
            wait = max(next(iter(self._quick)).since + quick - now, quick / 10)
            self._timer = asyncio.get_running_loop().call_later(wait, self._share_out)
