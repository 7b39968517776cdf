"""Permits to read input: calls that hang block no other tenant, and no permit is lost or counted twice."""

import asyncio
import contextlib
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats.untrusted import OverBudget, read_body, whole_lines
from kvpilot_operator.budget import InputLimits, Permits
from kvpilot_operator.errors import PermitLost

LIMITS = InputLimits("a test", 1024, permits=4, share=2)
PATIENCE = 0.02


async def _chunks(*chunks: bytes):
    for chunk in chunks:
        yield chunk


async def test_a_body_is_read_up_to_its_limit_and_refused_beyond() -> None:
    assert await read_body(_chunks(b"ab", b"cd"), 4, "here") == b"abcd"
    with pytest.raises(OverBudget, match="here: more than 3 bytes"):
        await read_body(_chunks(b"ab", b"cd"), 3, "here")


async def test_lines_are_joined_from_chunks_and_empty_lines_are_dropped() -> None:
    chunks = (b"a", b"b\n\n \nc", b"", b"d\ne\nunfinished")
    assert [line async for line in whole_lines(_chunks(*chunks))] == [b"ab", b"cd", b"e"]


@pytest.mark.parametrize(("most", "longest", "words"), [(5, 9, "more bytes"), (9, 3, "a line of more than 3 bytes")])
async def test_a_stream_with_too_many_bytes_or_a_too_long_line_is_refused(most: int, longest: int, words: str) -> None:
    with pytest.raises(OverBudget, match=f"here: {words}"):
        async for _ in whole_lines(_chunks(b"abc", b"def"), "here", most, longest):
            pass


class Held:
    """Permits, and the number of permits that each tenant holds."""

    def __init__(self) -> None:
        self.permits = Permits(LIMITS)
        self.by: Counter[object] = Counter()

    async def hang(self, tenant: object, patience: float = math.inf) -> None:
        async with self.permits.of(tenant, patience):
            self.by[tenant] += 1
            assert self.by[tenant] <= LIMITS.share
            assert self.by.total() <= LIMITS.permits
            try:
                await asyncio.Event().wait()
            finally:
                self.by[tenant] -= 1

    def hanging(self, count: int, tenant: str | None = None, patience: float = math.inf) -> list[asyncio.Task[None]]:
        """Start `count` tasks that hang. All belong to `tenant`. If it is None, each task belongs to another tenant."""
        return [asyncio.create_task(self.hang(tenant or f"hangs-{i}", patience)) for i in range(count)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def close(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tenant_holds_no_more_than_its_share() -> None:
    held = Held()
    greedy = held.hanging(20, "greedy")
    await settle()
    assert held.by == {"greedy": LIMITS.share}
    async with asyncio.timeout(10), held.permits.of("other"):
        pass
    await close(*greedy)
    assert held.by.total() == 0


@pytest.mark.parametrize("tenant", [None, "greedy", "good"])
async def test_a_tenant_gets_a_permit_even_if_any_number_of_others_hang(tenant: str | None) -> None:
    held = Held()
    # One greedy tenant cannot take all permits, so none of its tasks must lose a permit, however long it hangs.
    hanging = held.hanging(20, tenant, math.inf if tenant == "greedy" else PATIENCE)
    await settle()
    async with asyncio.timeout(10), held.permits.of("good"):
        pass
    await close(*hanging)
    lost = [task for task in hanging if not task.cancelled()]
    for task in lost:
        with pytest.raises(PermitLost, match=r"a test: no progress for 0\.02 s while others wait"):
            await task
    assert bool(lost) == (tenant != "greedy")


async def test_work_that_continues_keeps_its_permit() -> None:
    held, works = Held(), asyncio.Event()

    async def busy() -> str:
        async with held.permits.of("busy", PATIENCE) as progress:
            while not works.is_set():
                progress()
                await asyncio.sleep(0)
        return "done"

    at_work = asyncio.create_task(busy())
    hanging = held.hanging(8, None, PATIENCE)
    async with asyncio.timeout(10):
        while not any(task.done() for task in hanging):
            await asyncio.sleep(PATIENCE)
    works.set()
    assert await at_work == "done"
    await close(*hanging)


async def test_an_error_of_work_with_a_permit_is_raised_unchanged() -> None:
    held = Held()
    with pytest.raises(TimeoutError, match="of the engine"):
        async with held.permits.of("a", PATIENCE):
            raise TimeoutError("of the engine")
    hanging = held.hanging(1)
    await settle()
    await close(*hanging)
    assert hanging[0].cancelled()


async def test_work_keeps_its_permit_if_no_one_waits() -> None:
    held = Held()
    tasks = held.hanging(LIMITS.permits, None, PATIENCE)
    await asyncio.sleep(5 * PATIENCE)
    assert not any(task.done() for task in tasks)
    await close(*tasks)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["work", "hang", "cancel", "fail"])), max_size=40))
def test_permits_are_never_exceeded_and_always_returned(steps: list[tuple[int, str]]) -> None:
    async def one(held: Held, tenant: int, does: str) -> None:
        if does == "hang":
            await held.hang(tenant, 0.001)
        async with held.permits.of(tenant, 0.001):
            await asyncio.sleep(0)
            if does == "fail":
                raise ValueError(does)

    async def all_of_them() -> None:
        held = Held()
        tasks = []
        for tenant, does in steps:
            tasks.append(asyncio.create_task(one(held, tenant, does)))
            if does == "cancel":
                await asyncio.sleep(0)
                tasks[len(tasks) // 2].cancel()
        working = [task for task, (_, does) in zip(tasks, steps, strict=True) if does != "hang"]
        if working:
            _, left = await asyncio.wait(working, timeout=10)
            assert not left
        await close(*tasks)
        async with asyncio.timeout(10), contextlib.AsyncExitStack() as all_permits:
            for tenant in range(LIMITS.permits):
                await all_permits.enter_async_context(held.permits.of(tenant))

    asyncio.run(all_of_them())
