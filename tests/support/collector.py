"""Collector of OTLP spans over HTTP on loopback. OpenTelemetry's own definitions decode the requests."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The OTLP `requests` so far, and the `headers` of each by lower-case name. Answers wait for the event `hold`."""

    def __init__(self, hold: threading.Event | None) -> None:
        self.hold = hold
        self.came = threading.Event()
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def spans(self) -> list[Span]:
        """Return all spans that were received so far."""
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resources(self) -> list[Mapping[str, str]]:
        """Return the resource attributes of each request, which identify the sender."""
        return [
            {one.key: one.value.string_value for one in resource.resource.attributes}
            for request in self.requests
            for resource in request.resource_spans
        ]


@contextmanager
def collecting(hold: threading.Event | None = None) -> Iterator[Collector]:
    """Yield a collector that listens at `url`; senders post spans to its /v1/traces."""
    collector = Collector(hold)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
            collector.came.set()
            if collector.hold is not None:
                collector.hold.wait()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        server.server_close()


def parsed(traceparent: str) -> tuple[str, str, bool]:
    """Return the trace ID, the span ID and the sampled flag of a `traceparent` header."""
    version, trace, span, flags = traceparent.split("-")
    assert version == "00"
    return trace, span, bool(int(flags, 16) & 1)
