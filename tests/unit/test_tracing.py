"""Spans of reconciles, scrapes and probes: their content, and the data that they never contain."""

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import KIND, baseline_name
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.prober import Probe, Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import Conflict
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Capture, Captured, Measure, ProbeFailed
from kvpilot_operator.state.snapshot import ServerFacts
from kvpilot_operator.tracing import NO_TRACER, SpanSender, Tracer, span
from kvpilot_probes import codec
from support.collector import parsed
from support.crd import apply_defaults
from support.memory_api import MemoryApi, tell
from support.observed import World as Observed
from support.observed import pod
from support.probe_engine import Body, Handler, Writer, counting, engine, respond
from support.services import KEY, manifest, spec_of

ROOT = Path(__file__).parents[2]
SPEC = spec_of(manifest(accuracy={"probeSets": ["builtin/general"]}))
NAME = baseline_name(KEY.name, "0123456789")
SECRET = "the patient's name is"


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


async def ended(sender: SpanSender, exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    """Return every finished span by its name, and close the sender."""
    await sender.close()
    found: dict[str, list[ReadableSpan]] = {}
    for one in exporter.get_finished_spans():
        found.setdefault(one.name, []).append(one)
    return found


class World:
    """Pilot with its real parts over an in-memory API server. It scrapes nothing."""

    def __init__(self, tracer: Tracer) -> None:
        self.api = MemoryApi()
        self.cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
        self.cache.run = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        self.cache.filled = partial(asyncio.sleep, 0)  # type: ignore[method-assign]
        self.api.on_change = partial(tell, self.cache)
        clock = partial(datetime.now, UTC)
        self.scraper = Scraper()
        observer = Observer(self.api, self.cache, self.scraper, ServerFacts(), clock, lambda _: None, tracer=tracer)  # type: ignore[arg-type]
        prober = Prober(self.api, self.scraper, tracer)  # type: ignore[arg-type]
        make_actor: Any = partial(Actor, self.api)
        self.pilot = Pilot(self.cache, observer, make_actor, prober, Telemetry(tracer), 3600.0)

    async def reconciled(self) -> None:
        """Reconcile a new service until no write is left."""
        self.api.put({**manifest(), "metadata": {"name": KEY.name}})
        work = asyncio.create_task(self.pilot.run(asyncio.Event()))
        try:
            async with asyncio.timeout(60):
                while "status" not in self.api.objects[KIND, KEY.name] or self.pilot.queue.depth:
                    await asyncio.sleep(0.01)
                    assert not work.done(), work.exception()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self.pilot.close()
            await self.scraper.close()


async def test_a_reconcile_is_a_trace_of_its_own_with_its_three_phases() -> None:
    sender = SpanSender(exporter := InMemorySpanExporter())
    await World(sender.tracer).reconciled()
    found = await ended(sender, exporter)
    assert set(found) == {"reconcile", "observe", "decide", "act"}
    for whole in found["reconcile"]:
        assert whole.parent is None
        assert whole.attributes is not None
        assert {**whole.attributes, "kvpilot.namespace": KEY.namespace, "kvpilot.name": KEY.name} == whole.attributes
        assert whole.attributes["kvpilot.generation"] == 1
        parts = [
            part
            for name in ("observe", "decide", "act")
            for part in found[name]
            if part.parent is not None and part.parent.span_id == whole.context.span_id
        ]
        assert [part.name for part in parts] == ["observe", "decide", "act"]
        assert [part.context.trace_id for part in parts] == [whole.context.trace_id] * 3
        times = [time for part in parts for time in (part.start_time or 0, part.end_time or 0)]
        assert times == sorted(times)
    news = [word for whole in found["reconcile"] for word in (whole.attributes or {})["kvpilot.decisions"]]  # type: ignore[union-attr]
    assert news == ["Serve/Started"]


async def test_a_conflict_is_not_a_fault_and_what_is_one_says_its_type_and_not_its_words() -> None:
    sender = SpanSender(exporter := InMemorySpanExporter())
    for error in (Conflict("PATCH", "/x", 409, SECRET), asyncio.CancelledError(SECRET), ValueError(SECRET)):
        with pytest.raises(type(error)), span(sender.tracer, "outer", {}, root=True), span(sender.tracer, "inner", {}):
            raise error
    found = await ended(sender, exporter)
    for spans in found.values():
        assert [(s.attributes or {})["error.type"] for s in spans] == ["Conflict", "CancelledError", "ValueError"]
        assert [s.status.status_code for s in spans] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]
        assert SECRET not in "".join(s.to_json() for s in spans)


async def test_a_scrape_says_which_pods_were_asked_and_which_gave_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Observed(monkeypatch)
    world.put(pod("b", "10.0.0.2"))
    sender = SpanSender(exporter := InMemorySpanExporter())
    world.observer.tracer = sender.tracer
    await world.scrape()
    (found,) = (await ended(sender, exporter))["scrape"]
    assert found.parent is None
    assert found.attributes == {
        "kvpilot.namespace": KEY.namespace,
        "kvpilot.name": KEY.name,
        "kvpilot.pods": ("a", "b"),
        "kvpilot.pods.failed": ("b",),
    }
    await world.scraper.close()


