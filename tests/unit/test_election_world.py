"""Three replicas and one API server in virtual time: no write takes effect while another replica holds the Lease.

Faults cut off, slow down, kill or stop replicas, and a new leader follows each fault. Replicas run the operator's own
loop (`Election`, `Replica`, `WriteFence`). The server has a real server's resource versions and time limits. A write in
flight may land at any moment before its deadline, whether it is answered or not. Other requests arrive within a second,
unless they are lost.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.lease import Candidate, Timing
from kvpilot_operator.control.leader import Election, first_of
from kvpilot_operator.control.leader import Replica as Leading
from kvpilot_operator.errors import ClusterError, Conflict, LeadershipLost

REPLICAS = 3
LEADER = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose sleeps take no time: its clock jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self._virtual = 0.0
        select = self._selector.select

        def jump(timeout):
            self._virtual += timeout
            return select(0)

        self._selector.select = jump

    def time(self):
        return self._virtual


@dataclass
class Server:
    """One Lease, and the record of all writes."""

    lease: dict | None = None
    version: int = 0
    holder: str = ""
    landed: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def replace(self, manifest):
        known = None if self.lease is None else self.lease["metadata"]["resourceVersion"]
        if manifest["metadata"].get("resourceVersion") != known:
            raise Conflict("PUT", "lease", 409, "changed")
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**manifest, "metadata": metadata}
        # If a replica recreates a deleted Lease, it must not lead at once: the old leader may not know of the deletion.
        if known is not None:
            self.holder = manifest["spec"]["holderIdentity"]
        return self.lease

    def write(self, identity):
        now = asyncio.get_running_loop().time()
        self.landed.append((now, identity))
        if identity != self.holder:
            self.faults.append(f"{now:.2f}: a write of {identity} lands while {self.holder or 'nobody'} leads")


class Link:
    """Connection between one process of a replica and the server. Tests change `cut` and `slow` while it is open."""

    def __init__(self, server, dice, delay):
        self.server, self.dice, self._delay = server, dice, delay
        self.cut = self.slow = self.dead = False
        self._waiting = set()

    def reset(self):
        """Break every connection. Requests in flight may or may not land, and no client gets an answer."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(ClusterError("ANY", "thing", 0, "connection reset"))

    async def request(self, act, seconds):
        """Send a request. If the client gives up, the request may still land, and only its answer is lost."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def land():
            try:
                outcome, error = act(), None
            except ClusterError as caught:
                outcome, error = None, caught
            if not self.cut and not self.dead:
                loop.call_later(self.dice.random() * (3 if self.slow else 0.01), tell, outcome, error)

        def tell(outcome, error):
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(outcome)

        if not self.cut and not self.dead:
            processing = self.dice.random() * seconds if self.slow else 0.01
            loop.call_later(self.dice.random() * self._delay + processing, land)
        self._waiting.add(answer)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            self._waiting.discard(answer)


class Leases:
    def __init__(self, link):
        self._link = link

    async def find(self, *_):
        return await self._call(lambda: self._link.server.lease)

    async def create(self, manifest):
        return await self._call(lambda: self._link.server.replace(manifest))

    async def replace(self, manifest):
        return await self._call(lambda: self._link.server.replace(manifest))

    async def _call(self, act):
        try:
            return await self._link.request(act, 15)
        except TimeoutError:
            raise ClusterError("PUT", "lease", 0, "no answer") from None


class Writer:
    """Leader that always has something to write."""

    def __init__(self, identity, fence, link, dice):
        self._identity, self._fence, self._link, self._dice = identity, fence, link, dice
        self._tasks = [asyncio.create_task(self._work()) for _ in range(2)]

    async def ended(self):
        await asyncio.wait(self._tasks)

    async def quiet(self, seconds):
        self._fence.close()
        drained = await self._fence.drained(seconds)
        await self.close()
        return drained

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self):
        while True:
            await asyncio.sleep(self._dice.random())
            try:
                with self._fence.write("PATCH", "x") as seconds:
                    try:
                        await self._link.request(lambda: self._link.server.write(self._identity), min(15, seconds))
                    except TimeoutError:
                        raise ClusterError("PATCH", "x", 0, "no answer") from None
            except ClusterError:
                continue


class Replica:
    """Place for one process at a time. After its end a new process starts under a new name."""

    def __init__(self, number, server, dice, timing, delay):
        self._number, self._server, self._dice, self._timing, self._delay = number, server, dice, timing, delay
        self._rate = 1 + dice.uniform(-1e-3, 1e-3)
        self._offset = dice.uniform(-1e6, 1e6)
        self._wanted = True
        self._begin()
        self.task = asyncio.create_task(self._live())

    def clock(self):
        """Return a monotonic time. Each process has its own origin and a slightly different rate."""
        return asyncio.get_running_loop().time() * self._rate + self._offset

    def kill(self):
        """Simulate SIGKILL: no request leaves the process any more, although its tasks continue."""
        self.link.dead = self.lease_link.dead = True
        self.terminate()

    def terminate(self):
        """Simulate SIGTERM."""
        self._stop.set()

    def end(self):
        self._wanted = False
        self.kill()

    def _begin(self):
        self.link = Link(self._server, self._dice, self._delay)
        self.lease_link = Link(self._server, self._dice, self._delay)
        self._stop = asyncio.Event()

    async def _live(self):
        lives = 0
        while self._wanted:
            lives += 1
            identity, fence, link = f"replica-{self._number}_{lives}", WriteFence(self.clock), self.link
            candidate = Candidate(identity, "ns", "lease", self._timing)
            election = Election(Leases(self.lease_link), fence, candidate, asyncio.Event(), self.clock)

            async def start(identity=identity, fence=fence, link=link):
                return Writer(identity, fence, link, self._dice)

            leading = Leading(fence, start, election)
            with contextlib.suppress(LeadershipLost):
                try:
                    await first_of(self._stop.wait(), self._lead(leading))
                finally:
                    await leading.end()
            await asyncio.sleep(self._dice.random() * 5)
            self._begin()

    async def _lead(self, leading):
        await leading.lead()
        await leading.ended()


KINDS = ("kill", "terminate", "cut", "cut the Lease alone", "slow", "slow writes", "reset", "mend", "delete the Lease")
TROUBLE = st.lists(
    st.tuples(st.floats(0, 15), st.sampled_from(KINDS), st.integers(0, REPLICAS - 1)), min_size=3, max_size=14
)


async def world(trouble, seed, timing, delay):
    server, dice = Server(), random.Random(seed)
    replicas = [Replica(number, server, dice, timing, delay) for number in range(REPLICAS)]
    await asyncio.sleep(20)
    for pause, kind, number in trouble:
        await asyncio.sleep(pause)
        replica = replicas[number if number is not None else int(server.holder[8])]
        if kind == "kill":
            replica.kill()
        elif kind == "terminate":
            replica.terminate()
        elif kind == "delete the Lease":
            server.lease = None
        elif kind == "reset":
            replica.link.reset()
            replica.lease_link.reset()
        elif kind == "cut the Lease alone":
            replica.lease_link.cut = True
        elif kind == "slow writes":
            replica.link.slow = True
        else:
            for link in (replica.link, replica.lease_link):
                link.cut, link.slow = kind == "cut", kind == "slow"
    for replica in replicas:
        for link in (replica.link, replica.lease_link):
            link.cut = link.slow = False
    await asyncio.sleep(2 * timing.lease + 10)
    mended = asyncio.get_running_loop().time()
    await asyncio.sleep(10)
    for replica in replicas:
        replica.end()
    await asyncio.gather(*(replica.task for replica in replicas))
    return server, mended


def run(trouble, seed=0, timing=None, delay=0.9):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(world(trouble, seed, timing or Timing(15), delay))


def gaps(server):
    """Return the seconds between a leader's last write and the next leader's first write."""
    pairs = zip(server.landed, server.landed[1:], strict=False)
    return [later - before for (before, one), (later, other) in pairs if one != other]


@settings(max_examples=80)
@given(TROUBLE, st.integers(0, 1000))
def test_no_write_arrives_while_another_replica_leads_and_a_leader_returns_after_faults(trouble, seed):
    server, mended = run(trouble, seed)
    assert server.faults == []
    assert [identity for time, identity in server.landed if time > mended], "nobody leads"


def test_without_faults_one_replica_leads_all_the_time():
    server, _ = run([])
    assert len({identity for _, identity in server.landed}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_is_killed_is_followed_within_20_seconds(seed):
    found = gaps(run([(5, "kill", LEADER)], seed, delay=0.05)[0])
    assert len(found) == 1
    assert 12 < found[0] < 20


@pytest.mark.parametrize("seed", range(5))
def test_after_a_leader_stops_the_next_one_leads_at_its_next_read(seed):
    found = gaps(run([(5, "terminate", LEADER)], seed, delay=0.05)[0])
    assert len(found) == 1
    assert found[0] < 4


@pytest.mark.parametrize("seed", range(5))
def test_a_lease_is_not_released_while_an_unanswered_write_may_still_arrive(seed):
    server, _ = run([(5, "slow writes", LEADER), (3, "reset", LEADER), (0, "terminate", LEADER), (9, "mend", 0)], seed)
    assert server.faults == []


class Careless(Timing):
    """Timing of a leader that goes on writing long after its Lease has expired."""

    def __init__(self, lease):
        super().__init__(lease)
        self.renew_deadline, self.write_deadline = 60.0, 64.0


def test_the_simulation_detects_a_leader_that_ignores_its_deadlines():
    cut = [(1, "cut the Lease alone", number) for number in range(REPLICAS - 1)]
    assert any(run([*cut, (15, "mend", 2), (15, "mend", 2)], seed, Careless(15))[0].faults for seed in range(5))


@pytest.mark.parametrize("seed", range(3))
def test_after_a_lease_is_deleted_exactly_one_replica_leads(seed):
    server, mended = run([(3, "delete the Lease", 0), (3, "delete the Lease", 0)], seed)
    assert server.faults == []
    assert len({identity for time, identity in server.landed if time > mended}) == 1
