"""Invariants after every write under random load, faults, spec edits and operator restarts."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpilot_operator.api.faults import faults
from kvpilot_operator.state.decision import ProbeFailed, ProbeResult
from kvpilot_operator.state.status import Status, parse_status
from support.crd import status_faults
from support.kstatus import compute, seen, tools_are_told_the_truth
from support.model_cluster import STEP, ModelCluster
from support.services import manifest

DWELL = 300
SPECS = st.fixed_dictionaries(
    {
        "kvCache": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["Auto", "Auto", "Auto", "Recommend", "Fixed"]),
                "ladder": st.sampled_from([["k8v4", "k4v4"], ["k4v4"], ["fp8", "k8v4"]]),
                "pressure": st.just({"sustainedSeconds": 30}),
                "minDwellSeconds": st.just(DWELL),
            }
        ),
        "replicas": st.integers(0, 3),
        "scaling": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["Operator", "External"]),
                "minReplicas": st.integers(0, 2),
                "maxReplicas": st.integers(2, 4),
                "scaleDownStabilizationSeconds": st.just(60),
            }
        ),
        "canary": st.fixed_dictionaries(
            {
                "capacityPolicy": st.sampled_from(["Surge", "ReplaceOne", "SurgeOrReplaceOne", "WhenIdle"]),
                "steps": st.sampled_from([[], [{"weightPercent": 30, "holdSeconds": 30}]]),
                "progressDeadlineSeconds": st.just(600),
                "warmUpSeconds": st.just(5),
                "minRequests": st.just(20),
            }
        ),
        "accuracy": st.fixed_dictionaries({"periodSeconds": st.just(60)}),
        "rollout": st.fixed_dictionaries({"paused": st.booleans(), "denySeconds": st.sampled_from([0, 3600])}),
        "disruption": st.fixed_dictionaries({"maxUnavailable": st.sampled_from([0, 1, 2, "50%", "100%"])}),
    }
)


def service(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a valid service: mode Fixed requires a dtype, and other modes forbid it."""
    spec = {**spec, "kvCache": dict(spec["kvCache"])}
    if spec["kvCache"]["mode"] == "Fixed":
        spec["kvCache"]["dtype"] = "k8v4"
    made = manifest(**spec)
    assert not faults(made)
    return made


