"""A real vLLM's spans join the trace of the probe that sends it requests, with the options of docs/tracing.md."""

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from kvpilot_operator.control.prober import Prober
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.decision import Capture, Captured
from kvpilot_operator.tracing import SpanSender
from kvpilot_probes import packs
from kvpilot_smallmodels.models import tiny_llama
from support.collector import collecting
from support.forked_serve import engine
from support.services import KEY, manifest, spec_of

ROOT = Path(__file__).parents[2]
COLLECTOR = "http://otel-collector.monitoring:4318"

pytestmark = [pytest.mark.timeout(3600), pytest.mark.long]


class NoMaps:
    """Cluster client that finds no ConfigMap."""

    async def find(self, *_: str) -> None:
        return None


def documented() -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of engines in docs/tracing.md."""
    page = (ROOT / "docs/tracing.md").read_text()
    (block,) = re.findall(r"```yaml\n(spec:\n  engine:.*?)```", page, re.DOTALL)
    given = yaml.safe_load(block)["spec"]["engine"]
    return given["extraArgs"], {one["name"]: one["value"] for one in given["env"]}


def test_each_question_of_a_probe_is_a_span_of_the_engine_below_the_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(manifest(accuracy={"probeSets": ["builtin/structured"]}))

    async def probe(url: str) -> None:
        spans, scraper = SpanSender(), Scraper()
        prober = Prober(NoMaps(), scraper, spans.tracer)  # type: ignore[arg-type]  # the one method that it uses
        found = await prober.probe(KEY, spec, Capture("capture/x/0", "p", url, "m", "0123456789", "none"), uid="u-1")
        assert isinstance(found, Captured)
        await scraper.close()
        await spans.close()

    arguments, environment = documented()
    questions = len(packs.load(["builtin/structured"]))
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        options = [one.replace(COLLECTOR, collector.url) for one in arguments]
        with engine(
            tiny_llama(), "auto", tmp_path, "--kv-cache-memory-bytes=64M", *options, env=environment
        ) as running:
            asyncio.run(probe(running.url))
            # This request belongs to no trace, so the sampler of docs/tracing.md drops it.
            running.tokens([7] * 16, 4)
        # The engine has ended after it sent all its spans.
        (own,) = (span for span in collector.spans() if span.name == "probe")
        theirs = [span for span in collector.spans() if span.name == "llm_request"]
    # The probe answers a prompt for the baseline, and then scores that answer for the control.
    assert len(theirs) >= 2 * questions
    assert {(span.trace_id, span.parent_span_id) for span in theirs} == {(own.trace_id, own.span_id)}
