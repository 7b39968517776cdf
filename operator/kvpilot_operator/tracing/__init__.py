"""Spans of what the operator does, for OpenTelemetry: `tracer` is the one way to make them.

Without an endpoint in the environment, or without the extra `tracing`, spans are made too, and are nothing.
"""

from kvpilot_operator.tracing.settings import TracingError, endpoint
from kvpilot_operator.tracing.spans import Attributes, Span, Tracer
from kvpilot_operator.tracing.tracers import tracer

__all__ = ["Attributes", "Span", "Tracer", "TracingError", "endpoint", "tracer"]