class BadDays(RuleBasedStateMachine):
    """Service in a model cluster. Rules act on it like users, kubelets and networks."""

    @initialize(spec=SPECS)
    def begin(self, spec: dict[str, Any]) -> None:
        self.cluster = ModelCluster(service(spec), requests=20.0, start_ticks=2, drain_ticks=1)
        self.cluster.watch = self._after_a_write
        self.edited = self.cluster.now
        self.before = self._seen()

    # Events.

    @rule(ticks=st.integers(1, 60))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self._tick()

    @rule(demand=st.sampled_from([0, 500, 2500, 6000, 12_000, 40_000]))
    def demand_changes(self, demand: int) -> None:
        self.cluster.demand = demand

    @rule(writes=st.integers(0, 4))
    def the_operator_is_killed_in_a_pass(self, writes: int) -> None:
        self._tick(cut_after=writes)
        self._forget()

    @rule()
    def the_operator_restarts(self) -> None:
        self._forget()

    @rule(spec=SPECS)
    def the_user_edits_the_spec(self, spec: dict[str, Any]) -> None:
        self.cluster.edit(service(spec))
        self.edited = self.cluster.now

    @rule(places=st.sampled_from([None, 1, 2, 3, 4]))
    def gpus_come_and_go(self, places: int | None) -> None:
        self.cluster.places = places

    @rule(which=st.integers(0, 5))
    def a_pod_is_evicted(self, which: int) -> None:
        pods = self.cluster.engines.pods
        if pods:
            gone = pods[which % len(pods)]
            self.cluster.engines.pods = tuple(p for p in pods if p is not gone)
            self.before = self._seen()

    @rule(dtype=st.sampled_from(["k8v4", "k4v4", "fp8"]), kind=st.sampled_from(["bad", "slow", "failing", "fine"]))
    def a_dtype_turns(self, dtype: str, kind: str) -> None:
        c = self.cluster
        c.bad = c.bad - {dtype} | ({dtype} if kind == "bad" else frozenset())
        c.slow = {**c.slow, dtype: 2.0 if kind == "slow" else 1.0}
        c.failing = {**c.failing, dtype: 0.3 if kind == "failing" else 0.0}

    @rule(usage=st.floats(0, 1), waiting=st.sampled_from([0.0, 3.0, 1e9]))
    def one_scrape_is_noise(self, usage: float, waiting: float) -> None:
        for series in self.cluster.samples.values():
            if series:
                series[-1] = replace(series[-1], usage=usage, waiting=waiting)

    @rule(seconds=st.integers(30, 300))
    def no_scrape_is_answered_for_a_while(self, seconds: int) -> None:
        start = self.cluster.now - timedelta(seconds=seconds)
        kept = {n: [s for s in series if s.time < start] for n, series in self.cluster.samples.items()}
        self.cluster.samples = kept

    @precondition(lambda self: self.cluster.probe is not None)
    @rule()
    def a_probe_times_out(self) -> None:
        self.cluster.probe = ProbeResult(self.cluster.probe.request, ProbeFailed("ProbeTimeout", "hangs"))

    # Invariants.

    @invariant()
    def every_decision_has_its_reason(self) -> None:
        for entry in self._status().decisions:
            assert entry.reason
            assert entry.message
            assert all(option.outcome and option.message for option in entry.options)

    @invariant()
    def the_api_server_takes_every_status(self) -> None:
        assert not status_faults(json.loads(json.dumps(self.cluster.status)))

    def teardown(self) -> None:
        """Check that the service converges with constant input, and that the operator then stops writing."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.places = None
        spec = self.cluster.obj["spec"]
        resumed = {**spec, "rollout": {**spec["rollout"], "paused": False}}
        self.cluster.edit({**self.cluster.obj, "spec": resumed})
        quiet, kept = 0, self._essence()
        last: object = None
        for _ in range(1500):
            self._tick()
            now = self._essence()
            changed = [k for k in now if now[k] != kept.get(k)]
            quiet = quiet + 1 if now == kept and "canary" not in now else 0
            last, kept = (changed, kept, now) if changed else last, now
            if quiet >= 150:
                self._check_budget()
                self._check_last_word()
                return
        raise AssertionError(f"not settled, last: {last}")

    # Helpers.

    def _tick(self, cut_after: int | None = None) -> None:
        self.before = self._seen()
        decision = self.cluster.tick(cut_after)
        if decision is not None:
            self._check_owners()

    def _essence(self) -> dict[str, Any]:
        """Return the status without the results of periodic probes, which change even if the service does not."""
        passing = ("conditions", "accuracy")
        return {k: v for k, v in self.cluster.status.items() if k not in passing}

    def _forget(self) -> None:
        """Forget everything that a new process does not know."""
        self.cluster.samples = {}
        self.cluster.probe = None

    def _status(self) -> Status:
        return parse_status(self.cluster.status)

    def _seen(self) -> tuple[Status, int]:
        return self._status(), self.cluster.answering()

    def _after_a_write(self, cluster: ModelCluster) -> None:
        tools_are_told_the_truth(cluster)
        (was, answered), now = self.before, self._status()
        spec = cluster.obj["spec"]
        self.before = (now, cluster.answering())
        wanted, most = self._wanted(now), spec["disruption"]["maxUnavailable"]
        away = {"50%": -(-wanted // 2), "100%": wanted}.get(most, most)
        # The operator takes a faulty canary out of the traffic at once, even if few stable pods remain.
        back = now.canary is not None and now.canary.stage == "RollingBack"
        enough = min(answered, 1 if back else max(wanted - away, 0 if most == "100%" else 1), wanted)
        assert cluster.answering() >= enough, f"{answered} answered, now {cluster.answering()}"
        self._check_canary(was, now, spec)
        self._check_dwell(was, now, spec)

    def _wanted(self, now: Status) -> int:
        scaling = self.cluster.obj["spec"]["scaling"]
        wanted = self.cluster.obj["spec"]["replicas"]
        if scaling["mode"] == "Operator" and now.scaling.desired_replicas is not None:
            wanted = now.scaling.desired_replicas
        return max(scaling["minReplicas"], min(scaling["maxReplicas"], wanted))

    def _check_canary(self, was: Status, now: Status, spec: dict[str, Any]) -> None:
        if now.canary is not None and (was.canary is None or was.canary.revision != now.canary.revision):
            standing = [
                d.dtype
                for d in was.kv_cache.denied
                if d.until > self.cluster.now and d.image == spec["engine"]["image"] and spec["rollout"]["denySeconds"]
            ]
            if spec["kvCache"]["mode"] == "Auto" or now.canary.dtype != spec["kvCache"].get("dtype"):
                assert now.canary.dtype not in standing
        if now.canary is not None and now.canary.stage == "Promoting":
            assert now.canary.verdict == "Passed"

    def _check_dwell(self, was: Status, now: Status, spec: dict[str, Any]) -> None:
        """Check that mode Auto starts a canary with another dtype only after the dwell time.

        A canary that leads away from damaged answers may start earlier.
        """
        if spec["kvCache"]["mode"] != "Auto" or now.canary is None or was.canary is not None:
            return
        changed = was.kv_cache.changed_time
        if changed is None or now.canary.dtype == now.canary.from_dtype or now.canary.reason == "AccuracyDrifted":
            return
        assert self.cluster.now - changed >= timedelta(seconds=DWELL) - STEP

    def _check_owners(self) -> None:
        """Check after a whole reconcile that only the user sets replicas in scaling mode External."""
        spec, status = self.cluster.obj["spec"], self._status()
        if spec["scaling"]["mode"] != "External":
            return
        assert status.scaling.desired_replicas is None
        if status.canary is None and status.stable is not None:
            scaling = spec["scaling"]
            theirs = max(scaling["minReplicas"], min(scaling["maxReplicas"], spec["replicas"]))
            assert self.cluster.deployments[status.stable.revision][1] == theirs

    def _check_budget(self) -> None:
        """Check that the disruption budget of a converged service lets a pod leave, unless the spec forbids it."""
        if self.cluster.budget is not None and self.cluster.budget["maxUnavailable"] == 0:
            assert self.cluster.obj["spec"]["disruption"]["maxUnavailable"] == 0 or self._wanted(self._status()) == 0

    def _check_last_word(self) -> None:
        """Check that no tool waits for ever on a converged service."""
        status, obj = self._status(), self.cluster.obj
        told = {one.type: one for one in status.conditions}
        word = compute(seen(self.cluster))
        assert told["Reconciling"].status == "False", told["Reconciling"]
        assert word in ("Current", "Failed"), told
        if word == "Current":
            assert status.stable.revision in self.cluster.deployments
            assert obj["spec"]["kvCache"].get("dtype", status.stable.dtype) == status.stable.dtype
            assert self.cluster.answering() == self.cluster.deployments[status.stable.revision][1]


TestBadDays = pytest.mark.slow(BadDays.TestCase)
TestBadDays.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
