"""Who makes the spans of this process: the SDK's tracer where it is installed and has an endpoint, or nobody."""

from __future__ import annotations

import logging

from kvpilot_operator.tracing.settings import TracingError
from kvpilot_operator.tracing.spans import Tracer

log = logging.getLogger(__name__)


def tracer(endpoint: str | None) -> Tracer:
    """One that sends spans as the environment says (`settings.endpoint`), or one that does not: None, or no extra.

    Raises:
        TracingError: for what only the SDK can tell.
    """
    if endpoint is None:
        return Tracer()
    try:
        from kvpilot_operator.tracing.otlp import OtlpTracer
    except ImportError as error:
        log.warning("no traces for %s: %s; install kvpilot with its extra `tracing`", endpoint, error)
        return Tracer()
    try:
        made = OtlpTracer()
    except ValueError as error:
        raise TracingError(f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE, OTEL_BSP_MAX_QUEUE_SIZE: {error}") from error
    log.info("traces go to %s", endpoint)
    return made
