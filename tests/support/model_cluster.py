"""A model of the cluster for properties of decide: objects as act would write them, engines that come up by themselves.

It runs the real decide and the real order of act's writes, and can cut a pass off after any write, as kill -9 would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from kvpilot_operator.api.schema import Fault, faults
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.decide import decide
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.render.names import DTYPE_LABEL, REVISION_LABEL
from kvpilot_operator.state.decision import Capture, Decision, Measure
from kvpilot_operator.state.snapshot import (
    Captured,
    DeploymentView,
    PodView,
    ProbePlan,
    ProbeResult,
    Sample,
    Snapshot,
)
from kvpilot_operator.state.status import Status, dump_status, parse_status
from support.services import KEY, NOW, PROBES, pod

STEP = timedelta(seconds=5)
CAPACITY = {"auto": 3000, "k8v4": 7680, "k4v4": 11290, "fp8": 6000, "int4_per_token_head": 11290}


def measurement(kl_micronats: int = 5_000, agreement: int = 990, positions: int = 256) -> Measurement:
    """A probe's outcome."""
    return Measurement(8, positions, 0, 20, 1000, kl_micronats, kl_micronats * 10, 100, agreement, (), None)


@dataclass
class ModelCluster:
    """One service and its objects. `bad` dtypes measure as garbage; `demand` is in tokens."""

    obj: dict[str, Any]
    bad: frozenset[str] = frozenset()
    demand: int = 0
    measured: Measurement = field(default_factory=lambda: measurement())
    """What a probe of a dtype that is not bad finds."""
    starts: bool = True
    """False: engines never become ready."""
    probe_fault: str | None = None
    now: datetime = NOW
    status: dict[str, Any] = field(default_factory=dict)
    deployments: dict[str, tuple[str, int]] = field(default_factory=dict)
    traffic: str | None = None
    baseline: str | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    probe: ProbeResult | None = None
    writes: int = 0
    _read: tuple[dict[str, Any], tuple[Fault, ...], Spec | None] | None = None

    def snapshot(self) -> Snapshot:
        """What observe would gather now."""
        if self._read is None or self._read[0] is not self.obj:
            broken = faults(self.obj)
            self._read = (self.obj, broken, None if broken else parse(self.obj))
        _, broken, spec = self._read
        pods = tuple(p for name, (_, count) in self.deployments.items() for p in self._pods(name, count))
        return Snapshot(
            now=self.now,
            key=KEY,
            uid="u-1",
            generation=self.obj["metadata"]["generation"],
            raw=self.obj,
            faults=broken,
            spec=spec,
            status=parse_status(self.status),
            deployments={n: DeploymentView(n, d, c) for n, (d, c) in self.deployments.items()},
            pods=pods,
            traffic=self.traffic,
            samples={n: tuple(s) for n, s in self.samples.items()},
            probes=ProbePlan(identity=PROBES, fault=self.probe_fault),
            probe_result=self.probe,
        )

    def tick(self, cut_after: int | None = None) -> Decision | None:
        """Time passes, engines are scraped, one pass runs; it is cut off after `cut_after` of its writes."""
        self.now += STEP
        self._scrape()
        before = self.snapshot()
        decision = decide(before)
        writes = self._writes(before, decision)
        for done, write in enumerate(writes):
            if cut_after is not None and done >= cut_after:
                self.probe = None
                return None
            write()
            self.writes += 1
        self._answer(decision)
        return decision

    def settle(self, ticks: int = 200) -> Status:
        """Tick until nothing is in flight and nothing has changed for a while."""
        quiet = 0
        last: dict[str, Any] = {}
        for _ in range(ticks):
            self.tick()
            now = {k: v for k, v in self.status.items() if k != "conditions"}
            quiet = quiet + 1 if now == last and "canary" not in self.status else 0
            last = now
            if quiet >= 15:
                break
        return parse_status(self.status)

    def edit(self, obj: dict[str, Any]) -> None:
        """The user changes the spec."""
        generation = self.obj["metadata"]["generation"] + 1
        self.obj = {**obj, "metadata": {**obj["metadata"], "generation": generation}}

    def _pods(self, name: str, count: int) -> Iterator[PodView]:
        for i in range(count):
            yield replace(pod(name), name=f"{name}-{i}", ready=self.starts)

    def _scrape(self) -> None:
        for name, (dtype, count) in self.deployments.items():
            capacity = CAPACITY.get(dtype, 3000) * max(count, 1)
            held = self.demand if name == self.traffic else 0
            usage = min(1.0, held / capacity)
            waiting = max(0.0, held - capacity) / 500
            self.samples.setdefault(name, []).append(
                Sample(self.now, max(count, 1), usage, min(held, capacity) / 500, waiting, 0.0, capacity, dtype)
            )

    def _writes(self, s: Snapshot, decision: Decision) -> list[Any]:
        writes: list[Any] = []
        if decision.baseline is not None:
            writes.append(lambda: setattr(self, "baseline", PROBES))
        if decision.status != s.status:
            writes.append(lambda: setattr(self, "status", dump_status(decision.status)))
        if decision.objects is not None:
            for manifest in decision.objects.apply:
                writes.append(lambda m=manifest: self._apply(m))
            for name, count in decision.objects.scale.items():
                writes.append(lambda n=name, c=count: self._scale(n, c))
            for name in s.deployments:
                if name not in decision.objects.keep:
                    writes.append(lambda n=name: self.deployments.pop(n, None))
        return writes

    def _apply(self, manifest: Any) -> None:
        labels = manifest["metadata"]["labels"]
        if manifest["kind"] == "Deployment":
            name = labels[REVISION_LABEL]
            self.deployments[name] = (labels[DTYPE_LABEL], manifest["spec"]["replicas"])
        elif manifest["kind"] == "Service":
            revision = manifest["spec"]["selector"][REVISION_LABEL]
            self.traffic = revision

    def _scale(self, name: str, count: int) -> None:
        if name in self.deployments:
            self.deployments[name] = (self.deployments[name][0], count)

    def _answer(self, decision: Decision) -> None:
        request = decision.probe
        if isinstance(request, Capture):
            kept = Baseline(request.baseline, "m", "auto", ())
            self.probe = ProbeResult(request.identity, Captured(kept, measurement(100, 1000)))
        elif isinstance(request, Measure):
            revision = request.identity.split("/")[2]
            dtype = self.deployments[revision][0]
            outcome = measurement(9_000_000, 10) if dtype in self.bad else self.measured
            self.probe = ProbeResult(request.identity, outcome)
        else:
            self.probe = None
