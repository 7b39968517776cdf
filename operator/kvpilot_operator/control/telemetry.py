"""The operator's own Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpilot_operator.decide.workload import Kind
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import Stage, Status

_STAGES = tuple(stage for stage in get_args(Stage) if stage not in ("Promoted", "RolledBack"))
_KINDS = get_args(Kind)
_SERVICE = ("namespace", "name")
_KNOWN = {"True": 1.0, "False": 0.0, "Unknown": None}


class Telemetry:
    """Counts what the operator does, and shows what it thinks of each service; label sets end with their service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter("kvpilot_passes", "Passes over services.", ("result",), registry=self.registry)
        self._seconds = Histogram("kvpilot_pass_seconds", "Duration of a pass.", registry=self.registry)
        self._queue = Gauge("kvpilot_queue_depth", "Services that wait for a pass.", registry=self.registry)
        self._scrape = Gauge("kvpilot_scrape_cycle_seconds", "Duration of the last cycle.", registry=self.registry)
        self._decisions = Counter(
            "kvpilot_decisions", "Decisions by reason.", (*_SERVICE, "action", "reason"), registry=self.registry
        )
        self._gauges: list[Gauge] = []
        self._shown: dict[tuple[Gauge, ServiceKey], frozenset[tuple[str, ...]]] = {}
        self._usage = self._gauge("kvpilot_kv_usage_percent", "KV cache in use.")
        self._capacity = self._gauge("kvpilot_kv_capacity_tokens", "KV cache capacity, in tokens, of all replicas.")
        self._kind = self._gauge("kvpilot_workload", "1 for what the service's metrics make of it.", "kind")
        self._age = self._gauge("kvpilot_metrics_age_seconds", "Age of the newest scrape of the service's engines.")
        self._doubted = self._gauge("kvpilot_doubted_pods", "Pods that answer and whose metrics are not believed.")
        self._recommended_dtype = self._gauge(
            "kvpilot_recommended_dtype", "1 for the KV-cache dtype that kvpilot would run.", "dtype"
        )
        self._recommended_replicas = self._gauge("kvpilot_recommended_replicas", "Replicas that kvpilot would run.")
        self._desired_replicas = self._gauge("kvpilot_desired_replicas", "Replicas that kvpilot sees to.")
        option = ("action", "dtype", "outcome")
        self._option_gpus = self._gauge(
            "kvpilot_option_gpus",
            "GPUs that a step weighed in the last decision takes, or frees where negative.",
            *option,
        )
        self._option_capacity = self._gauge(
            "kvpilot_option_capacity_tokens", "Capacity that a step weighed in the last decision leads to.", *option
        )
        self._canary = self._gauge("kvpilot_canary_stage", "1 for the stage that a canary is in.", "stage")
        self._weight = self._gauge("kvpilot_canary_weight_percent", "Share of the requests that a canary gets.")
        self._kl = self._gauge("kvpilot_probe_excess_kl_nats", "Excess KL of the last probe.", "dtype")
        self._verified = self._gauge(
            "kvpilot_accuracy_verified",
            "1 where the serving dtype is known to be accurate, 0 where it is known not to be.",
        )
        self._failures = self._gauge("kvpilot_accuracy_failures", "Periodic probes that failed in a row.")

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
        self._set(self._usage, key, status.kv_cache.usage_percent)
        self._set(self._capacity, key, status.kv_cache.capacity_tokens)
        self._set(self._recommended_replicas, key, status.scaling.recommended_replicas)
        self._set(self._desired_replicas, key, status.scaling.desired_replicas)
        self._sampled(s)
        self._weighed(key, status)
        self._tried(key, status)

    def forget(self, key: ServiceKey) -> None:
        """Drop the series of a deleted service."""
        self._decisions.remove_by_labels({"namespace": key.namespace, "name": key.name})
        for gauge in self._gauges:
            self._show(gauge, key, {})
            del self._shown[gauge, key]

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        gauge = Gauge(name, help_text, (*_SERVICE, *labels), registry=self.registry)
        self._gauges.append(gauge)
        return gauge

    def _show(self, gauge: Gauge, key: ServiceKey, values: Mapping[tuple[str, ...], float | None]) -> None:
        """Show these values by their further labels, and no other of this service; None is not shown."""
        now = {labels: value for labels, value in values.items() if value is not None}
        for labels in self._shown.get((gauge, key), frozenset()) - now.keys():
            gauge.remove(*key, *labels)
        for labels, value in now.items():
            gauge.labels(*key, *labels).set(value)
        self._shown[gauge, key] = frozenset(now)

    def _set(self, gauge: Gauge, key: ServiceKey, value: float | None) -> None:
        self._show(gauge, key, {(): value})

    def _sampled(self, s: Snapshot) -> None:
        newest = [series[-1] for series in s.samples.values() if series]
        age = min(((s.now - sample.time).total_seconds() for sample in newest), default=None)
        self._set(self._age, s.key, age)
        self._set(self._doubted, s.key, sum(len(sample.doubted) for sample in newest))

    def _weighed(self, key: ServiceKey, status: Status) -> None:
        pressured = status.condition("MemoryPressured")
        kind = pressured.reason if pressured is not None else None
        self._show(self._kind, key, {(one,): float(one == kind) for one in _KINDS})
        recommended = status.kv_cache.recommended_dtype
        self._show(self._recommended_dtype, key, {(recommended,): 1.0} if recommended is not None else {})
        options = next((entry.options for entry in status.decisions if entry.options), ())
        labels = [(option.action, option.dtype, option.outcome) for option in options]
        self._show(self._option_gpus, key, dict(zip(labels, [o.gpus for o in options], strict=True)))
        self._show(self._option_capacity, key, dict(zip(labels, [o.capacity_tokens for o in options], strict=True)))

    def _tried(self, key: ServiceKey, status: Status) -> None:
        canary, last = status.canary, status.accuracy.last
        stage = canary.stage if canary is not None else None
        self._show(self._canary, key, {(one,): float(one == stage) for one in _STAGES})
        self._set(self._weight, key, (canary.weight_percent or 0) if canary is not None else 0)
        self._show(self._kl, key, {(last.dtype,): last.excess_kl_micronats / 1e6} if last is not None else {})
        verified = status.condition("AccuracyVerified")
        self._set(self._verified, key, _KNOWN[verified.status] if verified is not None else None)
        self._set(self._failures, key, status.accuracy.failures)
