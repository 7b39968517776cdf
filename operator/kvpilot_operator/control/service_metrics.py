"""Export the state of each service as Prometheus gauges: about 30 series for a service, and at most 50.

A word, such as a dtype, a stage or a reason, is a label. Only the current word has a series, with the value 1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpilot_operator.control.known_reasons import known
from kvpilot_operator.decide import canary_deadline, refused
from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import Decision, Figures
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import JournalEntry, Status


@dataclass(frozen=True, slots=True)
class Family:
    """Metric of a service: name, help text, and labels in addition to namespace and name."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    counts: bool = False

    @property
    def series(self) -> str:
        """The name of the metric's series: for a counter, `name` with `_total`."""
        return f"{self.name}_total" if self.counts else self.name


FAMILIES = (
    Family("kvpilot_service_info", "Always 1; labels have the spec's modes and model.", ("mode", "scaling", "model")),
    Family("kvpilot_condition", "1 for the current status and reason of a condition.", ("type", "status", "reason")),
    Family("kvpilot_last_reconcile_timestamp_seconds", "Time of the last successful reconcile of the service."),
    Family("kvpilot_refused_objects", "Objects and pods of the service that the API server refuses.", ("reason",)),
    Family("kvpilot_kv_usage_ratio", "Share of the KV cache in use, 0 to 1."),
    Family("kvpilot_kv_capacity_tokens", "KV cache capacity, in tokens, of all replicas."),
    Family("kvpilot_recent_tokens", "Recent window of the engines, in tokens of each sequence; 0 for none."),
    Family("kvpilot_active_dtype", "1 for the serving KV-cache dtype.", ("dtype",)),
    Family("kvpilot_recommended_dtype", "1 for the KV-cache dtype that kvpilot recommends.", ("dtype",)),
    Family("kvpilot_denied_until_timestamp_seconds", "Time until which kvpilot does not try a dtype.", ("dtype",)),
    Family("kvpilot_replicas", "Requested replicas of all revisions, including the canary's."),
    Family("kvpilot_ready_replicas", "Ready engine pods."),
    Family("kvpilot_desired_replicas", "Target number of replicas."),
    Family("kvpilot_recommended_replicas", "Number of replicas that kvpilot recommends."),
    Family("kvpilot_max_replicas", "Largest number of replicas that the spec allows."),
    Family("kvpilot_objective_seconds", "Latency that an objective of the spec allows.", ("metric", "percentile")),
    Family(
        "kvpilot_objective_observed_seconds",
        "Last observed latency at an objective's percentile; absent if there are too few samples.",
        ("metric", "percentile"),
    ),
    Family("kvpilot_engine_metrics_timestamp_seconds", "Time of the last scrape of the service's engines."),
    Family("kvpilot_doubted_pods", "Pods with implausible metrics."),
    Family("kvpilot_unanswered_pods", "Ready pods without metrics in the last scrape."),
    Family("kvpilot_scrape_backoff_pods", "Ready pods that are scraped less often, after several failed scrapes."),
    Family("kvpilot_canary_stage", "1 for the current stage of a canary.", ("stage", "dtype")),
    Family("kvpilot_canary_deadline_timestamp_seconds", "Deadline of the canary's current stage or step."),
    Family("kvpilot_canary_weight_ratio", "Share of the requests that the canary gets, 0 to 1."),
    Family("kvpilot_last_canary_timestamp_seconds", "Time when the last canary ended.", ("dtype", "verdict", "reason")),
    Family("kvpilot_probe_excess_kl_nats", "Mean KL divergence of the last probe minus the control run's.", ("dtype",)),
    Family(
        "kvpilot_probe_top1_agreement_ratio",
        "Share of positions at which the last probe and the baseline have the same most likely token, 0 to 1.",
        ("dtype",),
    ),
    Family("kvpilot_probe_failures", "Number of periodic probes in a row that failed."),
    Family("kvpilot_probe_errors", "Number of periodic probes in a row without a verdict."),
    Family("kvpilot_decisions", "Decisions that were written to status.decisions.", ("action", "reason"), counts=True),
    Family(
        "kvpilot_unanswered_questions",
        "Parts of reconciles (label `question`) that decided nothing because of an unexpected error.",
        ("question",),
        counts=True,
    ),
)
"""All metrics of a service, in the order in which they are shown."""

Row = tuple[str, tuple[str, ...], float]
"""(name of the family, label values, value) of one series."""


def news(s: Snapshot, decision: Decision) -> Iterator[JournalEntry]:
    """Yield the entries that this decision adds to the journal."""
    return (one for one in decision.status.decisions if one.time == s.now and one not in s.status.decisions)


class ServiceSeries:
    """The newest gauges of one service, and its counters."""

    __slots__ = ("_counts", "_rows")

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] = ()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def show(self, s: Snapshot, decision: Decision) -> None:
        """Set the gauges to the result of a reconcile, and count its decisions."""
        self._rows = rows(s, decision)
        for entry in news(s, decision):
            self._counts["kvpilot_decisions", (entry.action, known(entry.reason))] += 1
        for question in {one.question for one in decision.unanswered}:
            self._counts["kvpilot_unanswered_questions", (str(question),)] += 1

    def collect(self) -> Iterator[Row]:
        """Yield one row for each series of the service: its gauges and its counters."""
        yield from self._rows
        for (family, labels), count in list(self._counts.items()):
            yield family, labels, count


