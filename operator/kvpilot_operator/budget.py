"""Limits on the input of one service, and so on its cost for the operator.

Three things are bounded. Bytes: an answer beyond `read_bytes` is refused while it is read. Work: parsers are linear in
their input, which has a bounded size; pages of metrics, which are read again and again, also have a rate
(`METRICS_WORK_PER_SECOND`). Concurrency: a service holds at most `share` permits, and tenants (namespaces) get them by
round robin. A holder that is silent for longer than `patience_seconds` may lose its permit (`Permits`).
docs/benchmarks/operator-parsers.md has the cost of each input.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvpilot_operator.errors import OverBudget, PermitLost

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of one kind of input. `permits` are shared by all services; one service gets at most `share`."""

    what: str
    read_bytes: int
    permits: int
    share: int
    patience_seconds: float


# A page of vLLM is about 50 KiB for each data parallel rank, so this is 20 ranks behind one server. It is read by
# chunks and never held whole: the socket's buffers, a chunk and a line take about 192 KiB. A healthy engine answers
# within 10 ms; 450 pages a second (control/pilot.py) then take 5 permits, which leaves the others for slow engines.
METRICS = InputLimits("a page of metrics", 1 * _MIB, permits=256, share=8, patience_seconds=2.0)
METRICS_SOCKET_BYTES = 32 * _KIB
# The longest line of a vLLM 0.32 (its cache_config_info) has 1.1 KiB. A rank has about 300 lines.
METRICS_LINE_BYTES = 16 * _KIB
METRICS_LINES = 16_384
METRICS_CHUNK_BYTES = 32 * _KIB
# Read a chunk in steps of this many lines: a step takes at most 0.7 ms of the event loop, or 0.3 ms for a real page.
# Other ready tasks run between steps. A fleet of 2,000 services has about 1,400 steps a second.
METRICS_STEP_LINES = 256
METRICS_STEPS = 4
# Work is counted in lines (2.5 us each), plus a line for each 128 bytes. This is the rate for each pod of a service: a
# pod with 20 ranks (9,000 lines) is scraped every 4.5 s, and one with the largest allowed page every 12 s.
METRICS_WORK_BYTES = 128
METRICS_WORK_PER_SECOND = 2_000

# A pack has at most 32 KiB (probes/packs.py), but the API server sends whole objects of up to 1.5 MiB. A larger
# ConfigMap than this is refused before it is parsed.
CONFIG_MAP_BYTES = 256 * _KIB
CONFIG_MAPS = 4

# Limit of all custom packs of one service together.
PACKS_BYTES = 128 * _KIB

# A run holds its prompts (0.5 MiB of text, or a baseline of 1.1 MiB), one question, and a line of the answer or the
# tokens of a prompt, 2 MiB at most; with the built-in packs some 0.5 MiB. It takes seconds on a GPU and half a minute
# on a CPU. Only an engine that hangs or computes a very long prompt is silent for longer than the patience. No prompt
# has more than the 65,536 tokens that a baseline keeps, of 10 bytes each.
CANARY_PROBE = InputLimits("a probe of a canary", 640 * _KIB, permits=16, share=1, patience_seconds=5.0)
# Probes of serving replicas have separate permits, so that a canary never waits behind a thousand of them.
CHECK = InputLimits("a check of a replica", 640 * _KIB, permits=16, share=1, patience_seconds=5.0)

# A reader of /metrics costs two requests to the API server. Each address has its own share, so an address that tries
# tokens cannot starve others; a request takes 15 s at most.
TOKEN_REVIEW = InputLimits("a review of a token", 0, permits=4, share=2, patience_seconds=60.0)


