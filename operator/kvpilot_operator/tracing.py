"""OpenTelemetry spans. Their attributes never hold text of users or engines, such as prompts or error messages."""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvpilot_formats.untrusted import KvpilotError
from kvpilot_operator.errors import Conflict

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["NO_TRACER", "Span", "SpanSender", "Tracer", "TracingError", "span", "span_sender", "trace_headers"]

log = logging.getLogger(__name__)

# Longest delay, in seconds, of the process's end by an unreachable collector.
CLOSE_SECONDS = 5.0
# Exceptions that are not faults: a conflict is retried, and nobody needs a cancelled task any more.
_NO_FAULT = (Conflict, asyncio.CancelledError)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


NO_TRACER = NoOpTracer()


class TracingError(KvpilotError):
    """An OTEL_* environment variable is invalid."""


@contextmanager
def span(
    tracer: Tracer, name: str, attributes: Mapping[str, str | int | Sequence[str]], *, root: bool = False
) -> Iterator[Span]:
    """Run the block in a new span: a child of the current span, or with `root` the first of a new trace.

    Only the type of an exception is recorded, because its text may quote a prompt.
    """
    around = Context() if root else None
    with tracer.start_as_current_span(
        name, around, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as made:
        try:
            yield made
        except BaseException as error:
            made.set_attribute("error.type", type(error).__name__)
            if not isinstance(error, _NO_FAULT):
                made.set_status(StatusCode.ERROR)
            raise


def trace_headers(of: Span) -> dict[str, str]:
    """Return W3C's headers `traceparent` and `tracestate`, which make a server's spans children of this one."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(of))
    return carrier


class SpanSender:
    """The SDK's tracer, which sends spans in batches from a thread. If the collector is slow, it drops some spans."""

    def __init__(self, exporter: "SpanExporter | None" = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": "kvpilot-operator", "service.version": version("kvpilot")}
        names = {"k8s.pod.name": "POD_NAME", "k8s.namespace.name": "POD_NAMESPACE"}
        about |= {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}
        resource = Resource(about).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self.tracer: Tracer = self._provider.get_tracer("kvpilot_operator", version("kvpilot"))

    async def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_SECONDS."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_SECONDS)


def span_sender(environment: Mapping[str, str]) -> SpanSender | None:
    """Return a sender to the endpoint in the environment, or None without one. Raise TracingError if it is invalid."""
    name = next((name for name in _ENDPOINTS if environment.get(name)), None)
    if name is None:
        return None
    if not _is_url(environment[name]):
        # Do not show the value, because it may contain credentials.
        raise TracingError(
            f"{name} is not a URL; give the OTLP/HTTP endpoint of a collector, such as http://collector:4318"
        )
    try:
        sender = SpanSender()
    except ImportError as error:
        log.warning("%s is set, but no traces are sent: %s; install kvpilot with its extra `tracing`", name, error)
        return None
    except ValueError as error:
        raise TracingError(f"OTEL_*: the SDK refuses a variable: {error}; correct it, or leave it out") from error
    log.info("traces go to the endpoint of %s", name)
    return sender


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)
