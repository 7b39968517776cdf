"""Spans reach a collector. If they cannot, the log names the environment variable at fault."""

import asyncio
import subprocess
import sys
import threading

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpilot_operator import tracing
from kvpilot_operator.tracing import SpanSender, TracingError, span, span_sender, trace_headers
from support.collector import collecting, parsed


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_spans_reach_a_collector_over_http_with_who_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        sender = span_sender({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
        assert sender is not None
        tracer = sender.tracer
        with span(tracer, "outer", {"kvpilot.name": "chat"}, root=True), span(tracer, "inner", {}):
            pass
        await sender.close()

    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team%2Ca")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
        monkeypatch.setenv("POD_NAME", "kvpilot-0")
        asyncio.run(story())
        inner, outer = sorted(collector.spans(), key=lambda one: one.name)
        assert (inner.name, inner.parent_span_id) == ("inner", outer.span_id)
        assert [(one.key, one.value.string_value) for one in outer.attributes] == [("kvpilot.name", "chat")]
        assert collector.headers[0]["x-tenant"] == "team,a"
        (about,) = collector.resources()
        said = {"service.name": "kvpilot-operator", "k8s.pod.name": "kvpilot-0", "deployment.environment": "prod"}
        assert {**about, **said} == about


def test_a_sampler_keeps_its_share_and_an_engine_hears_that_a_trace_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    exporter = InMemorySpanExporter()

    async def story() -> dict[str, str]:
        sender = SpanSender(exporter)
        with span(sender.tracer, "outer", {}, root=True) as outer:
            headers = trace_headers(outer)
        await sender.close()
        return headers

    assert parsed(asyncio.run(story())["traceparent"])[2] is False
    assert exporter.get_finished_spans() == ()


def test_a_collector_that_says_nothing_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.05)
    answers = threading.Event()

    async def story() -> None:
        sender = SpanSender()
        with span(sender.tracer, "outer", {}, root=True):
            pass
        # Far less than the exporter's own timeout.
        await asyncio.wait_for(sender.close(), 300)

    with collecting(answers) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3000")
        asyncio.run(story())
        assert collector.came.wait(300)
        assert not answers.is_set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "hunter2@collector"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[hunter2"),
    ],
)
def test_an_endpoint_that_is_not_a_url_is_an_error_that_does_not_show_it(name: str, value: str) -> None:
    with pytest.raises(TracingError, match=f"^{name} is not a URL; give ") as refused:
        span_sender({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", name: value})
    assert value not in str(refused.value)


def test_a_variable_that_the_sdk_refuses_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    with pytest.raises(TracingError, match="max_export_batch_size"):
        span_sender({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})


STARTED = """
import sys, threading
{before}
from kvpilot_operator import tracing
sender = tracing.span_sender({environment})
with tracing.span(sender.tracer if sender else tracing.NO_TRACER, "reconcile", dict(), root=True) as span:
    headers = len(tracing.trace_headers(span))
    print(sender is None, headers, "opentelemetry.sdk" in sys.modules, threading.active_count())
"""


def started(environment: dict[str, str], before: str = "") -> subprocess.CompletedProcess[str]:
    code = STARTED.format(environment=environment, before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_without_an_endpoint_the_sdk_is_not_loaded_and_no_thread_is_started() -> None:
    assert started({}).stdout.split() == ["True", "0", "False", "1"]


def test_an_endpoint_without_the_extra_is_a_warning_and_no_traces() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    done = started(environment, before="sys.modules['opentelemetry.sdk.trace'] = None")
    assert done.stdout.split()[:2] == ["True", "0"]
    assert "install kvpilot with its extra `tracing`" in done.stderr


def test_with_an_endpoint_and_the_extra_there_are_traces() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert started(environment).stdout.split()[:3] == ["False", "1", "True"]
