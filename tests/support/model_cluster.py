"""A model of the cluster for properties of decide: objects as act would write them, engines that come up by themselves.

It runs the real decide and the real order of act's writes, and can cut a pass off after any write, as kill -9 would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from kvpilot_operator.api.schema import Fault, faults
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.decide import decide
from kvpilot_operator.probes.codec import Baseline, Control
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.render.names import DTYPE_LABEL, REVISION_LABEL
from kvpilot_operator.state.decision import Capture, Decision, Find, Measure, Objects
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.snapshot import (
    Captured,
    DeploymentView,
    NothingKept,
    PodView,
    ProbePlan,
    ProbeResult,
    RouteView,
    Sample,
    ServerFacts,
    Snapshot,
)
from kvpilot_operator.state.status import Status, dump_status, parse_status
from support.model_engines import ModelEngines, flows
from support.services import KEY, NOW, PROBES

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
    places: int | None = None
    """GPUs of the cluster; None is any number."""
    start_ticks: int = 0
    drain_ticks: int = 0
    requests: float = 0.0
    """Requests a tick, shared out by the Service's selector and the route."""
    slow: dict[str, float] = field(default_factory=dict)
    """By dtype: how many times as long requests take."""
    slow_revisions: frozenset[str] = frozenset()
    """Revisions whose requests take half as long again, whatever their dtype."""
    failing: dict[str, float] = field(default_factory=dict)
    """By dtype: the share of requests that fail."""
    rules: list[dict[str, Any]] | None = None
    """Of the HTTPRoute "web"; None is no route."""
    now: datetime = NOW
    status: dict[str, Any] = field(default_factory=dict)
    deployments: dict[str, tuple[str, int]] = field(default_factory=dict)
    services: dict[str, dict[str, str]] = field(default_factory=dict)
    """Selector by name."""
    budget: dict[str, Any] | None = None
    baseline: str | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    sheltered: set[str] = field(default_factory=set)
    """Names of pods that cluster autoscalers are asked to leave where they are."""
    probe: ProbeResult | None = None
    writes: int = 0
    unread: tuple[Unanswered, ...] = ()
    """What cannot be observed now."""
    unanswered: tuple[Question, ...] = ()
    """Questions that are made to fail; any other that does is a fault of decide."""
    watch: Callable[[ModelCluster], None] = lambda _: None
    """Called after every write: for what must hold at every moment."""
    engines: ModelEngines = field(default_factory=ModelEngines)
    _version: int = 0
    _read: tuple[dict[str, Any], tuple[Fault, ...], Spec | None] | None = None

    @property
    def traffic(self) -> str | None:
        """The one revision that the Service selects, as observe reads it."""
        return self.services.get(KEY.name, {}).get(REVISION_LABEL)

    def snapshot(self) -> Snapshot:
        """What observe would gather now."""
        if self._read is None or self._read[0] is not self.obj:
            broken = faults(self.obj)
            self._read = (self.obj, broken, None if broken else parse(self.obj))
        _, broken, spec = self._read
        unread = {one.question for one in self.unread}
        named = spec is not None and spec.canary.route_ref == "web"
        return Snapshot(
            now=self.now,
            key=KEY,
            uid="u-1",
            generation=self.obj["metadata"]["generation"],
            resource_version=str(self.writes),
            faults=broken,
            spec=spec,
            status=parse_status(self.status),
            deployments={n: DeploymentView(n, d, c) for n, (d, c) in self.deployments.items()},
            pods=tuple(self._pods()),
            traffic=self.traffic,
            samples={n: tuple(s) for n, s in self.samples.items()},
            route=self._route() if named and Question.ROUTE not in unread else None,
            server=ServerFacts(http_routes=True),
            probes=ProbePlan(identity=PROBES, fault=self.probe_fault)
            if Question.PROBE_SETS not in unread
            else ProbePlan(),
            unanswered=self.unread,
            probe_result=self.probe,
        )

    def tick(self, cut_after: int | None = None) -> Decision | None:
        """Time passes, engines are scraped, one pass runs; it is cut off after `cut_after` of its writes."""
        self.now += STEP
        self.engines.tick()
        self._controllers()
        self._scrape()
        before = self.snapshot()
        decision = decide(before)
        faults_of_decide = [
            one for one in decision.unanswered[len(self.unread) :] if one.question not in self.unanswered
        ]
        assert not faults_of_decide, faults_of_decide
        writes = self._writes(before, decision)
        for done, write in enumerate(writes):
            if cut_after is not None and done >= cut_after:
                self.probe = None
                return None
            write()
            self.writes += 1
            self._controllers()
            self.watch(self)
        if not decision.keeps_probe:
            self._answer(decision)
        return decision

    def parsed(self) -> Status:
        """The status as it is now."""
        return parse_status(self.status)

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

    def until(self, seen: Callable[[Status], bool], ticks: int = 400) -> Status:
        """Tick until the status fulfils `seen`."""
        for _ in range(ticks):
            self.tick()
            status = parse_status(self.status)
            if seen(status):
                return status
        raise AssertionError(f"not seen in {ticks} ticks: {self.status}")

    def edit(self, obj: dict[str, Any]) -> None:
        """The user changes the spec."""
        generation = self.obj["metadata"]["generation"] + 1
        self.obj = {**obj, "metadata": {**obj["metadata"], "generation": generation}}

    def edit_route(self, rules: list[dict[str, Any]] | None) -> None:
        """The user changes the route."""
        self.rules, self._version = rules, self._version + 1

    def shares(self) -> dict[str, float]:
        """What share of the requests each revision gets now, over those of its pods that answer."""
        whole = self._behind(self.services.get(KEY.name, {}))
        if not self.rules:
            return whole
        shares: dict[str, float] = {}
        refs = [ref for ref in self.rules[0]["backendRefs"] if ref["name"] in (KEY.name, f"{KEY.name}-canary")]
        weights = [ref.get("weight", 1) for ref in refs]
        for ref, weight in zip(refs, weights, strict=True):
            for name, share in self._behind(self.services.get(ref["name"], {})).items():
                shares[name] = shares.get(name, 0.0) + share * weight / sum(weights)
        return shares

    def answering(self) -> int:
        """Pods that requests can reach and that answer."""
        return sum(self.engines.ready(name) for name in self.shares())

    def _route(self) -> RouteView | None:
        return RouteView("web", str(self._version), tuple(self.rules), {}) if self.rules else None

    def _behind(self, selector: dict[str, str]) -> dict[str, float]:
        one = selector.get(REVISION_LABEL)
        names = [n for n in {p.revision for p in self.engines.pods} if selector and one in (None, n)]
        ready = {name: self.engines.ready(name) for name in names}
        return {name: count / sum(ready.values()) for name, count in sorted(ready.items()) if count}

    def _controllers(self) -> None:
        self.engines.places, self.engines.starts = self.places, self.starts
        self.engines.start_ticks, self.engines.drain_ticks = self.start_ticks, self.drain_ticks
        self.engines.reconcile({name: count for name, (_, count) in self.deployments.items()})
        self.sheltered &= {p.view().name for p in self.engines.pods}

    def _scrape(self) -> None:
        shares = self.shares()
        for name, (dtype, _) in self.deployments.items():
            pods = self.engines.ready(name)
            # As observe/windows.py does after the clock was set back.
            self.samples[name] = [one for one in self.samples.get(name, ()) if one.time < self.now]
            if not pods:
                continue
            capacity = CAPACITY.get(dtype, 3000) * pods
            held = self.demand * shares.get(name, 0.0)
            usage = min(1.0, held / capacity)
            waiting = max(0.0, held - capacity) / 500
            slow = self.slow.get(dtype, 1.0) * (1.5 if name in self.slow_revisions else 1.0)
            seen = flows(self.requests * shares.get(name, 0.0), slow, self.failing.get(dtype, 0.0))
            running = min(held, capacity) / 500
            self.samples.setdefault(name, []).append(
                Sample(self.now, pods, usage, running, waiting, capacity, dtype, seen)
            )

    def _writes(self, s: Snapshot, decision: Decision) -> list[Any]:
        writes: list[Any] = []
        if decision.baseline is not None:
            writes.append(lambda: setattr(self, "baseline", PROBES))
        if decision.status != s.status:
            writes.append(lambda: setattr(self, "status", dump_status(decision.status)))
        if decision.objects is not None:
            writes += self._placing(s, decision.objects)
        writes += [lambda p=p: self._shelter(p) for p in s.pods if p.sheltered != (p.name in decision.sheltered)]
        return writes

    def _placing(self, s: Snapshot, objects: Objects) -> list[Any]:
        writes: list[Any] = []
        more = {n: c for n, c in objects.scale.items() if n in s.deployments and c > s.deployments[n].replicas}
        fewer = {n: c for n, c in objects.scale.items() if n in s.deployments and c < s.deployments[n].replicas}
        for name, count in more.items():
            writes.append(lambda n=name, c=count: self._scale(n, c))
        for manifest in objects.apply:
            writes.append(lambda m=manifest: self._apply(m))
        for name, count in fewer.items():
            writes.append(lambda n=name, c=count: self._scale(n, c))
        for name in s.deployments:
            if name not in objects.keep:
                writes.append(lambda n=name: self.deployments.pop(n, None))
        for _, kind, name in objects.absent:
            writes.append(lambda k=kind, n=name: self._remove(k, n))
        return writes

    def _apply(self, manifest: Any) -> None:
        kind, about = manifest["kind"], manifest["metadata"]
        if kind == "Deployment":
            name = about["labels"][REVISION_LABEL]
            self.deployments[name] = (about["labels"][DTYPE_LABEL], manifest["spec"]["replicas"])
        elif kind == "Service":
            self.services[about["name"]] = manifest["spec"]["selector"]
        elif kind == "PodDisruptionBudget":
            self.budget = manifest["spec"]
        elif kind == "HTTPRoute" and about["resourceVersion"] == str(self._version):
            self.edit_route(manifest["spec"]["rules"])

    def _remove(self, kind: str, name: str) -> None:
        if kind == "Service":
            self.services.pop(name, None)
        elif kind == "PodDisruptionBudget":
            self.budget = None

    def _scale(self, name: str, count: int) -> None:
        if name in self.deployments:
            self.deployments[name] = (self.deployments[name][0], count)

    def _shelter(self, pod: PodView) -> None:
        """The annotation lives on the pod: a pod that is gone has none, and a new one of its name has none either."""
        if any(p.view().name == pod.name for p in self.engines.pods):
            self.sheltered ^= {pod.name}

    def _pods(self) -> list[PodView]:
        views = [p.view() for p in self.engines.pods]
        return [replace(view, sheltered=view.name in self.sheltered) for view in views]

    def _answer(self, decision: Decision) -> None:
        request = decision.probe
        if isinstance(request, Capture | Find):
            kept = Baseline(request.baseline, "m", "auto", (), control=Control(NOW, 8, 256, 100, 1000, 1000))
            there = self.baseline == request.baseline
            found = isinstance(request, Capture) or there
            self.probe = ProbeResult(request, Captured(kept, adopted=there) if found else NothingKept())
        elif isinstance(request, Measure):
            revision = request.identity.split("/")[2]
            dtype = self.deployments[revision][0]
            outcome = measurement(9_000_000, 10) if dtype in self.bad else self.measured
            self.probe = ProbeResult(request, outcome)
        else:
            self.probe = None