async def test_a_service_without_an_engine_to_ask_makes_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Observed(monkeypatch)
    world.drop("Pod", "a")
    sender = SpanSender(exporter := InMemorySpanExporter())
    world.observer.tracer = sender.tracer
    await world.scrape(3)
    assert await ended(sender, exporter) == {}
    await world.scraper.close()


class Maps:
    """API that serves ConfigMaps by name."""

    def __init__(self) -> None:
        self.maps: dict[str, Any] = {}

    async def find(self, ref: Ref) -> Any:
        return self.maps.get(ref.name)


async def probed(handler: Handler, tracer: Tracer, ask: Callable[[str], Any], maps: Maps, heads: list[str]) -> Any:
    """Return the findings of a probe that a reconcile started."""
    scraper = Scraper()
    done = asyncio.Event()
    probe = Probe(KEY, partial(Prober(maps, scraper, tracer).probe, uid="u"), lambda _: done.set())  # type: ignore[arg-type]
    try:
        async with engine(handler, heads) as url:
            with span(tracer, "reconcile", {}, root=True):
                probe.ensure(SPEC, ask(url))
            await asyncio.wait_for(done.wait(), 300)
        assert probe.result is not None
        return probe.result.outcome
    finally:
        probe.close()
        await probe.ended()
        await scraper.close()


def capture(url: str) -> Capture:
    return Capture("capture/x/0", "p", url, "m", "0123456789", NAME)


def measure(url: str) -> Measure:
    return Measure("measure/x", "p", url, "m", "k4v4", NAME)


def traces(heads: list[str]) -> set[tuple[str, str, bool] | None]:
    """Return trace, span and sampled flag from each request's `traceparent`; None for a request without one."""
    found = [[line for line in head.split("\r\n") if line.lower().startswith("traceparent:")] for head in heads]
    return {parsed(lines[0].split(":", 1)[1].strip()) if lines else None for lines in found}


async def test_a_probe_says_dtype_and_verdict_and_every_request_of_it_carries_its_trace() -> None:
    sender, maps = SpanSender(exporter := InMemorySpanExporter()), Maps()
    heads: list[list[str]] = [[], []]
    kept = await probed(counting, sender.tracer, capture, maps, heads[0])
    assert isinstance(kept, Captured)
    maps.maps[NAME] = baseline_config_map(KEY, "u", "0123456789", codec.encode(kept.baseline))
    await probed(counting, sender.tracer, measure, maps, heads[1])
    found = await ended(sender, exporter)
    said = [dict(one.attributes or {}) for one in found["probe"]]
    about = {"kvpilot.namespace": KEY.namespace, "kvpilot.name": KEY.name, "kvpilot.pod": "p"}
    verdict = {"kvpilot.probe.verdict": "Passed", "kvpilot.probe.reason": "WithinLimits"}
    assert said == [
        {**about, "kvpilot.probe": "capture", "kvpilot.probe.dtype": "auto"},
        {**about, "kvpilot.probe": "measure", "kvpilot.probe.dtype": "k4v4", **verdict},
    ]
    for probe, parent, asked in zip(found["probe"], found["reconcile"], heads, strict=True):
        assert probe.parent is not None
        assert probe.parent.span_id == parent.context.span_id
        # The pool's size comes from a page of metrics, as in every scrape.
        asked = [head for head in asked if "/metrics" not in head]
        assert len(asked) > 8
        assert traces(asked) == {(f"{probe.context.trace_id:032x}", f"{probe.context.span_id:016x}", True)}


async def test_without_an_endpoint_a_probe_sends_no_header_of_a_trace() -> None:
    heads: list[str] = []
    await probed(counting, NO_TRACER, capture, Maps(), heads)
    assert traces(heads) == {None}


async def test_no_span_quotes_a_prompt_or_what_an_engine_says() -> None:
    sender = SpanSender(exporter := InMemorySpanExporter())

    async def quoting(path: str, body: Body, writer: Writer) -> None:
        respond(writer, json.dumps({"error": f"{SECRET} {json.dumps(body)}"}).encode(), "500 Internal Server Error")

    outcome = await probed(quoting, sender.tracer, capture, Maps(), [])
    assert isinstance(outcome, ProbeFailed)
    assert SECRET in outcome.message
    (found,) = (await ended(sender, exporter))["probe"]
    assert (found.attributes or {})["error.type"] == "EngineRefused"
    assert found.status.status_code == StatusCode.ERROR
    assert SECRET not in found.to_json()


def test_the_operator_takes_the_options_that_the_documentation_gives_engines() -> None:
    page = (ROOT / "docs/tracing.md").read_text()
    (block,) = re.findall(r"```yaml\n(spec:\n  engine:.*?)```", page, re.DOTALL)
    given = yaml.safe_load(block)["spec"]["engine"]
    assert given["extraArgs"] == ["--otlp-traces-endpoint=http://otel-collector.monitoring:4318/v1/traces"]
    service = manifest()
    service["spec"]["engine"] |= given
    assert not faults(apply_defaults(service))


def test_every_attribute_is_in_the_documentation() -> None:
    page = (ROOT / "docs/tracing.md").read_text()
    package = ROOT / "operator/kvpilot_operator"
    names = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r'"(kvpilot\.(?!io[_"])[a-z.]+)"', file.read_text())
    }
    assert {"kvpilot.probe.verdict", "kvpilot.generation"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
