"""The operator keeps its state of a service in one record, which lives as long as the service."""

import asyncio
import copy
import functools
import types
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats.untrusted import KvpilotError
from kvpilot_localcluster.engines.hostile_texts import REAL
from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import KIND
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.control import pilot, workqueue
from kvpilot_operator.control.pilot import Pilot, ServiceRecord
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.control.workqueue import WorkQueue
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import Rejected
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.state.decision import Decision, NothingKept
from kvpilot_operator.state.snapshot import ServerFacts, ServiceKey, Snapshot
from support.memory_api import MemoryApi, tell
from support.metrics_pages import parse_page
from support.services import KEY, manifest

NAMES = ("a", "b", "c")
PAGE = replace(parse_page(REAL.decode()), dtype="auto")
"""Page of a real engine whose dtype is set to that of the service."""


def setup_module() -> None:
    """Compile one CEL rule first: that raises Python's recursion limit, which hypothesis forbids during a test."""
    faults(manifest())


class Engines:
    """Engines that serve the same metrics page. The service's name decides if a probe hangs, fails or finds nothing."""

    async def scrape(self, *_: object) -> PodMetrics:
        await asyncio.sleep(0)
        return PAGE

    async def probe(self, key: ServiceKey, *_: object, uid: str) -> NothingKept:
        if key.name == "a":
            await asyncio.Event().wait()
        if key.name == "b":
            raise KvpilotError("no")
        return NothingKept()


class World:
    """Pilot with its real parts over an in-memory API server. `decided` records the inputs of decisions."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
        self.cache.run = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        self.cache.filled = partial(asyncio.sleep, 0)  # type: ignore[method-assign]
        self.api.on_change = partial(tell, self.cache)
        self.telemetry, engines = Telemetry(), Engines()
        self.observer = Observer(
            self.api,  # type: ignore[arg-type]
            self.cache,
            engines,  # type: ignore[arg-type]
            ServerFacts(),
            partial(datetime.now, UTC),
            lambda _: None,
        )
        make_actor = partial(Actor, self.api)  # type: ignore[arg-type]
        self.pilot = Pilot(self.cache, self.observer, make_actor, engines, self.telemetry, 0.03)  # type: ignore[arg-type]
        self.decided: list[Snapshot] = []

    def create(self, name: str) -> None:
        if (KIND, name) not in self.api.objects:
            self.api.put({**manifest(), "metadata": {"name": name}})

    def delete(self, name: str) -> None:
        if (KIND, name) in self.api.objects:
            self.api.drop(KIND, name)

    def replace(self, name: str) -> None:
        """Recreate the service. A watch that was interrupted reports only the new service."""
        hears, self.api.on_change = self.api.on_change, lambda _: None
        self.delete(name)
        self.api.on_change = hears
        self.create(name)

    def edit(self, name: str) -> None:
        if (KIND, name) in self.api.objects:
            obj = copy.deepcopy(self.api.objects[KIND, name])
            obj["spec"]["engine"]["image"] += "x"
            self.api.put(obj)

    def run_engines(self, _: str = "") -> None:
        self.api.run_engines()

    def collect(self, name: str = "") -> None:
        """Run the garbage collector: it deletes objects without an owner."""
        uids = {obj["metadata"]["uid"] for obj in self.api.objects.values()}
        for what, obj in list(self.api.objects.items()):
            if any(owner.get("uid", "") not in {*uids, ""} for owner in obj["metadata"].get("ownerReferences") or ()):
                self.api.drop(*what)

    def refuse(self, name: str) -> None:
        """From now on, refuse all writes of this service's Deployments, and no other write."""
        error = Rejected("PATCH", "/x", 403, "quota", "Forbidden")

        def refuses(obj: Any) -> Rejected | None:
            theirs = obj.get("kind") == "Deployment" and obj["metadata"]["name"].startswith(f"{name}-")
            return error if theirs else None

        self.api.refuses = refuses

    def living(self) -> set[tuple[str, str]]:
        return {(name, obj["metadata"]["uid"]) for (kind, name), obj in self.api.objects.items() if kind == KIND}

    def remembered(self) -> set[tuple[str, str]]:
        return {(record.key.name, record.uid) for record in self.pilot.records.values()}

    def record(self, name: str) -> ServiceRecord:
        record = self.pilot.records.get(ServiceKey(KEY.namespace, name))
        assert record is not None
        return record

    async def run(self, story: Callable[[], Awaitable[None]]) -> None:
        """Run the coroutine `story` to its end, with short retry pauses."""
        with patch.object(pilot, "decide", self._decide), patch.object(workqueue, "_BACKOFF", Backoff(0.001, 0.01)):
            task = asyncio.create_task(self.pilot.run(asyncio.Event()))
            try:
                await story()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self.pilot.close()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not enough():
                await asyncio.sleep(0.002)

    def _decide(self, snapshot: Snapshot) -> Decision:
        self.decided.append(snapshot)
        return decide(snapshot)


