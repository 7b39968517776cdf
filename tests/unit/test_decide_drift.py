"""What happens after promotion: the serving replicas are probed one by one, and a drift is acted on once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide.accuracy.drift import due, next_pod
from kvpilot_operator.state.decision import Decision, Measure
from kvpilot_operator.state.snapshot import ProbeFailed, ProbeResult
from kvpilot_operator.state.status import Accuracy, Denied, Measured, dump_status, parse_status
from support.model_cluster import ModelCluster, measurement
from support.services import NOW, manifest, pod, revision_of, snapshot, spec_of

PERIOD = 60
GARBAGE = measurement(9_000_000, 10)
SOUND = measurement()
FEW = measurement(1_000, 1000, positions=40)


@dataclass
class Fleet(ModelCluster):
    """Notes each run of the serving replicas and answers it from `answers` (pod index, run number) -> outcome."""

    runs: list[str] = field(default_factory=list)
    outcomes: dict[int, Any] = field(default_factory=dict)
    """By the number of the run, from 0."""
    bad_pods: frozenset[str] = frozenset()
    """By the last character of their names."""
    answered: int = 0
    waiting: str = ""

    def _answer(self, decision: Decision) -> None:
        request = decision.probe
        if not isinstance(request, Measure) or not request.serving:
            self.waiting = ""
            super()._answer(decision)
            return
        if request.identity != self.waiting:
            # As an engine would take its time: the answer is there for the pass after the next.
            self.waiting, self.probe = request.identity, None
            return
        if self.probe is None:
            self.runs.append(request.identity.split("/")[3])
            outcome = GARBAGE if self.runs[-1][-1] in self.bad_pods else SOUND
            self.probe = ProbeResult(request.identity, self.outcomes.get(self.answered, outcome))
            self.answered += 1

    def until(self, seen: Any, ticks: int = 400) -> Decision:
        """Tick until a decision fulfils `seen`."""
        for _ in range(ticks):
            decision = self.tick()
            if decision is not None and seen(decision):
                return decision
        raise AssertionError(f"not seen in {ticks} ticks; runs: {self.runs}, status: {self.status.get('accuracy')}")

    def run_on(self, count: int) -> Decision:
        """Tick until `count` more runs are counted."""
        for _ in range(count):
            before = self.accuracy.checked_time
            decision = self.until(lambda d, before=before: d.status.accuracy.checked_time != before)
        return decision

    @property
    def accuracy(self) -> Accuracy:
        return parse_status(self.status).accuracy


def fixed(dtype: str, **spec: Any) -> dict[str, Any]:
    accuracy = {"periodSeconds": PERIOD, **spec.pop("accuracy", {})}
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype}, accuracy=accuracy, **spec)


def serving(dtype: str = "k8v4", replicas: int = 1, **spec: Any) -> Fleet:
    """A service that was promoted to this dtype."""
    size = {"replicas": replicas, "scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 8}}
    cluster = Fleet(fixed("auto", **size, **spec))
    cluster.settle()
    cluster.edit(fixed(dtype, **size, **spec))
    cluster.until(lambda d: d.status.kv_cache.active_dtype == dtype and d.status.canary is None)
    assert cluster.accuracy.baseline is not None
    return cluster


def test_a_promoted_dtype_is_probed_once_a_period_for_as_long_as_it_serves():
    cluster = serving()
    for _ in range(12 * PERIOD // 5):
        cluster.tick()
    assert 11 <= len(cluster.runs) <= 13
    assert cluster.accuracy.failures == cluster.accuracy.errors == 0
    assert cluster.accuracy.last is not None
    assert cluster.accuracy.last.pod == cluster.runs[-1]
    verified = parse_status(cluster.status).condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("True", "ProbePassed")
    assert cluster.runs[-1] in verified.message


def test_the_baseline_dtype_itself_is_not_probed():
    cluster = Fleet(fixed("auto"))
    cluster.settle()
    for _ in range(60):
        decision = cluster.tick()
        assert decision is not None
        assert decision.probe is None
    assert cluster.status["conditions"]


def test_passes_between_two_runs_write_nothing():
    cluster = serving(accuracy={"periodSeconds": 3600})
    cluster.run_on(1)
    for _ in range(20):
        cluster.tick()
    before = dict(cluster.status)
    for _ in range(300):
        cluster.tick()
    assert cluster.status == before


def test_a_drift_is_said_once_denied_for_its_accuracy_and_written_to_the_journal():
    cluster = serving()
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    status = decision.status
    assert (status.accuracy.failures, status.accuracy.errors) == (1, 0)
    (denied,) = status.kv_cache.denied
    assert (denied.dtype, denied.reason) == ("k8v4", "AccuracyDrifted")
    assert denied.until == cluster.now + timedelta(seconds=604_800)
    entry = status.decisions[0]
    assert (entry.action, entry.reason, entry.from_dtype) == ("RollBack", "AccuracyDrifted", "k8v4")
    assert cluster.runs[-1] in entry.message
    assert "excess KL" in entry.message
    drifts = [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert [e.type for e in drifts] == ["Warning"]
    verified = status.condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("False", "AccuracyDrifted")


def test_a_drift_counts_beside_an_older_denial_for_latency():
    cluster = serving()
    spec = cluster.snapshot().spec
    assert spec is not None
    older = Denied(
        dtype="k8v4", model=spec.model.source, image=spec.engine.image, gpu="cpu", reason="LatencyRegressed",
        message="slow", until=cluster.now + timedelta(days=7),
    )  # fmt: skip
    status = parse_status(cluster.status)
    kept = msgspec.structs.replace(status.kv_cache, denied=(older,))
    cluster.status = dump_status(msgspec.structs.replace(status, kv_cache=kept))
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    assert [d.reason for d in decision.status.kv_cache.denied] == ["AccuracyDrifted"]


def test_report_moves_nothing_and_warns_once():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    warnings = []
    for _ in range(6 * PERIOD // 5):
        decision = cluster.tick()
        assert decision is not None
        assert decision.status.kv_cache.denied == ()
        warnings += [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert len(cluster.runs) >= 4
    assert len(warnings) == 1
    assert "onFailure is Report" in warnings[0].message
    assert parse_status(cluster.status).kv_cache.active_dtype == "k8v4"


def test_nothing_is_denied_where_denials_are_switched_off():
    cluster = serving(rollout={"denySeconds": 0})
    cluster.bad_pods = frozenset("0")
    decision = cluster.run_on(1)
    assert decision.status.kv_cache.denied == ()
    assert any("denySeconds is 0" in e.message for e in decision.events)


def test_a_drift_counts_only_when_it_repeats_as_often_as_the_limit_says():
    cluster = serving(accuracy={"failureLimit": 3})
    cluster.outcomes = {0: GARBAGE, 1: GARBAGE, 2: SOUND, 3: GARBAGE, 4: GARBAGE, 5: GARBAGE}
    seen = []
    for _ in range(6):
        status = cluster.run_on(1).status
        verified = status.condition("AccuracyVerified")
        assert verified is not None
        seen.append((status.accuracy.failures, verified.reason, len(status.kv_cache.denied)))
    assert seen == [
        (1, "ProbeFailed", 0),
        (2, "ProbeFailed", 0),
        (0, "ProbePassed", 0),
        (1, "ProbeFailed", 0),
        (2, "ProbeFailed", 0),
        (3, "AccuracyDrifted", 1),
    ]


def test_a_recovery_resets_the_count_and_is_said():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.outcomes = {0: GARBAGE}
    cluster.run_on(1)
    decision = cluster.run_on(1)
    assert decision.status.accuracy.failures == 0
    assert [e.reason for e in decision.events] == ["AccuracyRecovered"]
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.status == "True"


@pytest.mark.parametrize("without", [ProbeFailed("EngineUnreachable", "no connection"), FEW])
def test_runs_without_a_verdict_never_turn_against_the_dtype(without):
    cluster = serving(accuracy={"consecutiveErrorLimit": 2})
    cluster.outcomes = dict.fromkeys(range(5), without)
    cluster.run_on(1)
    verified = parse_status(cluster.status).condition("AccuracyVerified")
    assert verified is not None
    assert verified.reason == "ProbePassed"
    decision = cluster.run_on(1)
    assert [(e.type, e.reason) for e in decision.events] == [("Warning", "AccuracyUnknown")]
    decision = cluster.run_on(3)
    status = decision.status
    assert (status.accuracy.failures, status.accuracy.errors) == (0, 5)
    assert status.kv_cache.denied == ()
    assert decision.events == ()
    verified = status.condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("Unknown", "ProbeErrors")
    assert cluster.run_on(1).status.accuracy.errors == 0


def test_an_engine_that_was_busy_with_users_is_no_warning():
    cluster = serving()
    cluster.outcomes = {0: ProbeFailed("EngineBusy", "5 requests still wait")}
    decision = cluster.run_on(1)
    assert decision.events == ()
    assert decision.status.accuracy.errors == 1


def test_every_replica_gets_its_turn_and_the_bad_one_is_named():
    cluster = serving(replicas=3, accuracy={"onFailure": "Report", "failureLimit": 2})
    cluster.bad_pods = frozenset("1")
    decision = cluster.until(lambda d: any(e.reason == "AccuracyDrifted" for e in d.events))
    (event,) = [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert cluster.runs[-1][-1] == cluster.runs[-2][-1] == "1"
    assert cluster.runs[-1] in event.message
    assert len(cluster.runs) <= 3 + 1


def test_nothing_is_probed_while_the_spec_asks_for_another_revision_than_serves():
    """The kept answers may be another model's."""
    cluster = serving()
    changed = fixed("k8v4", rollout={"paused": True}, model={"source": "hf://Qwen/Qwen3-4B"})
    cluster.edit(changed)
    cluster.tick()
    before = len(cluster.runs)
    for _ in range(5 * PERIOD // 5):
        cluster.tick()
    assert len(cluster.runs) == before


def test_probes_go_on_while_the_rollout_is_paused():
    cluster = serving()
    cluster.edit(fixed("k8v4", rollout={"paused": True}))
    cluster.run_on(2)


def test_a_canary_has_the_prober_to_itself():
    cluster = serving()
    cluster.run_on(1)
    cluster.edit(fixed("k4v4"))
    during = []
    while True:
        decision = cluster.tick()
        assert decision is not None
        if decision.status.canary is not None and decision.probe is not None:
            during.append(decision.probe.identity.split("/")[0])
        if decision.status.kv_cache.active_dtype == "k4v4" and decision.status.canary is None:
            break
    assert set(during) == {"measure"}


def test_a_new_dtype_starts_with_counts_of_its_own():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    cluster.run_on(2)
    assert cluster.accuracy.failures == 2
    cluster.bad_pods = frozenset()
    cluster.edit(fixed("k4v4", accuracy={"onFailure": "Report"}))
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "k4v4" and d.status.canary is None)
    assert (decision.status.accuracy.failures, decision.status.accuracy.errors) == (0, 0)
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.status == "True"