async def read_body(chunks: AsyncIterator[bytes], most: float, where: str) -> bytes:
    """Return an answer's whole body. Raise OverBudget, which names `where`, if it has more than `most` bytes."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > most:
            raise OverBudget(f"{where}: more than {most} bytes")
        body += chunk
    return bytes(body)


async def whole_lines(
    chunks: AsyncIterator[bytes], where: str = "", most: float = math.inf, longest: float = math.inf
) -> AsyncIterator[bytes]:
    """Yield the non-empty lines of a stream. An incomplete last line is dropped.

    Raises:
        OverBudget: more than `most` bytes, or a line of more than `longest`; names `where`.
    """
    line = bytearray()
    async for chunk in chunks:
        most -= len(chunk)
        if most < 0:
            raise OverBudget(f"{where}: more bytes than its tokens can take")
        parts = chunk.split(b"\n")
        for i, part in enumerate(parts):
            if i:
                if line.strip():
                    yield bytes(line)
                line.clear()
            line += part
            if len(line) > longest:
                raise OverBudget(f"{where}: a line of more than {longest} bytes")


# No permit is revoked earlier for another tenant: healthy work is mostly done by then.
_LEAST_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Permit:
    """One permit, while a task holds it or waits for it."""

    tenant: Hashable
    patience: float
    task: asyncio.Task[object]
    turn: asyncio.Future[None]
    since: float = 0.0
    moved: float = 0.0
    """Time of the holder's last progress (the loop's clock)."""
    lost: bool = False

    def progress(self) -> None:
        """Report progress: the holder that has been silent for longest loses its permit first."""
        self.moved = asyncio.get_running_loop().time()

    @property
    def silent_until(self) -> float:
        """The time after which the holder may lose the permit, unless it reports progress before."""
        return self.moved + self.patience


class Permits:
    """Semaphore that shares its permits fairly and can revoke them.

    A service waits for its share first, in the order of its requests. The next permit is the tenant's that holds the
    fewest. If all are taken, a tenant with at least two more than the waiting one loses one after a second; among
    tenants with equally many, a permit is lost after a silence beyond its patience. So another tenant gets a permit
    within a second or two, however many engines of one tenant hang. Within one tenant a request waits for about
    `patience_seconds * (1 + requests before it / permits)`.
    """

    def __init__(self, limits: InputLimits) -> None:
        self.limits = limits
        self._least = min(_LEAST_SECONDS, limits.patience_seconds)
        self._held: dict[Permit, None] = {}
        self._tenants: Counter[Hashable] = Counter()
        """Permits that each tenant holds."""
        self._waiting: dict[Hashable, deque[Permit]] = {}
        """Waiting permits by tenant. Among tenants with equally many permits, the first is served and moves to the
        end."""
        self._shares: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def of(
        self, service: Hashable, tenant: Hashable, patience_seconds: float | None = None
    ) -> AsyncIterator[Permit]:
        """Wait for a permit for one piece of work of a tenant's service, and give it back in the end.

        Work that restarts after losing its permit may get more patience than others, or it might never end.

        Raises:
            PermitLost: others have got the permit; the work is cancelled.
        """
        loop, task, cancelled = asyncio.get_running_loop(), asyncio.current_task(), None
        assert task is not None  # noqa: S101 - whoever waits is a task
        cancelling = task.cancelling()
        async with self._shares.setdefault(service, asyncio.Semaphore(self.limits.share)):
            permit = Permit(tenant, patience_seconds or self.limits.patience_seconds, task, loop.create_future())
            self._waiting.setdefault(tenant, deque()).append(permit)
            try:
                self._share_out()
                await permit.turn
                yield permit
            except asyncio.CancelledError as error:
                cancelled = error
                raise
            finally:
                permit.turn.cancel()
                if self._drop(permit):
                    self._share_out()
                if permit.lost and task.uncancel() <= cancelling and cancelled is not None:
                    held = loop.time() - permit.since
                    raise PermitLost(f"{self.limits.what}: stopped after {held:.1f} s, others wait") from cancelled

    @property
    def taken(self) -> int:
        """The number of permits that are taken."""
        return len(self._held)

    def _drop(self, permit: Permit) -> bool:
        """Take a permit from its holder. Return False if it is not held."""
        if permit not in self._held:
            return False
        del self._held[permit]
        self._tenants[permit.tenant] -= 1
        if not self._tenants[permit.tenant]:
            del self._tenants[permit.tenant]
        return True

    def _share_out(self) -> None:
        now = asyncio.get_running_loop().time()
        while (tenant := self._next_tenant()) is not None:
            if len(self._held) >= self.limits.permits and not self._take_back(tenant, now):
                break
            queue = self._waiting.pop(tenant)
            permit = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            permit.since = permit.moved = now
            self._held[permit] = None
            self._tenants[tenant] += 1
            permit.turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if tenant is not None:
            self._timer = asyncio.get_running_loop().call_later(self._least, self._share_out)

    def _next_tenant(self) -> Hashable | None:
        """Return the waiting tenant with the fewest permits, or None if no tenant waits."""
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0].turn.done():  # drop requests that were cancelled while they waited
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
        return min(self._waiting, key=self._tenants.__getitem__, default=None)

    def _take_back(self, tenant: Hashable, now: float) -> bool:
        """Revoke a permit for this tenant: from a tenant with at least two more, or from a holder that is silent for
        too long."""
        most = max(self._tenants[permit.tenant] for permit in self._held)
        if most >= self._tenants[tenant] + 2:
            losers = [p for p in self._held if self._tenants[p.tenant] == most and now >= p.since + self._least]
        else:
            losers = [p for p in self._held if now >= p.silent_until]
        if not losers:
            return False
        loser = min(losers, key=lambda permit: permit.silent_until)
        self._drop(loser)
        loser.lost = True
        loser.task.cancel()
        return True
