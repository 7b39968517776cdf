"""The API server restarts, disappears, slows down, drops watches or answers with errors: the services stay up.

The operator acts on users' changes soon after the fault, and no request to a service fails.
"""

import asyncio
import itertools
import time

import pytest

from kvpilot_operator.cluster.objects import Ref
from support.faulty_api import Storm, is_write
from support.faulty_plane import Component, compact
from support.faulty_record import record
from support.faulty_world import API_VERSION, KIND, NAMESPACE, SCRAPE_SECONDS, FaultyWorld, insist, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORM_SECONDS = 6
RECOVERS = 60
"""Limit in seconds from a fault's end until the operator has acted on all changes.

The limit is more than ten times the usual time on idle cores, which is mostly below 3 s. It is below the 75 s after
which the operator reopens any silent watch, so a test fails if a fault leaves a watch dead.
"""
LATE = 900
"""Limit in seconds for changes during a fault, or if the operator notices the fault only after a minute."""
NUMBERS = itertools.count(1)
WHAT = "changes take effect: a replica count, a new service, a deleted service"


class Changes:
    """Changes that users make during a fault: to an existing, a new and a deleted service."""

    def __init__(self, world: FaultyWorld) -> None:
        number = next(NUMBERS)
        self.world, self.new, self.old, self.replicas = world, f"new-{number}", f"old-{number}", -1

    @classmethod
    async def prepared(cls, world: FaultyWorld) -> "Changes":
        """Create the service to delete while there is no fault yet."""
        changes = cls(world)
        await world.create(changes.old, 0)
        await world.acted(changes.old, 0)
        return changes

    async def make(self) -> None:
        self.replicas = 1 - (await self.world.wanted("dial") or 0)
        await insist(lambda: self.world.scale("dial", self.replicas))
        await insist(lambda: self.world.create(self.new, 0))
        await self._delete(self.old)

    async def acted_on(self) -> bool:
        return not await self.missing()

    async def missing(self) -> list[str]:
        """Return the changes that the operator has not acted on yet."""
        done = {
            "the replica count": await self.world.wanted("dial") == self.replicas,
            "the new service": await self.world.wanted(self.new) == 0,
            "the deleted service": not await self.world.operator_knows(self.old),
        }
        return [change for change, is_so in done.items() if not is_so]

    async def caught_up(self, seconds: float = RECOVERS) -> float:
        """Wait until the operator has acted on all changes, and return the seconds."""
        try:
            taken = await until(self.acted_on, WHAT, seconds)
        except TimeoutError as error:
            error.add_note(f"not acted on: {', '.join(await self.missing())}")
            raise
        # Kubernetes removes the owned objects. After an outage that takes a while.
        await until(self._gone, "the deleted service's Deployment is gone")
        await asyncio.sleep(2 * SCRAPE_SECONDS)
        assert await self._gone(), "a deleted service has come back"
        await self._delete(self.new)
        return taken

    async def _gone(self) -> bool:
        return await self.world.wanted(self.old) is None

    async def _delete(self, name: str) -> None:
        await insist(lambda: self.world.cluster.delete(Ref(API_VERSION, KIND, NAMESPACE, name)))


async def answers(world: FaultyWorld) -> None:
    async def ready() -> bool:
        return await asyncio.to_thread(world.rest.ready)

    await until(ready, "the API server answers")


async def restart(world: FaultyWorld, away_seconds: float, fault: str) -> None:
    server = Component(world.local.plane.folder, "kube-apiserver")
    changes = await Changes.prepared(world)
    async with world.load("steady") as load:
        server.kill()
        await asyncio.sleep(away_seconds)
        server.start()
        await answers(world)
        await changes.make()
        taken = await changes.caught_up()
    assert load.stats.failed == 0, load.stats.failures
    assert load.stats.ok > 0
    assert await world.condition("steady", "Serving") == ("True", "Serving")
    record(fault, taken, what=WHAT, answered=load.stats.ok)


async def test_after_a_restart_of_the_api_server_changes_are_acted_on(world):
    await restart(world, 0.5, "API server killed and started again")


@pytest.mark.long
async def test_after_30_seconds_without_an_api_server_changes_are_acted_on(world):
    # After 40 s without a heartbeat Kubernetes marks every node as lost, and removes all pods from all Services.
    Component(world.local.plane.folder, "kube-controller-manager").start("--node-monitor-grace-period=90s")
    await asyncio.sleep(10)  # the operator exits if it cannot read the API server at its start
    await restart(world, 30, "API server down for 30 s")


async def test_users_changes_during_a_disconnection_are_acted_on_afterwards(world):
    changes = await Changes.prepared(world)
    async with world.load("steady") as load:
        await world.api.away()
        await changes.make()
        await asyncio.sleep(10)
        assert not await changes.acted_on()
        await world.api.back()
        taken = await changes.caught_up()
    assert load.stats.failed == 0, load.stats.failures
    record("operator cut off from the API server for 10 s", taken, what=WHAT, answered=load.stats.ok)


async def test_a_slow_etcd_delays_changes_and_loses_none(world):
    store = Component(world.local.plane.folder, "etcd")
    changes = await Changes.prepared(world)

    async def pulses() -> None:
        for _ in range(10):
            store.pause()
            await asyncio.sleep(0.9)
            store.resume()
            await asyncio.sleep(0.3)

    async with world.load("steady") as load:
        slow = asyncio.create_task(pulses())
        try:
            await changes.make()
        finally:
            await slow
        taken = await changes.caught_up()
    assert load.stats.failed == 0, load.stats.failures
    record("etcd suspended for 0.9 s of every 1.2 s, for 12 s", taken, what=WHAT, answered=load.stats.ok)


