"""A service that was promoted to a dtype in a model cluster, with the probe runs on its serving replicas."""

from dataclasses import dataclass, field
from typing import Any

from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import Decision, Measure, ProbeResult
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import manifest, measurement

PERIOD = 60
GARBAGE = measurement(9_000_000, 10)
SOUND = measurement()


@dataclass
class ServingFleet(ModelCluster):
    """Cluster that records each probe run on a serving replica. `outcomes` and `bad_pods` decide the results."""

    runs: list[str] = field(default_factory=list)
    outcomes: dict[int, Any] = field(default_factory=dict)
    """Outcomes by the number of the run, from 0."""
    bad_pods: frozenset[str] = frozenset()
    """Bad pods, by the last character of their names."""
    answered: int = 0
    waiting: str = ""

    def _answer(self, decision: Decision) -> None:
        request = decision.probe
        if not isinstance(request, Measure) or not request.serving:
            self.waiting = ""
            super()._answer(decision)
            return
        if request.identity != self.waiting:
            # A probe takes time, so its result arrives two reconciles later.
            self.waiting, self.probe = request.identity, ProbeResult(request, None)
            return
        if self.probe is None or self.probe.outcome is None:
            self.runs.append(request.identity.split("/")[3])
            outcome = GARBAGE if self.runs[-1][-1] in self.bad_pods else SOUND
            self.probe = ProbeResult(request, self.outcomes.get(self.answered, outcome))
            self.answered += 1

    def until(self, seen: Any, ticks: int = 400) -> Decision:  # type: ignore[override]
        """Tick until a decision fulfils `seen`."""
        for _ in range(ticks):
            decision = self.tick()
            if decision is not None and seen(decision):
                return decision
        raise AssertionError(f"not seen in {ticks} ticks; runs: {self.runs}, status: {self.status.get('accuracy')}")

    def run_on(self, count: int) -> Decision:
        """Tick until `count` more probe runs are recorded."""
        for _ in range(count):
            before = self.accuracy.checked_time
            decision = self.until(lambda d, before=before: d.status.accuracy.checked_time != before)
        return decision

    @property
    def accuracy(self) -> Accuracy:
        return parse_status(self.status).accuracy


def fixed(dtype: str, **spec: Any) -> dict[str, Any]:
    """Return a service with this dtype and a probe run every minute."""
    accuracy = {"periodSeconds": PERIOD, **spec.pop("accuracy", {})}
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype}, accuracy=accuracy, **spec)


def serving(dtype: str = "k8v4", replicas: int = 1, **spec: Any) -> ServingFleet:
    """Return a service that was promoted to this dtype."""
    size = {"replicas": replicas, "scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 8}}
    cluster = ServingFleet(fixed("auto", **size, **spec))
    cluster.settle()
    cluster.edit(fixed(dtype, **size, **spec))
    cluster.until(lambda d: d.status.kv_cache.active_dtype == dtype and d.status.canary is None)
    assert cluster.accuracy.baseline is not None
    return cluster
