"""The operator's own Prometheus metrics: of its work, its process, and its view of each service."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from kvpilot_operator.control.service_metrics import ServiceMetrics, ServiceSeries
from kvpilot_operator.errors import Conflict
from kvpilot_operator.state.snapshot import ServiceKey

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Disable the `_created` series, which would double the number of counters. Prometheus 2 does not use them.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Telemetry:
    """The metrics of the operator's work and of its view of each service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=registry)
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        gauge("kvpilot_build_info", "Always 1, with the operator's version.", ("version",)).labels(
            version("kvpilot")
        ).set(1)
        limit = float(os.environ.get("MEMORY_LIMIT_BYTES", "nan"))
        gauge("kvpilot_memory_limit_bytes", "Memory that the operator's container may use.").set(limit)
        self.leader = gauge("kvpilot_leader", "1 on the leader, 0 on a standby.")
        self._reconciles = counter("kvpilot_reconciles", "Reconciles of services.", ("result",))
        for result in ("ok", "conflict", "error"):
            self._reconciles.labels(result)
        self._reconcile_seconds = histogram("kvpilot_reconcile_duration_seconds", "Duration of a reconcile.")
        self.queue = gauge("kvpilot_queue_depth", "Services that wait for a reconcile.")
        self._cycle_seconds = gauge(
            "kvpilot_scrape_cycle_duration_seconds", "Duration of the last scrape of all services."
        )
        self._cycle_time = gauge(
            "kvpilot_scrape_cycle_timestamp_seconds", "Time of the last scrape of all services; 0 before the first."
        )
        self._scrapes = counter("kvpilot_engine_scrapes", "Scrapes of single engine pods.", ("result",))
        for result in ("ok", "error"):
            self._scrapes.labels(result)
        self._api_requests = counter(
            "kvpilot_api_requests",
            "Requests to the Kubernetes API; code is the HTTP status, or `none` without an answer.",
            ("method", "kind", "code"),
        )
        self._api_seconds = histogram(
            "kvpilot_api_request_duration_seconds", "Duration of requests to the Kubernetes API.", ("method",)
        )
        self._services = ServiceMetrics()
        registry.register(self._services)

    def services(self, series: Callable[[], Iterable[tuple[ServiceKey, ServiceSeries]]]) -> None:
        """Set the function that returns all services' series. It is called whenever the metrics are read."""
        self._services.services = series

    @contextmanager
    def timed_reconcile(self) -> Iterator[None]:
        """Time one reconcile and count its result. A conflict is not an error, because the reconcile is repeated."""
        began = time.perf_counter()
        try:
            yield
        except Conflict:
            self._reconciles.labels("conflict").inc()
            raise
        except Exception:
            self._reconciles.labels("error").inc()
            raise
        else:
            self._reconciles.labels("ok").inc()
        finally:
            self._reconcile_seconds.observe(time.perf_counter() - began)

    def scraped(self, seconds: float) -> None:
        """Record that one scrape of the whole fleet has ended, and how many seconds it took."""
        self._cycle_seconds.set(seconds)
        self._cycle_time.set_to_current_time()

    def engine_scraped(self, ok: bool) -> None:
        """Count a scrape of one engine pod."""
        self._scrapes.labels("ok" if ok else "error").inc()

    def api_request(self, method: str, kind: str, status: int, seconds: float) -> None:
        """Count a request to the Kubernetes API by its HTTP status (0: no answer), and record its duration."""
        self._api_requests.labels(method, kind, str(status) if status else "none").inc()
        if method != "WATCH":  # a watch has no useful duration: it runs until it is cancelled
            self._api_seconds.labels(method).observe(seconds)
