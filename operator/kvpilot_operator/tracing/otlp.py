"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. Only here is it imported: it is an extra."""

from __future__ import annotations

import asyncio
import os
import threading
from importlib.metadata import version
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvpilot_operator.errors import Conflict
from kvpilot_operator.tracing.spans import Attributes, Span, Tracer

# A collector that is away does not hold up the end of the process for longer.
CLOSE_SECONDS = 5.0
# Ways to end that are no fault: somebody wrote first and it is repeated, or it is wanted no more.
_NO_FAULT = (Conflict, asyncio.CancelledError)
_HEADERS = TraceContextTextMapPropagator()


class OtlpSpan(Span):
    """One of the SDK's, current while in its `with`. Of an exception it keeps the type: its text may quote a prompt."""

    __slots__ = ("_around", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def tell(self, attributes: Attributes) -> None:
        """Say more of it."""
        self._span.set_attributes(attributes)

    def headers(self) -> dict[str, str]:
        """`traceparent`, and `tracestate` where there is one."""
        carrier: dict[str, str] = {}
        _HEADERS.inject(carrier, trace.set_span_in_context(self._span))
        return carrier

    def __enter__(self) -> OtlpSpan:
        self._around = attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        detach(self._around)
        if kind is not None:
            self._span.set_attribute("error.type", kind.__name__)
            if not issubclass(kind, _NO_FAULT):
                self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class OtlpTracer(Tracer):
    """Sends spans in batches from a thread of its own; what a collector does not take in time is dropped."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        about = {"service.name": "kvpilot-operator", "service.version": version("kvpilot")}
        names = {"k8s.pod.name": "POD_NAME", "k8s.namespace.name": "POD_NAMESPACE"}
        about |= {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}
        resource = Resource(about).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("kvpilot_operator", version("kvpilot"))

    def span(self, name: str, attributes: Attributes, *, root: bool = False) -> OtlpSpan:
        """A span that begins now."""
        return OtlpSpan(self._tracer.start_span(name, Context() if root else None, attributes=attributes))

    async def close(self) -> None:
        """Send what was not sent yet."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_SECONDS)
