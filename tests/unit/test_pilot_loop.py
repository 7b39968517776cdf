"""The loop over all services gives each one its turn, and reloads a cache that is out of date."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvpilot_operator.api.engine_defaults import EngineDefaults
from kvpilot_operator.control import pilot as module
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import Conflict, NotFound
from kvpilot_operator.observe.gather import Observations
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.state.decision import NothingKept
from kvpilot_operator.state.objects import DeploymentView, Rejection
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.state.status import Status
from support.failing_questions import SECRET, failing
from support.services import manifest, pod, running, snapshot, spec_of


class World:
    """Pilot over a cache that the test fills. Scrapes can hang or fail, and scrapes and writes are counted."""

    def __init__(self, services: int, scrape_seconds: float = 0.1) -> None:
        self.scraped: Counter[str] = Counter()
        self.times: list[float] = []
        self.hanging: set[str] = set()
        self.broken: set[str] = set()
        self.refreshed: list[ServiceKey] = []
        self.errors: list[Exception] = []
        self.performed = self.probes_asked = 0
        self.kept = Status()
        self.refused: tuple[Rejection, ...] = ()
        self.decided: list[Any] = []
        self.cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
        self.cache.pods = range(3 * services)  # type: ignore[assignment]  # the pilot only counts them
        self.cache.run = self._nothing  # type: ignore[method-assign]
        self.cache.filled = self._at_once  # type: ignore[method-assign]
        self.on_result: Any = None
        self.telemetry = Telemetry()
        self.pilot = Pilot(self.cache, self, lambda: self, self, self.telemetry, scrape_seconds)  # type: ignore[arg-type]
        for i in range(services):
            obj = manifest()
            obj["metadata"] |= {"name": f"s{i}", "uid": f"u{i}"}
            self.cache.services.put(obj)

    async def run(self, enough: Callable[[], bool]) -> None:
        self.began = asyncio.get_running_loop().time()
        task = asyncio.create_task(self.pilot.run(asyncio.Event()))
        async with asyncio.timeout(30):
            while not enough():
                await asyncio.sleep(0.01)
                assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _nothing(self) -> None:
        await asyncio.Event().wait()

    async def _at_once(self) -> None:
        pass

    async def scrape(self, known: Observations) -> None:
        key = known.key
        self.scraped[key.name] += 1
        self.times.append(asyncio.get_running_loop().time() - self.began)
        if key.name in self.broken:
            raise ZeroDivisionError
        if key.name in self.hanging:
            await asyncio.sleep(60)

    async def snapshot(self, known: Observations, result: Any) -> Any:
        return snapshot(manifest(), key=known.key, uid=known.uid, status=self.kept)

    async def refresh(self, key: ServiceKey) -> None:
        self.refreshed.append(key)

    async def perform(self, s: Any, decision: Any) -> None:
        self.kept = decision.status
        self.performed += 1
        self.decided.append(decision)
        if self.errors:
            raise self.errors.pop()

    @property
    def rejections(self) -> tuple[Rejection, ...] | None:
        return self.refused if self.performed else None

    async def probe(self, *_: Any) -> NothingKept:
        self.probes_asked += 1
        return NothingKept()


async def test_hanging_or_implausible_engines_do_not_stop_scrapes_of_others() -> None:
    world = World(10)
    world.hanging, world.broken = {"s0", "s1"}, {"s2"}
    await world.run(lambda: all(world.scraped[f"s{i}"] >= 4 for i in range(2, 10)))
    assert world.scraped["s0"] == world.scraped["s1"] == 1


@pytest.mark.parametrize(("scrape_seconds", "pages_per_second"), [(1.0, 1000.0), (0.05, 60.0)])
async def test_scrapes_are_spread_over_a_cycle_that_is_as_long_as_the_fleet_needs(
    scrape_seconds: float, pages_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGES_PER_SECOND", pages_per_second)
    world = World(20, scrape_seconds)  # 60 pods: either limit allows one scrape a second
    await world.run(lambda: len(world.times) >= 20)
    assert all(time >= i / 20 - 0.01 for i, time in enumerate(world.times))


async def test_every_service_is_reconciled_after_its_scrape() -> None:
    world = World(5)
    await world.run(lambda: world.performed >= 5 + 15)  # once as a new service, and once in each of three cycles
    assert min(world.scraped.values()) >= 2


@pytest.mark.parametrize("error", [Conflict("PATCH", "/x", 409, "changed"), NotFound("PATCH", "/x", 404, "gone")])
async def test_a_conflict_makes_the_cache_reload_the_service(error: Exception) -> None:
    world = World(1, scrape_seconds=10)
    world.errors = [error]
    await world.run(lambda: bool(world.refreshed) and world.performed >= 2)
    assert [key.name for key in world.refreshed] == ["s0"]


async def test_a_failed_part_of_a_decision_is_counted_and_logged_once_and_ends_no_reconcile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(1, scrape_seconds=0.05)
    with failing([Question.ACCURACY]):
        await world.run(lambda: world.performed >= 3)
    assert world.probes_asked == 0  # a running probe continues
    labels = {"namespace": "models", "name": "s0", "question": "Accuracy"}
    count = world.telemetry.registry.get_sample_value("kvpilot_unanswered_questions_total", labels)
    assert count is not None
    assert count >= 3
    lines = [record for record in caplog.records if "the rule Accuracy raised" in record.message]
    assert {(line.service, line.reason) for line in lines} == {("models/s0", "ReconcileIncomplete")}
    assert all(SECRET not in line.getMessage() and not line.exc_info for line in lines)
    assert len(lines) == 1
    assert "decide.py:" in lines[0].getMessage()
    assert world.telemetry.registry.get_sample_value("kvpilot_reconciles_total", {"result": "error"}) == 0
    world.cache.services.forget("models", "s0")
    assert world.telemetry.registry.get_sample_value("kvpilot_unanswered_questions_total", labels) is None


async def test_a_new_refusal_causes_exactly_one_immediate_reconcile() -> None:
    world = World(1, scrape_seconds=60)
    world.refused = (Rejection("Deployment", "s0-1", "Forbidden", "exceeded quota: team"),)
    await world.run(lambda: world.performed >= 2 and bool(world.scraped))
    told = [decision.status.condition("Stalled").status for decision in world.decided]
    assert told[:2] == ["False", "True"]
    assert world.performed <= 3  # the third reconcile follows the only scrape


class Rolling(World):
    """Services whose engines run another image than the installation's default."""

    def __init__(self, services: int) -> None:
        super().__init__(services)
        self.cache.engines = EngineDefaults(image="new:1")
        self.statuses: dict[str, Status] = {}

    async def snapshot(self, known: Observations, result: Any) -> Any:
        await asyncio.sleep(0)
        name, obj = known.key.name, manifest()
        obj["metadata"]["name"] = name
        s = running(obj, "auto", key=known.key, uid=known.uid)
        status = self.statuses.get(name, s.status)
        assert status.stable is not None
        serving = status.stable.revision
        obj["spec"]["engine"]["image"] = "new:1"
        return replace(
            s, spec=spec_of(obj), status=status, pods=(pod(serving),), traffic=serving,
            deployments={serving: DeploymentView(serving, "auto", 1)},
        )  # fmt: skip

    async def perform(self, s: Any, decision: Any) -> None:
        await asyncio.sleep(0)
        # A status that has changed since it was read is not written.
        if self.statuses.get(s.key.name) in (None, s.status):
            self.statuses[s.key.name] = decision.status
        self.performed += 1

    def on_trial(self) -> list[str]:
        return sorted(name for name, status in self.statuses.items() if status.canary is not None)

    def waiting(self, name: str) -> str:
        """Return the message of the condition Reconciling."""
        found = self.statuses[name].condition("Reconciling") if name in self.statuses else None
        return found.message if found is not None else ""

    def promote(self, name: str) -> None:
        """Promote the canary, so that the new image serves."""
        status = self.statuses[name]
        assert status.stable is not None
        assert status.canary is not None
        stable = msgspec.structs.replace(status.stable, revision=status.canary.revision)
        self.statuses[name] = msgspec.structs.replace(status, stable=stable, canary=None)


async def test_a_new_default_image_reaches_the_services_of_a_namespace_one_by_one() -> None:
    world, rolled = Rolling(4), []

    def all_rolled() -> bool:
        on_trial = world.on_trial()
        assert len(on_trial) <= 1
        for one in on_trial:
            others = {"s0", "s1", "s2", "s3"}.difference(rolled, on_trial)
            if all(f"waits until {one} has replaced its pods" in world.waiting(name) for name in others):
                world.promote(one)
                rolled.append(one)
        return len(rolled) == 4

    await world.run(all_rolled)
    assert sorted(rolled) == ["s0", "s1", "s2", "s3"]


async def test_without_engine_defaults_services_change_their_images_at_once() -> None:
    world = Rolling(4)
    world.cache.engines = EngineDefaults()
    await world.run(lambda: len(world.on_trial()) == 4)