async def test_watches_see_changes_from_before_a_compaction_of_etcd(world):
    """Make the server forget the events of the fault, so that only a new list shows the changes."""
    folder = world.local.plane.folder
    core, definitions = (Component(folder, name) for name in ("kube-apiserver", "apiextensions-apiserver"))
    store = Component(folder, "etcd")
    changes = await Changes.prepared(world)

    async def readable() -> bool:
        return await world.cluster.find(Ref(API_VERSION, KIND, NAMESPACE, "dial")) is not None

    async with world.load("steady") as load:
        await world.api.away()
        await changes.make()
        await asyncio.to_thread(compact, store)
        for server in (definitions, core):
            server.kill()  # a restarted server has an empty watch cache
        core.start()
        await answers(world)
        definitions.start()  # the server for CRDs reads the core server at its start, and exits if it cannot
        await until(readable, "services can be read again")
        began = time.monotonic()
        await world.api.back()
        taken = await changes.caught_up()
    listed = world.api.count(began, lambda one: one.path.endswith("/quantizedllmservices") and not one.watch)
    assert listed, "a watch went on from a revision that etcd has forgotten"
    assert load.stats.failed == 0, load.stats.failures
    record("etcd compacted while every watch was disconnected", taken, what=WHAT, answered=load.stats.ok)


async def test_changes_are_seen_although_every_watch_is_reset_each_second(world):
    changes = await Changes.prepared(world)
    dropped = 0
    async with world.load("steady") as load:
        for second in range(8):
            dropped += world.api.drop_watches()
            if second == 4:
                await changes.make()
            await asyncio.sleep(1)
        taken = await changes.caught_up()
    assert dropped >= 3
    assert load.stats.failed == 0, load.stats.failures
    record("every watch reset each second, for 8 s", taken, what=WHAT, answered=load.stats.ok)


@pytest.mark.parametrize(("code", "event"), [(410, True), (500, True), (410, False), (429, False)])
async def test_changes_are_seen_after_every_watch_was_ended_by_an_error(world, code, event):
    changes = await Changes.prepared(world)
    world.api.storm = Storm(code, only="watches", event=event)
    world.api.drop_watches()
    await asyncio.sleep(3)
    await changes.make()
    await asyncio.sleep(2)
    world.api.storm = None
    taken = await changes.caught_up()
    record(f"every watch {'ended by an ERROR event' if event else 'answered'} {code}, for 5 s", taken, what=WHAT)


@pytest.mark.long
async def test_over_a_minute_of_errors_ends_neither_the_operator_nor_its_watches(world):
    changes = await Changes.prepared(world)
    async with world.load("steady") as load:
        world.api.storm = Storm(503)
        await asyncio.sleep(30)
        await changes.make()
        await asyncio.sleep(40)
        world.check()
        world.api.storm = None
        taken = await changes.caught_up(LATE)
    assert load.stats.failed == 0, load.stats.failures
    record("every request answered 503, for 70 s", taken, what=WHAT, answered=load.stats.ok)


@pytest.mark.long
async def test_changes_are_seen_although_open_watches_fall_silent(world):
    changes = await Changes.prepared(world)
    assert world.api.silence_watches() >= 4
    began = time.monotonic()
    await changes.make()
    await changes.caught_up(LATE)
    record("watches stay open but deliver nothing", time.monotonic() - began, what=WHAT)


@pytest.mark.parametrize(
    ("storm", "most_writes_a_second"),
    [
        (Storm(409, only="writes"), 4.0),
        (Storm(429, retry_after=3), 2.0),
        (Storm(429), 4.0),
        (Storm(410), 4.0),
        (Storm(500), 4.0),
    ],
    ids=["409", "429 with Retry-After", "429", "410", "500"],
)
async def test_a_storm_of_errors_is_not_answered_by_a_storm_of_requests(world, storm, most_writes_a_second):
    changes = await Changes.prepared(world)
    async with world.load("steady") as load:
        world.api.storm = storm
        began = time.monotonic()
        await changes.make()
        await asyncio.sleep(STORM_SECONDS)
        assert not await changes.acted_on()
        writes, lasted = world.api.count(began, is_write), time.monotonic() - began
        world.api.storm = None
        taken = await changes.caught_up()
    assert writes <= lasted * most_writes_a_second, f"{writes} writes in {lasted:.1f} s"
    assert load.stats.failed == 0, load.stats.failures
    kind = "write" if storm.only else "request"
    hint = f" with Retry-After {storm.retry_after}" if storm.retry_after else ""
    record(
        f"every {kind} answered {storm.status}{hint}, for {STORM_SECONDS} s", taken, what=WHAT, answered=load.stats.ok
    )


async def test_changes_are_acted_on_in_a_storm_that_fails_every_fourth_request(world):
    changes = await Changes.prepared(world)
    world.api.storm = Storm(500, share=0.25)
    await changes.make()
    # A request may fail several times in a row. RECOVERS covers the back-off after six failures, LATE after twenty.
    taken = await changes.caught_up(LATE)
    assert world.api.storm is not None
    record("every fourth request answered 500", taken, what=f"{WHAT}, still under the fault")
