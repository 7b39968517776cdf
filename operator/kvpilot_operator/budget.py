"""Limits on the bytes, work and concurrency of input that tenants control, so that no tenant exhausts the operator.

docs/benchmarks/operator-parsers.md has the measured cost of each input.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvpilot_operator.errors import PermitLost
from kvpilot_probes.answers import READ_BYTES

_KIB, _MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of one kind of input: `permits` inputs at a time for all tenants together, and `share` for one tenant."""

    what: str
    read_bytes: int
    permits: int
    share: int


# vLLM's metrics page has about 50 KiB for each data-parallel rank, so 1 MiB is enough for 20 ranks behind one server.
# The operator needs about 192 KiB of memory to read a page. It reads up to 450 pages a second (control/pilot.py). If
# engines answer within 10 ms, as healthy ones do, at most 5 pages are read at a time. The other permits are for slow
# engines.
METRICS = InputLimits("a page of metrics", 1 * _MIB, permits=256, share=64)
METRICS_SOCKET_BYTES = 32 * _KIB
# Limits on a page's lines: their length and their number. vLLM 0.32's longest line (cache_config_info) has 1.1 KiB, and
# each rank has about 300 lines.
METRICS_LINE_BYTES = 16 * _KIB
METRICS_LINES = 16_384
METRICS_CHUNK_BYTES = 32 * _KIB
# Read a chunk in steps of this many lines, which take at most 0.7 ms. Other ready tasks run between steps.
METRICS_STEP_LINES = 256
METRICS_STEPS = 4
# Cost of a page in units of 2.5 us of CPU time: one for each line, and one for each 128 bytes. Each pod may cost 2,000
# units a second. So a page of 20 ranks (14,000 units) can be read every 7 s, and the largest page (24,576 units) every
# 12.3 s.
METRICS_WORK_BYTES = 128
METRICS_WORK_PER_SECOND = 2_000

# Refuse a larger ConfigMap without parsing it. A pack needs at most 32 KiB (probes/packs.py), but an object may have up
# to 1.5 MiB.
CONFIG_MAP_BYTES = 256 * _KIB
CONFIG_MAPS = 4

# Limit of all custom packs of one service together.
PACKS_BYTES = 128 * _KIB

# A probe takes at most 4 MiB of memory, and about 0.5 MiB with the built-in packs and a short context. It takes seconds
# to minutes. An answer of READ_BYTES can hold a text of 65,536 tokens of 10 bytes each. Longer prompts are put together
# from several such texts.
CANARY_PROBE = InputLimits("a probe of a canary", READ_BYTES, permits=16, share=8)
# Probes of serving replicas have separate permits, so that a canary never waits behind a thousand of them. While users'
# requests run, such a probe pauses most of the time, and keeps only the baseline in memory (decision 111). 64 probes
# take at most 256 MiB.
CHECK = InputLimits("a check of a replica", READ_BYTES, permits=64, share=32)

# The operator checks a bearer token with two requests to the API server. Each client address has its own share of
# permits, so a client that tries many tokens cannot starve the others.
TOKEN_REVIEW = InputLimits("a review of a token", 0, permits=4, share=2)


class Permits:
    """A semaphore for all tenants (namespaces or addresses), with a smaller semaphore for each tenant.

    While others wait, work that reports no progress for `patience_seconds` loses its permit. So a hanging engine delays
    the others by seconds only.
    """

    def __init__(self, limits: InputLimits) -> None:
        self._what, self._share = limits.what, limits.share
        self._all = asyncio.Semaphore(limits.permits)
        self._tenants: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def of(self, tenant: Hashable, patience_seconds: float = math.inf) -> AsyncIterator[Callable[[], None]]:
        """Hold a permit for the block, and yield a function that reports progress.

        Raise PermitLost if the block reports no progress for `patience_seconds` while others wait.
        """
        loop, moved = asyncio.get_running_loop(), math.inf
        ours = self._tenants.setdefault(tenant, asyncio.Semaphore(self._share))

        def progress() -> None:
            nonlocal moved
            moved = loop.time()

        async def watch(limit: asyncio.Timeout) -> None:
            while not self._waiting or loop.time() < moved + patience_seconds:
                await asyncio.sleep(min(patience_seconds / 2, 1.0))
            limit.reschedule(loop.time())

        async with contextlib.AsyncExitStack() as held:
            self._waiting += 1
            try:
                await held.enter_async_context(ours)
                await held.enter_async_context(self._all)
            finally:
                self._waiting -= 1
            progress()
            try:
                async with asyncio.timeout(None) as limit:
                    if patience_seconds < math.inf:
                        watching = asyncio.create_task(watch(limit))
                        held.callback(watching.cancel)
                    yield progress
            except TimeoutError as error:
                if limit.expired():
                    words = f"{self._what}: no progress for {patience_seconds:g} s while others wait"
                    raise PermitLost(words) from error
                raise