class ServiceMetrics(Collector):
    """The series of all `services`, as a collector of a Prometheus registry. Threads may read it."""

    def __init__(self) -> None:
        self.services: Callable[[], Iterable[tuple[ServiceKey, ServiceSeries]]] = tuple

    def collect(self) -> Iterator[Metric]:
        """Yield every family, even one without series, so that /metrics always shows its name and help."""
        metrics = {
            family.name: (CounterMetricFamily if family.counts else GaugeMetricFamily)(
                family.name, family.help, labels=("namespace", "name", *family.labels)
            )
            for family in FAMILIES
        }
        for key, series in self.services():
            for family, labels, value in series.collect():
                metrics[family].add_metric((*key, *labels), value)
        yield from metrics.values()


def rows(s: Snapshot, decision: Decision) -> tuple[Row, ...]:
    """Return the rows of one service after a reconcile."""
    status = decision.status
    found = (
        *_plain(s, status),
        *_figures(decision.figures),
        *_words(s, status),
        *_canary(s, status),
        *_probes(status.accuracy),
    )
    return tuple((family, labels, float(value)) for family, labels, value in found if value is not None)


_Rows = Iterator[tuple[str, tuple[str, ...], float | None]]


def _plain(s: Snapshot, status: Status) -> _Rows:
    usage = status.kv_cache.usage_percent
    yield "kvpilot_last_reconcile_timestamp_seconds", (), s.now.timestamp()
    yield "kvpilot_kv_usage_ratio", (), usage / 100 if usage is not None else None
    yield "kvpilot_kv_capacity_tokens", (), status.kv_cache.capacity_tokens
    yield "kvpilot_replicas", (), status.replicas
    yield "kvpilot_ready_replicas", (), status.ready_replicas
    yield "kvpilot_desired_replicas", (), status.scaling.desired_replicas
    yield "kvpilot_recommended_replicas", (), status.scaling.recommended_replicas
    newest = [series[-1] for series in s.samples.values() if series]
    scraped = max((sample.time.timestamp() for sample in newest), default=None)
    yield "kvpilot_engine_metrics_timestamp_seconds", (), scraped
    yield "kvpilot_doubted_pods", (), sum(len(sample.implausible) for sample in newest)
    yield "kvpilot_unanswered_pods", (), sum(sample.unanswered for sample in newest)
    yield "kvpilot_scrape_backoff_pods", (), len(s.backed_off)


def _figures(figures: Figures) -> _Rows:
    yield "kvpilot_recent_tokens", (), figures.recent_tokens
    for one in figures.objectives:
        labels = (one.objective.metric, str(one.objective.percentile))
        yield "kvpilot_objective_seconds", labels, one.limit
        yield "kvpilot_objective_observed_seconds", labels, one.seconds


def _words(s: Snapshot, status: Status) -> _Rows:
    if s.spec is not None:
        yield "kvpilot_service_info", (s.spec.kv_cache.mode, s.spec.scaling.mode, s.spec.model.served_name), 1
        yield "kvpilot_max_replicas", (), s.spec.scaling.max_replicas
    for reason, count in Counter(known(one) for one in refused(s)).items():
        yield "kvpilot_refused_objects", (reason,), count
    for one in status.conditions:
        yield "kvpilot_condition", (one.type, one.status, known(one.reason)), 1
    kv = status.kv_cache
    if kv.active_dtype is not None:
        yield "kvpilot_active_dtype", (kv.active_dtype,), 1
    if kv.recommended_dtype is not None:
        yield "kvpilot_recommended_dtype", (kv.recommended_dtype,), 1
    denied: dict[str, float] = {}
    for entry in kv.denied:
        denied[entry.dtype] = max(entry.until.timestamp(), denied.get(entry.dtype, 0.0))
    for dtype, until in denied.items():
        yield "kvpilot_denied_until_timestamp_seconds", (dtype,), until


def _canary(s: Snapshot, status: Status) -> _Rows:
    canary, last = status.canary, status.last_trial
    if canary is not None:
        yield "kvpilot_canary_stage", (canary.stage, canary.dtype), 1
        yield "kvpilot_canary_weight_ratio", (), (canary.weight_percent or 0) / 100
        deadline = canary_deadline(s.spec, canary).timestamp() if s.spec is not None else None
        yield "kvpilot_canary_deadline_timestamp_seconds", (), deadline
    if last is not None:
        labels = (last.dtype, last.verdict, known(last.reason))
        yield "kvpilot_last_canary_timestamp_seconds", labels, last.time.timestamp()


def _probes(accuracy: Accuracy) -> _Rows:
    last = accuracy.last
    if last is not None:
        yield "kvpilot_probe_excess_kl_nats", (last.dtype,), last.excess_kl_micronats / 1e6
        yield "kvpilot_probe_top1_agreement_ratio", (last.dtype,), last.top1_agreement_permille / 1000
    yield "kvpilot_probe_failures", (), accuracy.failures
    yield "kvpilot_probe_errors", (), accuracy.errors
