"""The prober runs one probe per service, finds stored baselines again, and lets no hanging probe block others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvpilot_operator.api.names import baseline_name
from kvpilot_operator.budget import CANARY_PROBE, CHECK
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.control import prober as module
from kvpilot_operator.control.prober import BACKOFF, Probe, Prober, schedules_by_priority
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Capture, Captured, Find, Measure, NothingKept, ProbeFailed, ProbeResult
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.tracing import NO_TRACER
from kvpilot_probes import codec
from kvpilot_probes.codec import Baseline
from kvpilot_probes.stats import Measurement
from support.probe_engine import Body, Handler, Writer, counting, engine, event, noisy, respond, stream
from support.services import KEY, manifest, spec_of

IDENTITY = "0123456789"
NAME = baseline_name(KEY.name, IDENTITY)
SPEC = spec_of(manifest(accuracy={"probeSets": ["builtin/general"]}))


class FakeCluster:
    """API that serves ConfigMaps by name."""

    def __init__(self) -> None:
        self.maps: dict[str, dict[str, Any]] = {}
        self.broken = False

    async def find(self, ref: Ref) -> dict[str, Any] | None:
        if self.broken:
            raise ClusterError("GET", "/configmaps", 500, "down")
        return self.maps.get(ref.name)

    def keep(self, name: str, content: bytes) -> None:
        self.maps[name] = baseline_config_map(KEY, "u-1", IDENTITY, content)


class Bench:
    """A prober, and the requested probe of each service."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.scraper = Scraper()
        self.prober = Prober(self.cluster, self.scraper, NO_TRACER)  # type: ignore[arg-type]  # the one method that it uses
        self.done = asyncio.Event()
        self.probes: dict[ServiceKey, Probe] = {}

    def of(self, key: ServiceKey) -> Probe:
        return self.probes.setdefault(key, Probe(key, partial(self.prober.probe, uid="u-1"), lambda _: self.done.set()))

    async def ask(self, request: Find | Capture | Measure, spec: Any = SPEC, key: ServiceKey = KEY) -> ProbeResult:
        self.done.clear()
        self.of(key).ensure(spec, request)
        await asyncio.wait_for(self.done.wait(), 300)
        found = self.of(key).result
        assert found is not None
        assert found.request == request
        return found


@asynccontextmanager
async def opened() -> AsyncIterator[Bench]:
    one = Bench()
    try:
        yield one
    finally:
        for probe in one.probes.values():
            probe.close()
            await probe.ended()
        await one.scraper.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as one:
        yield one


@asynccontextmanager
async def sound() -> AsyncIterator[tuple[str, list[str]]]:
    """Serve a sound engine, and record the requested paths."""
    asked: list[str] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append(path)
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    async with engine(handler) as url:
        yield url, asked


async def respond_empty(writer: Writer) -> None:
    respond(writer, b"")


def capture(url: str) -> Capture:
    return Capture("capture/x/0", "p", url, "m", IDENTITY, NAME)


async def captured(bench: Bench) -> Baseline:
    async with sound() as (url, _):
        found = await bench.ask(capture(url))
    assert isinstance(found.outcome, Captured)
    assert not found.outcome.adopted
    return found.outcome.baseline


async def test_a_captured_baseline_carries_its_control(bench: Bench) -> None:
    baseline = await captured(bench)
    assert baseline.control is not None
    assert (baseline.control.prompts, baseline.control.top1_agreement_permille) == (8, 1000)
    assert codec.decode(codec.encode(baseline)).control == baseline.control


