"""The places of a door: nobody waits behind those that hang, and nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.budget import ALL_DOORS_BYTES, DOORS, Door, Places, read_body
from kvpilot_operator.errors import OverBudget, PlaceLost

DOOR = Door("a test", 1024, 1024, quick=2, slow=2, share=2, quick_seconds=0.02, patience_seconds=0.02)


def test_all_doors_with_every_place_taken_fit_in_their_part_of_the_container() -> None:
    assert sum(door.most_bytes for door in DOORS) <= ALL_DOORS_BYTES
    for door in DOORS:
        assert door.share <= (door.quick + door.slow) / 4


async def _chunks(*chunks: bytes):
    for chunk in chunks:
        yield chunk


async def test_a_body_is_read_up_to_its_limit_and_refused_beyond() -> None:
    assert await read_body(_chunks(b"ab", b"cd"), 4, "here") == b"abcd"
    with pytest.raises(OverBudget, match="here: more than 3 bytes"):
        await read_body(_chunks(b"ab", b"cd"), 3, "here")


async def hang(places: Places, service: str) -> None:
    async with places.of(service, service):
        await asyncio.Event().wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def close(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_service_holds_no_more_than_its_share() -> None:
    places = Places(replace(DOOR, quick=8))
    greedy = [asyncio.create_task(hang(places, "greedy")) for _ in range(20)]
    await settle()
    assert places.taken == DOOR.share
    async with places.of("other", "other"):
        assert places.taken == DOOR.share + 1
    await close(*greedy)
    assert places.taken == 0


async def test_services_take_turns_however_many_requests_one_of_them_has() -> None:
    places = Places(replace(DOOR, quick=1, slow=0, quick_seconds=60, patience_seconds=60))
    order: list[str] = []

    async def work(service: str) -> None:
        async with places.of(service, service):
            order.append(service)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(service) for service in ["many"] * 10 + ["few", "few", "one"]))
    assert order[:6] == ["many", "many", "few", "one", "many", "few"]
    assert Counter(order) == {"many": 10, "few": 2, "one": 1}


async def test_tenants_take_turns_however_many_services_one_of_them_has() -> None:
    places = Places(replace(DOOR, quick=1, slow=0, quick_seconds=60, patience_seconds=60))
    order: list[str] = []

    async def work(service: str) -> None:
        async with places.of(service, service[0]):
            order.append(service)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(service) for service in [*(f"a{i}" for i in range(10)), "b1", "b2", "c1"]))
    assert order[:6] == ["a0", "a1", "b1", "c1", "a2", "b2"]
    assert sorted(order) == sorted({*order})


async def test_a_tenant_whose_places_are_many_and_busy_gives_one_to_a_tenant_with_none() -> None:
    places = Places(DOOR)
    lost: list[int] = []

    async def busy(i: int) -> None:
        try:
            async with places.of(i, "greedy", 60) as place:
                while True:
                    place.progress()
                    await asyncio.sleep(0.001)
        except PlaceLost:
            lost.append(i)

    greedy = [asyncio.create_task(busy(i)) for i in range(20)]
    async with asyncio.timeout(10):
        while places.taken < DOOR.quick + DOOR.slow:
            await asyncio.sleep(DOOR.patience_seconds)
    assert not lost
    async with asyncio.timeout(10), places.of("good", "other"):
        await settle()
        assert lost
        assert places.taken <= DOOR.quick + DOOR.slow
    await close(*greedy)
    assert places.taken == 0


async def test_who_hangs_makes_room_in_the_quick_lane_long_before_it_may_lose_its_place() -> None:
    places = Places(replace(DOOR, quick=1, slow=1, patience_seconds=60))
    first = asyncio.create_task(hang(places, "a"))
    await settle()
    async with asyncio.timeout(10), places.of("b", "b"):
        assert places.taken == 2
        third = asyncio.create_task(hang(places, "c"))
        await asyncio.sleep(5 * DOOR.quick_seconds)
        # Now all places are taken, and nobody has been silent for too long.
        assert not first.done()
        assert places.taken == 2
    await settle()
    assert places.taken == 2
    await close(first, third)


async def test_work_with_more_patience_is_not_the_first_to_lose_its_place() -> None:
    places = Places(replace(DOOR, quick=1, slow=1))

    async def waits(service: str, patience: float) -> None:
        async with places.of(service, service, patience):
            await asyncio.Event().wait()

    patient = asyncio.create_task(waits("patient", 60))
    await settle()
    hanging = asyncio.create_task(hang(places, "hangs"))
    await settle()
    async with asyncio.timeout(10), places.of("third", "third"):
        await settle()
        assert hanging.done()
        assert not patient.done()
    await close(patient)
    assert isinstance(hanging.exception(), PlaceLost)


async def test_a_request_that_is_cancelled_in_the_moment_of_its_turn_is_gone() -> None:
    places = Places(replace(DOOR, quick=1, slow=0, quick_seconds=60, patience_seconds=60))
    async with places.of("first", "first"):
        second = asyncio.create_task(hang(places, "second"))
        await settle()
        second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert places.taken == 0
    async with asyncio.timeout(10), places.of("third", "third"):
        assert places.taken == 1


async def test_however_many_hang_everybody_gets_a_place() -> None:
    places = Places(DOOR)
    hanging = [asyncio.create_task(hang(places, f"hangs-{i}")) for i in range(20)]
    await settle()
    async with asyncio.timeout(10):  # 20 services that wait: 11 times the patience
        async with places.of("good", "good"):
            assert places.taken <= DOOR.quick + DOOR.slow
    await close(*hanging)
    assert places.taken == 0


async def test_who_is_silent_for_longest_loses_the_place_and_is_told() -> None:
    places = Places(replace(DOOR, quick=1, slow=1))
    works = asyncio.Event()

    async def busy() -> str:
        async with places.of("busy", "busy") as place:
            while not works.is_set():
                place.progress()
                await asyncio.sleep(0)
        return "done"

    at_work = asyncio.create_task(busy())
    await settle()
    hanging = asyncio.create_task(hang(places, "hangs"))
    await settle()
    async with asyncio.timeout(10), places.of("third", "third"):
        works.set()
    with pytest.raises(PlaceLost, match="a test: stopped after"):
        await hanging
    assert await at_work == "done"
    assert places.taken == 0


async def test_a_cancelled_holder_is_cancelled_and_not_told_of_a_lost_place() -> None:
    places = Places(DOOR)
    task = asyncio.create_task(hang(places, "a"))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert places.taken == 0


async def test_nobody_loses_a_place_that_nobody_waits_for() -> None:
    places = Places(DOOR)
    tasks = [asyncio.create_task(hang(places, f"{i}")) for i in range(DOOR.quick)]
    await asyncio.sleep(3 * DOOR.patience_seconds)
    assert not any(task.done() for task in tasks)
    await close(*tasks)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["work", "hang", "cancel", "fail"])), max_size=40))
def test_whatever_holders_do_places_are_never_exceeded_and_all_come_back(steps: list[tuple[int, str]]) -> None:
    async def one(places: Places, service: int, does: str) -> None:
        async with places.of(service, service % 3) as place:
            assert places.taken <= DOOR.quick + DOOR.slow
            assert held[service] < DOOR.share
            held[service] += 1
            try:
                await asyncio.sleep(0)
                if does == "hang":
                    await asyncio.Event().wait()
                if does == "fail":
                    raise ValueError(place)
            finally:
                held[service] -= 1

    async def all_of_them() -> None:
        places = Places(replace(DOOR, quick_seconds=0.001, patience_seconds=0.001))
        tasks = []
        for service, does in steps:
            tasks.append(asyncio.create_task(one(places, service, does)))
            if does == "cancel":
                await asyncio.sleep(0)
                tasks[len(tasks) // 2].cancel()
        # A service that has no two of its own that hang is served, whatever the others do.
        hanging = Counter(service for service, does in steps if does == "hang")
        served = [
            task
            for task, (service, does) in zip(tasks, steps, strict=True)
            if does != "hang" and hanging[service] < DOOR.share
        ]
        if served:
            _, left = await asyncio.wait(served, timeout=10)
            assert not left
        await close(*tasks)
        assert places.taken == 0
        async with asyncio.timeout(10), places.of("afterwards", "afterwards"):
            assert places.taken == 1

    held: Counter[int] = Counter()
    asyncio.run(all_of_them())
