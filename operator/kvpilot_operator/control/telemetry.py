"""The operator's own Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot

_STAGES = ("Starting", "Probing", "Promoting", "RollingBack")


class Telemetry:
    """Counts what the operator does; label sets end with their service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("namespace", "name")
        self._passes = Counter("kvpilot_passes", "Passes over services.", ("result",), registry=self.registry)
        self._seconds = Histogram("kvpilot_pass_seconds", "Duration of a pass.", registry=self.registry)
        self._queue = Gauge("kvpilot_queue_depth", "Services that wait for a pass.", registry=self.registry)
        self._scrape = Gauge("kvpilot_scrape_cycle_seconds", "Duration of the last cycle.", registry=self.registry)
        self._decisions = Counter(
            "kvpilot_decisions", "Decisions by reason.", (*labels, "action", "reason"), registry=self.registry
        )
        self._pressure = Gauge("kvpilot_kv_usage_percent", "KV cache in use.", labels, registry=self.registry)
        self._capacity = Gauge("kvpilot_kv_capacity_tokens", "KV cache capacity.", labels, registry=self.registry)
        self._kl = Gauge(
            "kvpilot_probe_excess_kl_nats", "Excess KL of the last probe.", (*labels, "dtype"), registry=self.registry
        )
        self._canary = Gauge(
            "kvpilot_canary_stage", "1 for the stage that a canary is in.", (*labels, "stage"), registry=self.registry
        )

    @contextmanager
    def timed_pass(self, depth: int) -> Iterator[None]:
        """Time one pass and count how it ended."""
        self._queue.set(depth)
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self._passes.labels("error").inc()
            raise
        else:
            self._passes.labels("ok").inc()
        finally:
            self._seconds.observe(time.perf_counter() - began)

    def scraped(self, seconds: float) -> None:
        """One cycle over the fleet is done."""
        self._scrape.set(seconds)

    def decided(self, s: Snapshot, decision: Decision) -> None:
        """Publish what a pass found and decided."""
        key, status = s.key, decision.status
        for entry in status.decisions:
            if entry.time == s.now and entry not in s.status.decisions:
                self._decisions.labels(*key, entry.action, entry.reason).inc()
        if status.kv_cache.usage_percent is not None:
            self._pressure.labels(*key).set(status.kv_cache.usage_percent)
        if status.kv_cache.capacity_tokens is not None:
            self._capacity.labels(*key).set(status.kv_cache.capacity_tokens)
        if status.accuracy.last is not None:
            last = status.accuracy.last
            self._kl.labels(*key, last.dtype).set(last.excess_kl_micronats / 1e6)
        for stage in _STAGES:
            here = status.canary is not None and status.canary.stage == stage
            self._canary.labels(*key, stage).set(1.0 if here else 0.0)

    def forget(self, key: ServiceKey) -> None:
        """Drop the series of a deleted service."""
        for metric in (self._pressure, self._capacity, self._kl, self._canary, self._decisions):
            metric.remove_by_labels({"namespace": key.namespace, "name": key.name})
