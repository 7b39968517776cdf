"""The gate that writes pass: when it lets one start, how long it gives it, and what it knows of those under way."""

from __future__ import annotations

import asyncio

import pytest

from kvpilot_operator.cluster.gate import Gate
from kvpilot_operator.errors import ClusterError, NotLeader


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def gate(clock):
    made = Gate(clock)
    made.open(110.0, 114.0)
    return made


def passes(gate):
    try:
        with gate.write("PATCH", "/x"):
            return True
    except NotLeader:
        return False


def test_a_new_gate_is_closed_and_an_opened_one_open_for_ever():
    assert not passes(Gate())
    with Gate.opened().write("PATCH", "/x") as seconds:
        assert seconds == float("inf")


def test_a_write_that_is_held_back_says_which(gate):
    gate.close()
    said = "PATCH /x: HTTP 0: not sent: this replica does not hold the Lease"
    with pytest.raises(NotLeader, match=said), gate.write("PATCH", "/x"):
        pass


def test_the_gate_closes_by_the_clock_alone(gate, clock):
    clock.now = 109.9
    assert passes(gate)
    clock.now = 110.0
    assert not passes(gate)


def test_a_write_gets_the_time_until_all_must_be_over(gate, clock):
    clock.now = 109.0
    with gate.write("PATCH", "/x") as seconds:
        assert seconds == 5.0


def test_a_renewal_opens_a_gate_that_had_closed(gate, clock):
    clock.now = 112.0
    gate.open(121.0, 125.0)
    assert passes(gate)


async def test_drained_waits_for_the_write_under_way(gate):
    written = asyncio.Event()

    async def write():
        with gate.write("PATCH", "/x"):
            await written.wait()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    gate.close()
    draining = asyncio.create_task(gate.drained(5))
    await asyncio.sleep(0.01)
    assert not draining.done()
    written.set()
    assert await draining
    await writing


async def test_drained_gives_up_on_a_write_that_does_not_end(gate):
    with gate.write("PATCH", "/x"):
        assert not await gate.drained(0.01)


async def test_a_refused_write_is_over(gate):
    with pytest.raises(ClusterError), gate.write("PATCH", "/x"):
        raise ClusterError("PATCH", "/x", 422, "no")
    assert await gate.drained(1)


@pytest.mark.parametrize("error", [ClusterError("PATCH", "/x", 0, "no answer"), asyncio.CancelledError()])
async def test_a_write_without_an_answer_may_arrive_until_its_time_is_over(gate, clock, error):
    with pytest.raises(type(error)), gate.write("PATCH", "/x"):
        raise error
    assert not await gate.drained(1)
    clock.now = 113.9
    assert not await gate.drained(1)
    clock.now = 114.0
    assert await gate.drained(1)