def test_going_back_to_the_baseline_forgets_the_drift():
    cluster = serving(accuracy={"onFailure": "Report"})
    cluster.bad_pods = frozenset("0")
    cluster.run_on(1)
    cluster.edit(fixed("auto"))
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "auto" and d.status.canary is None)
    assert (decision.status.accuracy.failures, decision.status.accuracy.checked_time) == (0, None)
    verified = decision.status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.reason == "Reference"


def test_a_baseline_that_was_deleted_is_no_failure_and_is_looked_for_again():
    cluster = serving()
    cluster.outcomes = {0: ProbeFailed("BaselineLost", "ConfigMap chat-baseline-abcdef01 holds no baseline")}
    cluster.baseline = None
    decision = cluster.until(lambda d: any(e.reason == "BaselineLost" for e in d.events))
    assert decision.status.accuracy.baseline is None
    assert (decision.status.accuracy.failures, decision.status.accuracy.errors) == (0, 0)
    for _ in range(3 * PERIOD // 5):
        cluster.tick()
    assert cluster.accuracy.baseline is None
    assert len(cluster.runs) == 1
    verified = parse_status(cluster.status).condition("AccuracyVerified")
    assert verified is not None
    assert (verified.status, verified.reason) == ("Unknown", "NotWatched")


@given(cuts=st.dictionaries(st.integers(0, 120), st.integers(0, 4), max_size=25), bad=st.booleans())
@settings(max_examples=25)
def test_restarts_neither_lose_a_count_nor_count_a_run_twice(cuts, bad):
    cluster = serving(accuracy={"onFailure": "Report", "failureLimit": 100})
    cluster.bad_pods = frozenset("0") if bad else frozenset()
    before = cluster.accuracy
    for tick in range(120):
        cluster.tick(cut_after=cuts.get(tick))
        if tick in cuts:
            cluster.waiting = ""
        after = cluster.accuracy
        counted = after.checked_time != before.checked_time
        assert after.failures - before.failures == (1 if bad and counted else 0)
        assert after.errors == 0
        before = after
    # A lost run is made up for within its period: of ten periods at most the last one is open.
    assert before.checked_time is not None
    assert cluster.now - before.checked_time < timedelta(seconds=3 * PERIOD)


@given(uid=st.text(min_size=1, max_size=36), start=st.integers(0, 10**6), period=st.integers(60, 86_400))
def test_a_run_is_due_exactly_once_in_each_period(uid, start, period):
    obj = manifest(accuracy={"periodSeconds": period})
    spec = spec_of(obj)
    began = NOW + timedelta(seconds=start)
    accuracy = Accuracy(checked_time=began)
    runs = []
    for step in range(40):
        s = snapshot(obj, uid=uid, now=began + timedelta(seconds=step * period / 8))
        if due(s, spec, accuracy):
            runs.append(s.now)
            accuracy = Accuracy(checked_time=s.now)
    assert 4 <= len(runs) <= 5
    gaps = [(b - a).total_seconds() for a, b in pairwise(runs)]
    assert all(abs(gap - period) <= period / 8 for gap in gaps)


def test_a_fleet_that_was_promoted_at_one_moment_does_not_probe_at_one_moment():
    obj = manifest(accuracy={"periodSeconds": 900})
    spec, accuracy = spec_of(obj), Accuracy(checked_time=NOW)
    first: Counter[int] = Counter()
    for service in range(1000):
        uid = f"4f1c-{service}"
        for minute in range(16):
            if due(snapshot(obj, uid=uid, now=NOW + timedelta(minutes=minute)), spec, accuracy):
                first[minute] += 1
                break
    assert sum(first.values()) == 1000
    assert max(first.values()) < 110


@given(count=st.integers(1, 12), start=st.integers(0, 11), errors=st.integers(0, 30))
def test_healthy_replicas_are_all_visited_before_any_comes_again(count, start, errors):
    pods = [pod("r", name=f"pod-{i:02d}") for i in range(count)]
    accuracy = Accuracy(last=_last(f"pod-{start:02d}"), errors=errors)
    visited = []
    for _ in range(count):
        chosen = next_pod(pods, accuracy, "r").name
        visited.append(chosen)
        accuracy = Accuracy(last=_last(chosen))
    assert len(set(visited)) == count


@given(count=st.integers(1, 12), failures=st.integers(0, 3))
def test_replicas_whose_runs_bring_no_verdict_do_not_keep_the_others_from_their_turn(count, failures):
    pods = [pod("r", name=f"pod-{i:02d}") for i in range(count)]
    visited = {
        next_pod(pods, Accuracy(last=_last("pod-00"), errors=errors, failures=failures), "r").name
        for errors in range(1, count + 1)
    }
    assert len(visited) == count


def _last(name: str) -> Measured:
    return Measured(
        revision="r",
        dtype="k8v4",
        pod=name,
        verdict="Passed",
        probe_time=NOW,
        prompts=8,
        positions=256,
        mean_kl_micronats=0,
        p99_kl_micronats=0,
        excess_kl_micronats=0,
        top1_agreement_permille=1000,
    )


def test_the_replica_that_failed_is_asked_again_unless_it_is_gone():
    pods = [pod("r", name=name) for name in ("a", "b", "c")]
    failed = Accuracy(last=replace_verdict(_last("b")), failures=1)
    assert next_pod(pods, failed, "r").name == "b"
    assert next_pod([pods[0], pods[2]], failed, "r").name == "c"
    assert next_pod(pods, failed, "another revision").name == "a"


def replace_verdict(last: Measured) -> Measured:
    return Measured(**{name: getattr(last, name) for name in last.__struct_fields__} | {"verdict": "Failed"})


def test_a_drift_leads_back_to_the_baseline_which_then_stays():
    cluster = serving()
    cluster.bad_pods = frozenset("0")
    decision = cluster.until(lambda d: d.status.kv_cache.active_dtype == "auto" and d.status.canary is None)
    probes = [e.action for e in decision.status.decisions]
    assert "Judge" in probes, "the way back is probed before it gets traffic, too"
    for _ in range(60):
        cluster.tick()
    status = parse_status(cluster.status)
    assert status.kv_cache.active_dtype == "auto"
    assert cluster.traffic == revision_of(cluster.obj, "auto")
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [("k8v4", "AccuracyDrifted")]
    assert (status.accuracy.failures, status.canary) == (0, None)
