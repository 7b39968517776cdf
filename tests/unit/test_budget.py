"""Permits of an input: hanging calls block no other service, and no permit is lost or counted twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.budget import InputLimits, Permits, read_body, whole_lines
from kvpilot_operator.errors import OverBudget, PermitLost

LIMITS = InputLimits("a test", 1024, permits=4, share=2, patience_seconds=0.02)


async def _chunks(*chunks: bytes):
    for chunk in chunks:
        yield chunk


async def test_a_body_is_read_up_to_its_limit_and_refused_beyond() -> None:
    assert await read_body(_chunks(b"ab", b"cd"), 4, "here") == b"abcd"
    with pytest.raises(OverBudget, match="here: more than 3 bytes"):
        await read_body(_chunks(b"ab", b"cd"), 3, "here")


async def test_lines_are_put_together_from_chunks_and_empty_ones_are_left_out() -> None:
    chunks = (b"a", b"b\n\n \nc", b"", b"d\ne\nunfinished")
    assert [line async for line in whole_lines(_chunks(*chunks))] == [b"ab", b"cd", b"e"]


@pytest.mark.parametrize(("most", "longest", "words"), [(5, 9, "more bytes"), (9, 3, "a line of more than 3 bytes")])
async def test_lines_beyond_a_limit_are_refused(most: int, longest: int, words: str) -> None:
    with pytest.raises(OverBudget, match=f"here: {words}"):
        async for _ in whole_lines(_chunks(b"abc", b"def"), "here", most, longest):
            pass


async def hang(permits: Permits, service: str) -> None:
    async with permits.of(service, service):
        await asyncio.Event().wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def close(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_service_holds_no_more_than_its_share() -> None:
    permits = Permits(replace(LIMITS, permits=8))
    greedy = [asyncio.create_task(hang(permits, "greedy")) for _ in range(20)]
    await settle()
    assert permits.taken == LIMITS.share
    async with permits.of("other", "other"):
        assert permits.taken == LIMITS.share + 1
    await close(*greedy)
    assert permits.taken == 0


async def test_services_are_served_by_round_robin_however_many_requests_one_of_them_has() -> None:
    permits = Permits(replace(LIMITS, permits=1, patience_seconds=60))
    order: list[str] = []

    async def work(service: str) -> None:
        async with permits.of(service, service):
            order.append(service)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(service) for service in ["many"] * 10 + ["few", "few", "one"]))
    assert order[:6] == ["many", "many", "few", "one", "many", "few"]
    assert Counter(order) == {"many": 10, "few": 2, "one": 1}


async def test_tenants_are_served_by_round_robin_however_many_services_one_of_them_has() -> None:
    permits = Permits(replace(LIMITS, permits=1, patience_seconds=60))
    order: list[str] = []

    async def work(service: str) -> None:
        async with permits.of(service, service[0]):
            order.append(service)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(service) for service in [*(f"a{i}" for i in range(10)), "b1", "b2", "c1"]))
    assert order[:6] == ["a0", "a1", "b1", "c1", "a2", "b2"]
    assert sorted(order) == sorted({*order})


async def test_a_tenant_whose_permits_are_many_and_busy_gives_one_to_a_tenant_with_none() -> None:
    permits = Permits(LIMITS)
    lost: list[int] = []

    async def busy(i: int) -> None:
        try:
            async with permits.of(i, "greedy", 60) as permit:
                while True:
                    permit.progress()
                    await asyncio.sleep(0.001)
        except PermitLost:
            lost.append(i)

    greedy = [asyncio.create_task(busy(i)) for i in range(20)]
    async with asyncio.timeout(10):
        while permits.taken < LIMITS.permits:
            await asyncio.sleep(LIMITS.patience_seconds)
    assert not lost
    async with asyncio.timeout(10), permits.of("good", "other"):
        await settle()
        assert lost
        assert permits.taken <= LIMITS.permits
    await close(*greedy)
    assert permits.taken == 0


async def test_work_with_more_patience_is_not_the_first_to_lose_its_permit() -> None:
    permits = Permits(replace(LIMITS, permits=2))

    async def waits(service: str, patience: float) -> None:
        async with permits.of(service, service, patience):
            await asyncio.Event().wait()

    patient = asyncio.create_task(waits("patient", 60))
    await settle()
    hanging = asyncio.create_task(hang(permits, "hangs"))
    await settle()
    async with asyncio.timeout(10), permits.of("third", "third"):
        await settle()
        assert hanging.done()
        assert not patient.done()
    await close(patient)
    assert isinstance(hanging.exception(), PermitLost)


async def test_a_request_that_is_cancelled_in_the_moment_of_its_turn_is_gone() -> None:
    permits = Permits(replace(LIMITS, permits=1, patience_seconds=60))
    async with permits.of("first", "first"):
        second = asyncio.create_task(hang(permits, "second"))
        await settle()
        second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert permits.taken == 0
    async with asyncio.timeout(10), permits.of("third", "third"):
        assert permits.taken == 1


async def test_however_many_hang_everybody_gets_a_permit() -> None:
    permits = Permits(LIMITS)
    hanging = [asyncio.create_task(hang(permits, f"hangs-{i}")) for i in range(20)]
    await settle()
    async with asyncio.timeout(10):  # 20 services wait: 11 times the patience
        async with permits.of("good", "good"):
            assert permits.taken <= LIMITS.permits
    await close(*hanging)
    assert permits.taken == 0


async def test_who_is_silent_for_longest_loses_the_permit_and_is_told() -> None:
    permits = Permits(replace(LIMITS, permits=2))
    works = asyncio.Event()

    async def busy() -> str:
        async with permits.of("busy", "busy") as permit:
            while not works.is_set():
                permit.progress()
                await asyncio.sleep(0)
        return "done"

    at_work = asyncio.create_task(busy())
    await settle()
    hanging = asyncio.create_task(hang(permits, "hangs"))
    await settle()
    async with asyncio.timeout(10), permits.of("third", "third"):
        works.set()
    with pytest.raises(PermitLost, match="a test: stopped after"):
        await hanging
    assert await at_work == "done"
    assert permits.taken == 0


async def test_a_cancelled_holder_is_cancelled_and_not_told_of_a_lost_permit() -> None:
    permits = Permits(LIMITS)
    task = asyncio.create_task(hang(permits, "a"))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert permits.taken == 0


async def test_nobody_loses_a_permit_that_nobody_waits_for() -> None:
    permits = Permits(LIMITS)
    tasks = [asyncio.create_task(hang(permits, f"{i}")) for i in range(LIMITS.permits)]
    await asyncio.sleep(3 * LIMITS.patience_seconds)
    assert not any(task.done() for task in tasks)
    await close(*tasks)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["work", "hang", "cancel", "fail"])), max_size=40))
def test_whatever_holders_do_permits_are_never_exceeded_and_all_come_back(steps: list[tuple[int, str]]) -> None:
    async def one(permits: Permits, service: int, does: str) -> None:
        async with permits.of(service, service % 3) as permit:
            assert permits.taken <= LIMITS.permits
            assert held[service] < LIMITS.share
            held[service] += 1
            try:
                await asyncio.sleep(0)
                if does == "hang":
                    await asyncio.Event().wait()
                if does == "fail":
                    raise ValueError(permit)
            finally:
                held[service] -= 1

    async def all_of_them() -> None:
        permits = Permits(replace(LIMITS, patience_seconds=0.001))
        tasks = []
        for service, does in steps:
            tasks.append(asyncio.create_task(one(permits, service, does)))
            if does == "cancel":
                await asyncio.sleep(0)
                tasks[len(tasks) // 2].cancel()
        # A service with fewer than two hanging calls of its own is served, whatever other services do.
        hanging = Counter(service for service, does in steps if does == "hang")
        served = [
            task
            for task, (service, does) in zip(tasks, steps, strict=True)
            if does != "hang" and hanging[service] < LIMITS.share
        ]
        if served:
            _, left = await asyncio.wait(served, timeout=10)
            assert not left
        await close(*tasks)
        assert permits.taken == 0
        async with asyncio.timeout(10), permits.of("afterwards", "afterwards"):
            assert permits.taken == 1

    held: Counter[int] = Counter()
    asyncio.run(all_of_them())