def reachable(roots: Iterable[object], but: tuple[type, ...], records: object) -> Iterator[object]:
    """Yield the objects reachable from `roots` through kvpilot's objects, containers and callbacks.

    Do not follow objects of the types `but`, nor the services' `records`.
    """
    seen: dict[int, object] = {id(records): records}
    left: deque[object] = deque(roots)
    while left:
        one = left.popleft()
        if id(one) in seen or isinstance(one, (*but, type, types.ModuleType)):
            continue
        seen[id(one)] = one
        yield one
        if isinstance(one, dict):
            left.extend((*one.keys(), *one.values()))
        elif isinstance(one, (list, tuple, set, frozenset, deque)):
            left.extend(one)
        elif isinstance(one, functools.partial):
            left.extend((one.func, one.args, one.keywords))
        elif isinstance(one, types.MethodType):
            left.append(one.__self__)
        elif isinstance(one, types.FunctionType):
            left.extend(cell.cell_contents for cell in one.__closure__ or ())
        elif type(one).__module__.startswith("kvpilot_operator"):
            left.extend(getattr(one, "__dict__", {}).values())
            slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
            left.extend(getattr(one, name) for name in slots if hasattr(one, name))


def shown(telemetry: Telemetry) -> set[str]:
    samples = (sample for family in telemetry.registry.collect() for sample in family.samples)
    return {sample.labels["name"] for sample in samples if "namespace" in sample.labels}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "create", "run_engines", "delete", "replace", "collect", "edit", "refuse"]),
        st.sampled_from(NAMES),
        st.sampled_from([0.0, 0.0, 0.002, 0.02]),
    ),
    max_size=25,
)


@given(STEPS)
@settings(deadline=None, max_examples=30)
def test_the_operator_keeps_a_record_only_of_existing_services(
    steps: list[tuple[str, str, float]],
) -> None:
    async def play(world: World) -> None:
        for step, name, pause in steps:
            getattr(world, step)(name)
            assert world.remembered() == world.living()
            await asyncio.sleep(pause)
        world.collect()
        before = len(world.decided)

        def twice() -> bool:
            """Return True after each service's second decision, which follows every effect of the first one."""
            seen = Counter((s.key.name, s.uid) for s in world.decided[before:])
            return all(seen[one] > 1 for one in world.living())

        await world.until(twice)

    async def story() -> None:
        world = World()
        await world.run(partial(play, world))
        assert world.remembered() == world.living()
        assert shown(world.telemetry) == {name for name, _ in world.living()}
        # Apart from a service's record and the cache, only the work queue may refer to a service: an interrupted
        # reconcile may have queued a live service again.
        roots, but = [world.pilot, world.observer, world.telemetry], (InformerCache, MemoryApi)
        assert [
            one for one in reachable(roots, (*but, WorkQueue), world.pilot.records) if isinstance(one, ServiceKey)
        ] == []
        waiting = {one.name for one in reachable(roots, but, world.pilot.records) if isinstance(one, ServiceKey)}
        assert waiting <= {name for name, _ in world.living()}

    asyncio.run(story())


async def test_a_new_service_with_the_name_of_an_old_one_gets_a_new_record() -> None:
    """The new service has the same spec, and no event reported that the first one was deleted."""
    world = World()

    async def play() -> None:
        world.create("b")
        await world.until(lambda: any(kind == "Deployment" for kind, _ in world.api.objects))
        world.run_engines()
        world.refuse("b")
        world.edit("b")
        first = world.record("b")
        await world.until(lambda: bool(first.observations.windows.samples() and first.actor.rejections))
        await world.until(lambda: first.probe.result is not None and first.probe.result.outcome is not None)
        before = len(world.decided)
        world.replace("b")
        await world.until(lambda: world.decided[-1].uid != first.uid)
        seen = next(one for one in world.decided[before:] if one.uid != first.uid)
        assert (seen.samples, seen.probe_result, seen.rejections) == ({}, None, None)

    await world.run(play)
    assert {uid for _, uid in world.remembered()} == {world.decided[-1].uid}


async def test_a_running_probe_ends_with_its_service() -> None:
    world = World()

    async def play() -> None:
        world.create("a")
        await world.until(lambda: any(kind == "Deployment" for kind, _ in world.api.objects))
        world.run_engines()
        await world.until(lambda: world.record("a").probe.result is not None)
        probe = world.record("a").probe
        world.delete("a")
        async with asyncio.timeout(60):
            await probe.ended()
        assert probe.result is None

    await world.run(play)
