"""Probes that hang do not keep others' permits, and a failed probe is retried with growing pauses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from probing_bench import IDENTITY, NAME, SPEC, Bench, captured, opened, sound

from kvpilot_operator.budget import CANARY_PROBE, CHECK
from kvpilot_operator.control import prober as module
from kvpilot_operator.control.prober import BACKOFF
from kvpilot_operator.state.decision import Find, Measure, ProbeFailed
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec
from kvpilot_probes.stats import Measurement
from support.probe_engine import Body, Writer, counting, engine
from support.services import KEY


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as one:
        yield one


async def hangs(_path: str, _body: Body, _writer: Writer) -> None:
    await asyncio.sleep(60)


async def test_hanging_periodic_probes_take_no_permits_of_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK", replace(CHECK, permits=1))
    async with opened() as bench, engine(hangs) as stuck, sound() as (url, _):
        bench.cluster.keep(NAME, codec.encode(await captured(bench)))
        other = KEY._replace(name="other")
        bench.of(other).ensure(SPEC, Measure("check/x", "p", stuck, "m", "fp8", NAME, serving=True))
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
        assert isinstance(found.outcome, Measurement)


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("namespace", ["good", "hostile"])
async def test_an_engine_is_probed_even_if_any_number_of_others_hang(
    monkeypatch: pytest.MonkeyPatch, serving: bool, namespace: str
) -> None:
    limits = replace(CANARY_PROBE, permits=4, share=2)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(module, "CANARY_PROBE", limits)
    monkeypatch.setattr(module, "CHECK", limits)
    async with opened() as bench, engine(hangs) as stuck, sound() as (url, _):
        bench.cluster.keep(NAME, codec.encode(await captured(bench)))
        for i in range(20):
            hostile = ServiceKey("hostile", f"hangs-{i}")
            bench.of(hostile).ensure(SPEC, Measure(f"hangs/{i}", "p", stuck, "m", "fp8", NAME, serving=serving))
        await asyncio.sleep(0)
        request = Measure("measure/x", "p", url, "m", "fp8", NAME, serving=serving)
        found = await bench.ask(request, key=ServiceKey(namespace, "good"))
        assert isinstance(found.outcome, Measurement)
        running = [bench.of(ServiceKey("hostile", f"hangs-{i}")).result for i in range(20)]
        assert all(one is not None and one.outcome is None for one in running)


async def test_a_slow_engine_is_eventually_probed_even_if_others_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe loses its permit. This is not a failure: the probe retries with a longer timeout."""
    monkeypatch.setattr(module, "CANARY_PROBE", replace(CANARY_PROBE, permits=2))
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    asked = 0

    async def slow(path: str, body: Body, writer: Writer) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.5 if asked <= 2 else 0)
        await counting(path, body, writer)

    async with opened() as bench, engine(hangs) as stuck, engine(slow) as url:
        bench.cluster.keep(NAME, codec.encode(await captured(bench)))
        for i in range(4):
            key = ServiceKey("hostile", f"hangs-{i}")
            bench.of(key).ensure(SPEC, Measure(f"hangs/{i}", "p", stuck, "m", "fp8", NAME))
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME), key=KEY._replace(namespace="hostile"))
    assert isinstance(found.outcome, Measurement)


async def test_failed_searches_for_a_baseline_are_retried_with_growing_pauses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    bench.cluster.broken = True

    class Spy:
        def pause(self, failures: int) -> float:
            waits.append(BACKOFF.pause(failures))
            return waits[-1]

    monkeypatch.setattr("kvpilot_operator.control.prober.BACKOFF", Spy())
    for attempt in range(9):
        found = await bench.ask(Find(f"find/{attempt}", IDENTITY, NAME))
        assert isinstance(found.outcome, ProbeFailed)
    assert waits == [15, 30, 60, 120, 240, 480, 900, 900, 900]
