"""Where spans go: a collector that hears or does not, the variables of OpenTelemetry, and errors that name one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpilot_operator import tracing
from kvpilot_operator.options import parse_arguments
from kvpilot_operator.tracing import TracingError, otlp
from kvpilot_operator.tracing.otlp import OtlpTracer
from support.collector import collecting, parsed


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_spans_reach_a_collector_over_http_with_who_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        tracer = tracing.tracer(tracing.endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        with tracer.span("outer", {"kvpilot.name": "chat"}, root=True), tracer.span("inner", {}):
            pass
        await tracer.close()

    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team%2Ca")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
        monkeypatch.setenv("POD_NAME", "kvpilot-0")
        asyncio.run(story())
        inner, outer = sorted(collector.spans(), key=lambda span: span.name)
        assert (inner.name, inner.parent_span_id) == ("inner", outer.span_id)
        assert [(one.key, one.value.string_value) for one in outer.attributes] == [("kvpilot.name", "chat")]
        assert collector.headers[0]["x-tenant"] == "team,a"
        (sender,) = collector.resources()
        about = {"service.name": "kvpilot-operator", "k8s.pod.name": "kvpilot-0", "deployment.environment": "prod"}
        assert {**sender, **about} == sender


def test_a_sampler_keeps_its_share_and_an_engine_hears_that_a_trace_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    exporter = InMemorySpanExporter()

    async def story() -> dict[str, str]:
        tracer = OtlpTracer(exporter)
        with tracer.span("outer", {}, root=True) as span:
            headers = span.headers()
        await tracer.close()
        return headers

    assert parsed(asyncio.run(story())["traceparent"])[2] is False
    assert exporter.get_finished_spans() == ()


def test_a_collector_that_says_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.05)
    answers = threading.Event()

    async def story() -> None:
        tracer = OtlpTracer()
        with tracer.span("outer", {}, root=True):
            pass
        # Far less than the exporter itself would wait.
        await asyncio.wait_for(tracer.close(), 300)

    with collecting(answers) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3000")
        asyncio.run(story())
        assert collector.came.wait(300)
        assert not answers.is_set()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318/v1/metrics"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_without_an_endpoint_for_traces_there_are_none(environment: dict[str, str]) -> None:
    assert tracing.endpoint(environment) is None


def test_an_endpoint_for_traces_comes_before_the_one_for_all() -> None:
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://b/v1/traces"}
    assert tracing.endpoint(both) == "https://b/v1/traces"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:99999", False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://", False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:hunter2@collector:4318", False),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces?key=hunter2", False),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", " http://collector:4318", False),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", True),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", True),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2", False),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=a,hunter2", False),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", True),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan", True),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "brotli", True),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/does/not/exist.pem", True),
        ("OTEL_TRACES_EXPORTER", "jaeger", True),
        ("OTEL_TRACES_SAMPLER", "sometimes", True),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", True),
        ("OTEL_RESOURCE_ATTRIBUTES", "prod", True),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", True),
    ],
)
def test_a_value_that_cannot_be_used_ends_the_start_with_its_name_and_the_remedy(
    name: str, value: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"error: {name}: " in said
    assert "; give " in said
    assert (repr(value) in said) == shown
    assert "hunter2" not in said


def test_batches_larger_than_the_queue_are_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    with pytest.raises(TracingError, match="OTEL_BSP_MAX_EXPORT_BATCH_SIZE"):
        tracing.tracer("http://collector:4318")


def test_good_values_of_all_kinds_are_taken(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://[fd00::1]:4318/otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20eA==, x-tenant = a",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem"),
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "OTEL_RESOURCE_ATTRIBUTES": "a=b,c=d",
        "OTEL_BSP_SCHEDULE_DELAY": "1000",
    }
    assert tracing.endpoint(environment) == "https://[fd00::1]:4318/otlp"


NAMES = [
    *(f"OTEL_EXPORTER_OTLP_{one}" for one in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT")),
    *(f"OTEL_EXPORTER_OTLP_{one}" for one in ("COMPRESSION", "CERTIFICATE", "TRACES_CLIENT_KEY", "TRACES_HEADERS")),
    *(f"OTEL_{one}" for one in ("TRACES_EXPORTER", "TRACES_SAMPLER", "TRACES_SAMPLER_ARG", "SDK_DISABLED")),
    *(f"OTEL_{one}" for one in ("RESOURCE_ATTRIBUTES", "BSP_SCHEDULE_DELAY", "BSP_MAX_QUEUE_SIZE")),
]


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.from_regex(r"https?://[^\0]*"),
    )
)
def test_whatever_the_variables_say_it_is_an_endpoint_none_or_an_error_that_names_one(
    environment: dict[str, str],
) -> None:
    try:
        found = tracing.endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", **environment})
    except TracingError as error:
        assert any(str(error).startswith(f"{name}: ") for name in environment)
        assert "; give " in str(error)
    else:
        assert found is None or found.lower().startswith(("http://", "https://"))
