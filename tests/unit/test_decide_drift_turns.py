"""After a promotion the operator probes serving replicas one by one: when a run is due, and which replica is next."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from serving_fleet import PERIOD, ServingFleet, fixed, serving

from kvpilot_operator.decide.accuracy.drift import due, next_pod
from kvpilot_operator.state.accuracy import Accuracy, Measured
from kvpilot_operator.state.status import parse_status
from support.services import NOW, manifest, pod, snapshot, spec_of


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
    assert (verified.status, verified.reason) == ("True", "WithinLimits")
    assert cluster.runs[-1] in verified.message


def test_the_baseline_dtype_itself_is_not_probed():
    cluster = ServingFleet(fixed("auto"))
    cluster.settle()
    for _ in range(60):
        decision = cluster.tick()
        assert decision is not None
        assert decision.probe is None
    assert cluster.status["conditions"]


def test_reconciles_between_two_probe_runs_write_nothing():
    cluster = serving(accuracy={"periodSeconds": 3600})
    cluster.run_on(1)
    for _ in range(20):
        cluster.tick()
    before = dict(cluster.status)
    for _ in range(300):
        cluster.tick()
    assert cluster.status == before


def test_every_replica_is_probed_in_turn_and_the_bad_one_is_named():
    cluster = serving(replicas=3, accuracy={"onFailure": "Report", "failureLimit": 2})
    cluster.bad_pods = frozenset("1")
    decision = cluster.until(lambda d: any(e.reason == "AccuracyDrifted" for e in d.events))
    (event,) = [e for e in decision.events if e.reason == "AccuracyDrifted"]
    assert cluster.runs[-1][-1] == cluster.runs[-2][-1] == "1"
    assert cluster.runs[-1] in event.message
    assert len(cluster.runs) <= 3 + 1


def test_nothing_is_probed_while_the_spec_asks_for_another_revision_than_serves():
    """The kept baseline may come from another model."""
    cluster = serving()
    changed = fixed("k8v4", rollout={"paused": True}, model={"source": "hf://Qwen/Qwen3-4B"})
    cluster.edit(changed)
    cluster.tick()
    before = len(cluster.runs)
    for _ in range(5 * PERIOD // 5):
        cluster.tick()
    assert len(cluster.runs) == before


def test_probes_continue_while_the_rollout_is_paused():
    cluster = serving()
    cluster.edit(fixed("k8v4", rollout={"paused": True}))
    cluster.run_on(2)


def test_serving_replicas_are_not_probed_during_a_trial():
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


@given(uid=st.text(min_size=1, max_size=36), start=st.integers(0, 10**6), period=st.integers(60, 86_400))
def test_a_run_is_due_exactly_once_in_each_period(uid, start, period):
    obj = manifest(accuracy={"periodSeconds": period})
    spec, one = spec_of(obj), snapshot(obj, uid=uid)
    began = NOW + timedelta(seconds=start)
    accuracy = Accuracy(checked_time=began)
    runs = []
    for step in range(40):
        s = replace(one, now=began + timedelta(seconds=step * period / 8))
        if due(s, spec, accuracy):
            runs.append(s.now)
            accuracy = Accuracy(checked_time=s.now)
    assert 4 <= len(runs) <= 5
    gaps = [(b - a).total_seconds() for a, b in pairwise(runs)]
    assert all(abs(gap - period) <= period / 8 for gap in gaps)


def test_services_promoted_at_one_time_are_probed_at_different_times():
    obj = manifest(accuracy={"periodSeconds": 900})
    spec, accuracy, one = spec_of(obj), Accuracy(checked_time=NOW), snapshot(obj)
    first: Counter[int] = Counter()
    for service in range(1000):
        uid = f"4f1c-{service}"
        for minute in range(16):
            if due(replace(one, uid=uid, now=NOW + timedelta(minutes=minute)), spec, accuracy):
                first[minute] += 1
                break
    assert sum(first.values()) == 1000
    assert max(first.values()) < 110


@given(count=st.integers(1, 12), start=st.integers(0, 11), errors=st.integers(0, 30))
def test_all_healthy_replicas_are_probed_before_any_is_probed_again(count, start, errors):
    pods = [pod("r", name=f"pod-{i:02d}") for i in range(count)]
    accuracy = Accuracy(last=_last(f"pod-{start:02d}"), errors=errors)
    visited = []
    for _ in range(count):
        chosen = next_pod(pods, accuracy, "r").name
        visited.append(chosen)
        accuracy = Accuracy(last=_last(chosen))
    assert len(set(visited)) == count


@given(count=st.integers(1, 12), failures=st.integers(0, 3))
def test_replicas_without_a_verdict_do_not_delay_the_others(count, failures):
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
        excess_kl_micronats=0,
        top1_agreement_permille=1000,
    )


def test_a_replica_that_failed_is_probed_again_unless_it_is_gone():
    pods = [pod("r", name=name) for name in ("a", "b", "c")]
    failed = Accuracy(last=replace_verdict(_last("b")), failures=1)
    assert next_pod(pods, failed, "r").name == "b"
    assert next_pod([pods[0], pods[2]], failed, "r").name == "c"
    assert next_pod(pods, failed, "another revision").name == "a"


def replace_verdict(last: Measured) -> Measured:
    return Measured(**{name: getattr(last, name) for name in last.__struct_fields__} | {"verdict": "Failed"})