async def test_a_kept_baseline_is_adopted_without_asking_any_engine(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    async with sound() as (url, asked):
        again = await bench.ask(replace(capture(url), identity="capture/x/1"))
        alone = await bench.ask(Find("find/x", IDENTITY, NAME))
    assert asked == []
    for found in (again, alone):
        assert isinstance(found.outcome, Captured)
        assert found.outcome.adopted
        assert found.outcome.baseline.control is not None


async def test_a_baseline_of_an_engine_that_differs_from_itself_is_not_kept(bench: Bench) -> None:
    async with engine(noisy) as url:
        found = await bench.ask(capture(url))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineUnfit"
    assert found.outcome.message.startswith("pod p: the 16-bit engine differs from its own answers by a mean KL of ")


async def test_a_kept_baseline_whose_control_is_beyond_the_limits_is_captured_anew(bench: Bench) -> None:
    """Ignore a noisy baseline that an older kvpilot kept."""
    good = await captured(bench)
    assert good.control is not None
    loud = replace(good.control, mean_kl_micronats=4_800_000, top1_agreement_permille=0)
    bench.cluster.keep(NAME, codec.encode(replace(good, control=loud)))
    async with sound() as (url, asked):
        alone = await bench.ask(Find("find/x", IDENTITY, NAME))
        assert asked == []
        again = await bench.ask(replace(capture(url), identity="capture/x/1"))
    assert isinstance(alone.outcome, NothingKept)
    assert isinstance(again.outcome, Captured)
    assert not again.outcome.adopted


@pytest.mark.parametrize(
    "why", ["missing", "damaged", "another's", "without control", "not base64", "no data", "not ours"]
)
async def test_what_cannot_be_adopted_is_captured_anew(bench: Bench, why: str) -> None:
    good = await captured(bench)
    ours = baseline_config_map(KEY, "u-1", IDENTITY, codec.encode(good))
    if why == "damaged":
        bench.cluster.keep(NAME, codec.encode(good)[:-7])
    elif why == "another's":
        bench.cluster.keep(NAME, codec.encode(replace(good, identity=IDENTITY[:8] + "ff")))
    elif why == "without control":
        bench.cluster.keep(NAME, codec.encode(replace(good, control=None)))
    elif why == "not base64":
        bench.cluster.maps[NAME] = {**ours, "binaryData": {"baseline": "%%%"}}
    elif why == "no data":
        bench.cluster.maps[NAME] = {**ours, "binaryData": None}
    elif why == "not ours":
        bench.cluster.maps[NAME] = {**ours, "metadata": {"name": NAME, "labels": ours["metadata"]["labels"]}}
    assert isinstance((await bench.ask(Find("find/x", IDENTITY, NAME))).outcome, NothingKept)
    async with sound() as (url, asked):
        found = await bench.ask(replace(capture(url), identity="capture/x/1"))
    assert "/v1/completions" in asked
    assert isinstance(found.outcome, Captured)
    assert not found.outcome.adopted


async def test_a_serving_engine_is_measured_one_request_at_a_time(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    flying = most = looks = 0

    async def handler(path: str, body: Body, writer: Writer) -> None:
        nonlocal flying, most, looks
        if path == "/metrics":
            looks += 1
            respond(writer, b"")
            return
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.005)
        flying -= 1
        await counting(path, body, writer)

    async with engine(handler) as url:
        beside_users = await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True))
        # Five prompts without damage are a proof, and one answer is shown.
        assert (most, looks) == (1, 6)
        alone = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
        assert (most, looks) == (2, 6)
    for found in (beside_users, alone):
        assert isinstance(found.outcome, Measurement)
        assert found.outcome.top1_agreement_permille == 1000


async def test_a_check_gets_figures_from_an_engine_whose_queue_never_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_WAY_SECONDS", 0.0)
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/metrics":
            respond(writer, b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\n")
        else:
            await counting(path, body, writer)

    async with engine(handler) as url:
        found = await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True))
    assert isinstance(found.outcome, Measurement)
    assert found.outcome.prompts == 5


async def test_nothing_is_measured_against_answers_that_somebody_else_has_written(bench: Bench) -> None:
    content = codec.encode(await captured(bench))
    bench.cluster.maps[NAME] = baseline_config_map(KEY, "u-2", IDENTITY, content)
    async with sound() as (url, asked):
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineLost"
    assert f"ConfigMap {NAME} is not the service's own: delete it" in found.outcome.message
    assert asked == []


async def test_a_lost_baseline_is_said_and_not_blamed_on_the_engine(bench: Bench) -> None:
    found = await bench.ask(Measure("check/x", "p", "http://127.0.0.1:9", "m", "fp8", NAME, serving=True))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineLost"
    assert NAME in found.outcome.message


async def test_what_is_asked_is_told_while_it_is_asked(bench: Bench) -> None:
    request = Find("find/x", IDENTITY, NAME)
    bench.of(KEY).ensure(SPEC, request)
    assert bench.of(KEY).result == ProbeResult(request, None)
    bench.of(KEY).ensure(SPEC, None)
    assert bench.of(KEY).result is None


