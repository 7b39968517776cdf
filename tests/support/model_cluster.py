"""Model of a cluster for property tests of decide: an in-memory API server, and engines that start by themselves.

It runs the real decide and the real Actor. At any write it can kill the operator, which then loses all its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.faults import Fault, faults
from kvpilot_operator.api.gateways import RouteRef
from kvpilot_operator.api.names import KIND, REVISION_LABEL
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError, Rejected
from kvpilot_operator.observe.views import together
from kvpilot_operator.render.workloads import KINDS
from kvpilot_operator.state.decision import (
    Capture,
    Captured,
    Decision,
    Find,
    Measure,
    NothingKept,
    ProbeFailed,
    ProbeResult,
)
from kvpilot_operator.state.objects import PodView, RouteView
from kvpilot_operator.state.questions import Question, Unanswered, keeps_probe
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import ProbePlan, ServerFacts, Snapshot
from kvpilot_operator.state.status import Status, parse_status
from kvpilot_probes.codec import Baseline, Control
from kvpilot_probes.stats import Measurement
from support.memory_api import Killed, MemoryApi, What, run_to_end
from support.model_engines import TOKENS, ModelEngines, flows
from support.model_routes import copied, weighted
from support.services import KEY, NOW, PROBES, measurement

STEP = timedelta(seconds=5)
ROUTE = "web"
"""Name of the HTTPRoute."""
CAPACITY = {"auto": 3000, "k8v4": 7680, "k4v4": 11290, "fp8": 6000, "int4_per_token_head": 11290}


@dataclass
class ModelCluster:
    """Simulated cluster with one service. Time advances in ticks of STEP."""

    obj: dict[str, Any]
    bad: frozenset[str] = frozenset()
    """Dtypes with which engines answer garbage to probes."""
    demand: int = 0
    """Tokens of all users' requests that run or wait."""
    measured: Measurement | ProbeFailed = field(default_factory=lambda: measurement())
    """Result of a probe of a good dtype."""
    starts: bool = True
    """False if engines never become ready."""
    probe_fault: str | None = None
    """Fault of the service's probe packs, if they cannot be used."""
    places: int | None = None
    """Number of GPUs in the cluster; unlimited if None."""
    start_ticks: int = 0
    """Ticks from a pod's placement on a GPU until it is ready."""
    drain_ticks: int = 0
    """Ticks from a pod's deletion until it ends."""
    requests: float = 0.0
    """Requests per tick, which the Service's selector and the route distribute."""
    slow: dict[str, float] = field(default_factory=dict)
    """Factor on the duration of requests, by dtype."""
    slow_revisions: frozenset[str] = frozenset()
    """Revisions whose requests take 1.5 times as long, whatever their dtype."""
    failing: dict[str, float] = field(default_factory=dict)
    """Share of failing requests, by dtype."""
    answers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean length of users' answers, and the share of answers that end by themselves, by dtype."""
    odd_factors: frozenset[str] = frozenset()
    """Dtypes for which all engines except the first compute other calibration factors."""
    reports: dict[str, str] = field(default_factory=dict)
    """Calibration factors that engines report, by dtype; "" means that they report none."""
    rules: list[dict[str, Any]] | None = None
    """Rules of the HTTPRoute; None means no route."""
    request: str = ""
    """Annotation kvpilot.io/canary of the service."""
    now: datetime = NOW
    baseline: str | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    probe: ProbeResult | None = None
    writes: int = 0
    unread: tuple[Unanswered, ...] = ()
    """Parts of the snapshot that cannot be observed now."""
    unanswered: tuple[Question, ...] = ()
    """Questions (steps of a reconcile) that the test makes fail. Any other failure is a bug in decide."""
    watch: "Callable[[ModelCluster], None]" = lambda _: None
    """Callback after every write, to check properties that hold at every moment."""
    engines: ModelEngines = field(default_factory=ModelEngines)
    refuses: Callable[[dict[str, Any]], str | None] = lambda _: None
    """Callback that returns why the API server rejects a manifest, or None if it accepts."""
    _read: tuple[dict[str, Any], tuple[Fault, ...], Spec | None] | None = None

    def __post_init__(self) -> None:
        self.api = MemoryApi()
        self.api.refuses = self._refusal
        self.api.put(self.obj)
        if self.rules is not None:
            self.edit_route(self.rules)
        self.api.on_change = self._happened
        self.restart()

    def restart(self) -> None:
        """End the operator's process, if any, and start another one."""
        self._actor = Actor(self.api, self._clock)  # type: ignore[arg-type]

    def _clock(self) -> float:
        return (self.now - NOW).total_seconds()

    @property
    def status(self) -> dict[str, Any]:
        """The service's status, as the operator wrote it."""
        status: dict[str, Any] = self.api.objects[KIND, KEY.name].setdefault("status", {})
        return status

    @status.setter
    def status(self, status: dict[str, Any]) -> None:
        self.api.objects[KIND, KEY.name]["status"] = status

    @property
    def deployments(self) -> dict[str, tuple[str, int]]:
        """Dtype and replicas of each revision's workload, by revision."""
        return {name: (view.dtype, view.replicas) for name, view in self.api.workloads().items()}

    @property
    def services(self) -> dict[str, dict[str, str]]:
        """Selectors of the Services, by name. A Service that only reserves its name has none."""
        return {one["metadata"]["name"]: one["spec"].get("selector", {}) for one in self.api.of_kind("Service")}

    @property
    def pools(self) -> dict[str, dict[str, str]]:
        """Selectors of the InferencePools, by name."""
        pools = self.api.of_kind("InferencePool")
        return {one["metadata"]["name"]: one["spec"]["selector"]["matchLabels"] for one in pools}

    @property
    def budget(self) -> dict[str, Any] | None:
        """Spec of the PodDisruptionBudget."""
        return next((one["spec"] for one in self.api.of_kind("PodDisruptionBudget")), None)

    @property
    def traffic(self) -> str | None:
        """Revision that the Service and the InferencePool select, or "" for all revisions, as observe reads it."""
        views = self.api.views()
        service = views.get(("Service", KEY.name))
        return together(service.selects if service else None, views.get(("InferencePool", KEY.name)))

    def snapshot(self) -> Snapshot:
        """Return the snapshot that observe would gather now."""
        if self._read is None or self._read[0] is not self.obj:
            broken = faults(self.obj)
            self._read = (self.obj, broken, None if broken else parse(self.obj))
        _, broken, spec = self._read
        unread = {one.question for one in self.unread}
        named = spec is not None and spec.canary.route_ref == RouteRef(ROUTE)
        return Snapshot(
            now=self.now,
            key=KEY,
            uid="u-1",
            generation=self.obj["metadata"]["generation"],
            resource_version=str(self.writes),
            faults=broken,
            spec=spec,
            status=parse_status(self.status),
            canary_annotation=self.request,
            deployments=self.api.workloads(),
            pods=tuple(self._pods()),
            traffic=self.traffic,
            objects=self.api.views(),
            rejections=self._actor.rejections,
            samples={n: tuple(s) for n, s in self.samples.items()},
            route=self._route() if named and Question.ROUTE not in unread else None,
            server=ServerFacts(http_routes=True, inference_pools=True),
            probes=ProbePlan() if Question.PROBE_SETS in unread else ProbePlan(PROBES, self.probe_fault),
            unanswered=self.unread,
            probe_result=self.probe,
        )

    def tick(self, cut_after: int | None = None) -> Decision | None:
        """Advance the time, scrape the engines, and run one reconcile. Kill the operator after `cut_after` writes."""
        self.now += STEP
        self.engines.tick()
        self._controllers()
        self._scrape()
        before = self.snapshot()
        decision = decide(before)
        broken = [one for one in decision.unanswered[len(self.unread) :] if one.question not in self.unanswered]
        assert not broken, broken
        self.api.left = cut_after
        try:
            run_to_end(self._actor.perform(before, decision))
        except Killed:
            self.probe = None
            self.restart()
            return None
        if not keeps_probe(decision.unanswered):
            self._answer(decision)
        return decision

    def parsed(self) -> Status:
        """Return the service's current status, parsed."""
        return parse_status(self.status)

    def _refusal(self, manifest: Object) -> ClusterError | None:
        refused = self.refuses(manifest) if "kind" in manifest else None
        return Rejected("PATCH", manifest["metadata"]["name"], 422, refused, "Invalid") if refused else None

    def _happened(self, change: Object | What) -> None:
        """React to a completed write: run the controllers, then the test's watch."""
        if not isinstance(change, tuple):
            if change["kind"] == "Pod":
                self._mark(change)
            elif change["kind"] == "ConfigMap" and "binaryData" in change:
                self.keep(change["metadata"]["name"])
        route = self.api.objects.get(("HTTPRoute", ROUTE))
        self.rules = route["spec"].get("rules", []) if route is not None else None
        self.writes += 1
        self._controllers()
        self.watch(self)

    def _mark(self, pod: Object) -> None:
        """Set the condition of an engine pod. Do nothing if the pod is gone."""
        name = pod["metadata"]["name"]
        del self.api.objects["Pod", name]
        admitted = pod["status"]["conditions"][0]["status"] == "True"
        self.engines.admitted = self.engines.admitted | {name} if admitted else self.engines.admitted - {name}

    def settle(self, ticks: int = 200) -> Status:
        """Tick until there is no canary and the status has not changed for 15 ticks. Stop after `ticks` ticks."""
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
        """Advance the cluster, at most `ticks` ticks, until the status satisfies `seen`."""
        for _ in range(ticks):
            self.tick()
            status = parse_status(self.status)
            if seen(status):
                return status
        raise AssertionError(f"not seen in {ticks} ticks: {self.status}")

    def edit(self, obj: dict[str, Any]) -> None:
        """Replace the service's spec, as its user would."""
        generation = self.obj["metadata"]["generation"] + 1
        self.obj = {**obj, "metadata": {**obj["metadata"], "generation": generation}}
        self.api.put({**self.obj, "status": self.status})

    def scale(self, revision: str, replicas: int) -> None:
        """Scale the workload of a revision, as a client other than the operator."""
        what = f"{KEY.name}-{revision}"
        found = next(obj for (kind, name), obj in self.api.objects.items() if kind in KINDS and name == what)
        self.api.put({**found, "spec": {**found["spec"], "replicas": replicas}})

    def drop_services(self) -> None:
        """Delete all Services, as a client other than the operator."""
        for name in self.services:
            self.api.drop("Service", name)

    def edit_route(self, rules: list[dict[str, Any]] | None) -> None:
        """Replace the rules of the HTTPRoute, as its user would."""
        if rules is not None:
            known = self.api.objects.get(("HTTPRoute", ROUTE), {"kind": "HTTPRoute", "metadata": {"name": ROUTE}})
            self.api.put({**known, "spec": {"rules": rules}})
        elif ("HTTPRoute", ROUTE) in self.api.objects:
            self.api.drop("HTTPRoute", ROUTE)

    def shares(self) -> dict[str, float]:
        """Return each revision's current share of the requests. Revisions without ready pods get none."""
        if not self.rules:
            return self._behind(self.services.get(KEY.name, {}))
        return weighted(self.rules, {KEY.name, f"{KEY.name}-canary"}, self._backend)

    def mirrored(self) -> dict[str, float]:
        """Return the share of the requests that the route copies to each revision."""
        return copied(self.rules or (), self._backend)

    def _backend(self, ref: dict[str, Any]) -> dict[str, float]:
        backends = self.pools if ref.get("kind") == "InferencePool" else self.services
        return self._behind(backends.get(ref["name"], {}))

    def answering(self) -> int:
        """Return the number of ready pods that requests can reach."""
        return sum(self.engines.ready(name) for name in self.shares())

    def _route(self) -> RouteView | None:
        route = self.api.objects.get(("HTTPRoute", ROUTE))
        if route is None or not self.rules:
            return None
        about = route["metadata"]
        return RouteView(about["name"], about["resourceVersion"], tuple(self.rules))

    def _behind(self, selector: dict[str, str]) -> dict[str, float]:
        one = selector.get(REVISION_LABEL)
        names = [n for n in {p.revision for p in self.engines.pods} if selector and one in (None, n)]
        ready = {name: self.engines.ready(name) for name in names}
        return {name: count / sum(ready.values()) for name, count in sorted(ready.items()) if count}

    def _controllers(self) -> None:
        self.engines.places, self.engines.starts = self.places, self.starts
        self.engines.start_ticks, self.engines.drain_ticks = self.start_ticks, self.drain_ticks
        for what, obj in [one for one in self.api.objects.items() if one[0][0] == "Deployment"]:
            if "observedGeneration" not in obj.get("status", {}) or obj["spec"].get("paused"):
                self.api.objects[what] = {**obj, "status": {"observedGeneration": obj["metadata"]["generation"]}}
        views = self.api.workloads()
        for name, view in views.items():
            if view.nodes > 1 and not view.has_gate:
                self.engines.roll(name)
        self.engines.reconcile(
            {name: view.replicas for name, view in views.items()}, {name: view.has_gate for name, view in views.items()}
        )
        self.engines.admitted &= self.pod_names()

    def _scrape(self) -> None:
        shares = self.shares()
        for name, (dtype, _) in self.deployments.items():
            pods = self.engines.answering(name)
            # Drop samples from the future, as observe/windows.py does after the clock was set back.
            self.samples[name] = [one for one in self.samples.get(name, ()) if one.time < self.now]
            if not pods:
                continue
            capacity = CAPACITY.get(dtype, 3000) * pods
            held = self.demand * shares.get(name, 0.0)
            usage = min(1.0, held / capacity)
            waiting = max(0.0, held - capacity) / 500
            slow = self.slow.get(dtype, 1.0) * (1.5 if name in self.slow_revisions else 1.0)
            sent = shares.get(name, 0.0) + self.mirrored().get(name, 0.0)
            answers = self.answers.get(dtype, (TOKENS, 0.9))
            seen = flows(self.requests * sent, slow, self.failing.get(dtype, 0.0), *answers)
            running = min(held, capacity) / 500
            self.samples.setdefault(name, []).append(
                Sample(
                    self.now, pods, usage, running, waiting, capacity, self.reports.get(dtype, dtype), seen,
                    factors="aaaa",
                    mixed=self._mixed(name, dtype),
                )
            )  # fmt: skip

    def _mixed(self, name: str, dtype: str) -> tuple[tuple[str, str], ...]:
        ready = sorted(f"{name}-{p.index}" for p in self.engines.pods if p.revision == name and p.ready)
        return tuple((pod, "bbbb") for pod in ready[1:]) if dtype in self.odd_factors else ()

    def keep(self, config_map: str) -> None:
        """Record that a baseline was written to this ConfigMap."""
        self.baseline = PROBES

    def pod_names(self, *, workers: bool = False) -> set[str]:
        """Return the names of pods that take requests, or, with `workers`, of all pods."""
        return {one.name for view in self._pods() for one in (view.group if workers else (view,))}

    def _pods(self) -> list[PodView]:
        return self.engines.views({name: one.nodes for name, one in self.api.workloads().items()})

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
