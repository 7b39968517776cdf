"""The write fence: when a write may start, its time limit, and the list of writes in flight."""

import asyncio

import pytest

from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.errors import ClusterError, NotLeader


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fence(clock):
    made = WriteFence(clock)
    made.open(110.0, 114.0)
    return made


def passes(fence):
    try:
        with fence.write("PATCH", "/x"):
            return True
    except NotLeader:
        return False


def test_a_new_write_fence_is_closed_and_without_an_election_it_stays_open():
    assert not passes(WriteFence())
    with WriteFence.opened().write("PATCH", "/x") as seconds:
        assert seconds == float("inf")


def test_a_blocked_write_is_named_in_the_error(fence):
    fence.close()
    said = "PATCH /x: HTTP 0: not sent: this replica does not hold the Lease"
    with pytest.raises(NotLeader, match=said), fence.write("PATCH", "/x"):
        pass


def test_the_fence_closes_by_the_clock_alone(fence, clock):
    clock.now = 109.9
    assert passes(fence)
    clock.now = 110.0
    assert not passes(fence)


def test_a_write_gets_the_seconds_until_the_write_deadline(fence, clock):
    clock.now = 109.0
    with fence.write("PATCH", "/x") as seconds:
        assert seconds == 5.0


def test_a_renewal_opens_a_fence_that_had_closed(fence, clock):
    clock.now = 112.0
    fence.open(121.0, 125.0)
    assert passes(fence)


async def test_drained_waits_until_running_writes_have_ended(fence):
    written = asyncio.Event()

    async def write():
        with fence.write("PATCH", "/x"):
            await written.wait()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    fence.close()
    draining = asyncio.create_task(fence.drained(5))
    await asyncio.sleep(0.01)
    assert not draining.done()
    written.set()
    assert await draining
    await writing


async def test_drained_gives_up_on_a_write_that_does_not_end(fence):
    with fence.write("PATCH", "/x"):
        assert not await fence.drained(0.01)


async def test_a_refused_write_counts_as_ended(fence):
    with pytest.raises(ClusterError), fence.write("PATCH", "/x"):
        raise ClusterError("PATCH", "/x", 422, "no")
    assert await fence.drained(1)


@pytest.mark.parametrize("error", [ClusterError("PATCH", "/x", 0, "no answer"), asyncio.CancelledError()])
async def test_a_write_without_an_answer_may_arrive_until_its_deadline(fence, clock, error):
    with pytest.raises(type(error)), fence.write("PATCH", "/x"):
        raise error
    assert not await fence.drained(1)
    clock.now = 113.9
    assert not await fence.drained(1)
    clock.now = 114.0
    assert await fence.drained(1)