async def hangs(_path: str, _body: Body, _writer: Writer) -> None:
    await asyncio.sleep(60)


async def test_checks_that_hang_hold_no_place_of_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK", replace(CHECK, permits=1))
    async with opened() as bench, engine(hangs) as stuck, sound() as (url, _):
        bench.cluster.keep(NAME, codec.encode(await captured(bench)))
        other = KEY._replace(name="other")
        bench.of(other).ensure(SPEC, Measure("check/x", "p", stuck, "m", "fp8", NAME, serving=True))
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
        assert isinstance(found.outcome, Measurement)


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("namespace", ["good", "hostile"])
async def test_however_many_engines_hang_a_good_one_is_probed(
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


async def test_an_engine_that_is_slow_to_begin_is_probed_in_the_end_although_others_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe loses its permit. That is not a failure: it retries with a longer timeout."""
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


async def test_a_probe_that_nobody_counts_is_tried_again_later_and_later(
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--scheduling-policy=priority"], True),
        (["--scheduling-policy", "priority"], True),
        (["--scheduling_policy", "priority"], True),
        (["--scheduling-policy=fcfs"], False),
        (["--scheduling-policy=priority", "--scheduling-policy=fcfs"], False),
        (["--scheduling-policy"], False),
        (["--other", "priority"], False),
    ],
)
def test_low_priority_is_asked_for_only_where_the_engine_schedules_by_it(arguments: list[str], expected: bool) -> None:
    engine = spec_of(manifest(engine={"extraArgs": arguments})).engine
    assert schedules_by_priority(engine) is expected


@pytest.mark.parametrize(
    ("spec", "sent"),
    [
        ({"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 1}}}, {"kvpilot_from_host": True}),
        ({"engine": {"extraArgs": ["--kv-offloading-size=1"]}}, {"kvpilot_from_host": True}),
        ({}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("serving", [True, False])
async def test_what_an_engine_that_offloads_is_judged_by_comes_back_from_host_memory(
    bench: Bench, spec: dict[str, Any], sent: object, serving: bool
) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    seen: list[object] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.append(body.get("kv_transfer_params"))
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    async with engine(handler) as url:
        await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=serving), spec_of(manifest(**spec)))
    assert seen
    assert all(one == sent for one in seen)


async def test_probes_of_an_engine_with_priorities_come_after_everybody_elses(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    seen: set[object] = set()

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.add(body.get("priority"))
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    spec = spec_of(manifest(engine={"extraArgs": ["--scheduling-policy=priority"]}))
    async with engine(handler) as url:
        await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True), spec)
    assert seen == {module.LOW_PRIORITY}


def context_of(seen: list[int], fails: Callable[[Writer], None] | None = None) -> Handler:
    """Return a sound engine that records lengths of prompts, and `fails` at one that fills its context of 2,048."""

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.append(len(body["prompt"]))
            if fails is not None and seen[-1] > 2000:
                fails(writer)
                return
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    return handler


@pytest.mark.parametrize("serving", [False, True])
async def test_a_canary_that_passes_fills_its_context_once_before_any_user_does(bench: Bench, serving: bool) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    seen: list[int] = []
    async with engine(context_of(seen)) as url:
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME, serving=serving))
    assert isinstance(found.outcome, Measurement)
    # A serving replica is not asked: its users would wait.
    assert [length for length in seen if length > 2000] == ([] if serving else [2040])


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda writer: writer.transport.abort(), "is the engine running"),
        (lambda writer: respond(writer, b"CUDA out of memory", "500 Internal Server Error"), "CUDA out of memory"),
        (lambda writer: stream(writer, *[event("token_id:1", {"token_id:1": float("nan")})] * 8), "not numbers"),
    ],
    ids=["it dies", "it answers with an error", "its logprobs are NaN"],
)
async def test_a_canary_that_fails_at_a_full_context_alone_is_told_by_its_length(
    bench: Bench, fails: Callable[[Writer], None], words: str
) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    async with engine(context_of([], fails)) as url:
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "EngineCrashed"
    for word in ("a prompt of 2040 tokens in its context of 2048", "spec.model.maxModelLen", words):
        assert word in found.outcome.message
