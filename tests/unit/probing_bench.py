"""A prober with a cluster of its own, and sound engines for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from kvpilot_operator.api.names import baseline_name
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.control.prober import Probe, Prober
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Capture, Captured, Find, Measure, ProbeResult
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes.codec import Baseline
from support.probe_engine import Body, Writer, counting, engine, respond
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
        self.prober = Prober(self.cluster, self.scraper)  # type: ignore[arg-type]  # the one method that it uses
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
