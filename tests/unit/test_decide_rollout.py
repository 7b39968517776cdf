"""Dtype changes from start to end in a model cluster. The operator may be killed at any write."""

from dataclasses import replace
from datetime import timedelta
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide import decide
from kvpilot_operator.state.decision import Measure, ProbeFailed, ProbeResult
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import manifest, measurement, revision_of, running, snapshot
from support.trials import NEW, at_every_moment, ended, on_trial, stage

AUTO = {
    "kvCache": {
        "mode": "Auto",
        "ladder": ["k8v4", "k4v4"],
        "pressure": {"sustainedSeconds": 30},
        "minDwellSeconds": 600,
    }
}
BAD = "int4_per_token_head"


def fixed(dtype: str):
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype})


def test_a_service_starts_with_its_baseline_dtype_and_gets_traffic():
    cluster = ModelCluster(manifest(**AUTO))
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "auto"
    assert cluster.traffic == revision_of(cluster.obj, "auto")
    assert status.accuracy.baseline is not None
    assert {c.type: c.status for c in status.conditions}["Ready"] == "True"


def test_a_memory_bound_service_is_promoted_to_the_safest_sufficient_dtype():
    cluster = ModelCluster(manifest(**AUTO), demand=9000)
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "k4v4"
    assert status.last_trial is not None
    assert status.last_trial.verdict == "Passed"
    assert list(cluster.deployments) == [revision_of(cluster.obj, "k4v4")]


def test_a_safer_dtype_is_preferred_if_it_is_enough():
    cluster = ModelCluster(manifest(**AUTO), demand=5000)
    assert cluster.settle().kv_cache.active_dtype == "k8v4"


def test_a_relaxed_service_keeps_its_dtype():
    cluster = ModelCluster(manifest(**AUTO), demand=1500)
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "auto"
    assert status.last_trial is None


def starting_with(dtype: str, mode: str = "Auto"):
    return manifest(kvCache={**AUTO["kvCache"], "mode": mode, "ladder": ["k8v4", "k4v4"], "startDtype": dtype})


@pytest.mark.parametrize("mode", ["Auto", "Recommend"])
def test_a_service_changes_to_its_start_dtype_without_pressure_after_probes(mode):
    cluster = ModelCluster(starting_with("k8v4", mode), demand=1500)
    served = []
    for _ in range(200):
        cluster.tick()
        trial = parse_status(cluster.status).canary
        if trial is not None and trial.verdict != "Passed":
            served.append(cluster.traffic)
    status = cluster.settle()
    assert set(served) == {revision_of(cluster.obj, "auto")}
    assert status.kv_cache.active_dtype == "k8v4"
    assert [(one.dtype, one.verdict, one.reason) for one in status.history] == [("k8v4", "Passed", "WithinLimits")]


def test_a_start_dtype_that_fails_its_probes_leaves_the_serving_dtype():
    cluster = ModelCluster(starting_with("k4v4"), bad=frozenset({"k4v4"}), demand=1500)
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "auto"
    assert [(one.dtype, one.verdict) for one in status.history] == [("k4v4", "Failed")]
    cluster.now += timedelta(days=30)
    later = cluster.settle()
    assert len(later.history) == 1
    assert {c.type: c.status for c in later.conditions}["Ready"] == "True"


def test_a_service_that_has_changed_its_dtype_does_not_return_to_its_start_dtype():
    cluster = ModelCluster(manifest(**AUTO), demand=9000)
    cluster.settle()
    cluster.demand = 0
    cluster.edit(manifest(kvCache={**AUTO["kvCache"], "startDtype": "k8v4"}))
    assert cluster.settle().kv_cache.active_dtype == "k4v4"


def test_a_canary_gets_no_traffic_before_its_verdict():
    cluster = ModelCluster(manifest(**AUTO), demand=9000)
    for _ in range(80):
        cluster.tick()
        status = parse_status(cluster.status)
        if status.canary is not None and status.canary.verdict != "Passed":
            assert cluster.traffic != status.canary.revision


def test_a_dtype_that_garbles_answers_is_rolled_back_and_denied_while_the_last_good_one_serves():
    cluster = ModelCluster(manifest(**AUTO), bad=frozenset({BAD}), demand=9000)
    cluster.settle()
    cluster.demand = 0
    cluster.edit(fixed(BAD))
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "k4v4"
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [(BAD, "AccuracyRegressed")]
    assert status.last_trial is not None
    assert status.last_trial.verdict == "Failed"
    stalled = status.condition("Stalled")
    assert stalled is not None
    assert stalled.reason == "DtypeDenied"
    assert "denySeconds" in stalled.message


@pytest.mark.parametrize("more", [{"kvCache": {"recentTokens": 0}}, {"engine": {"extraArgs": ["--max-num-seqs=8"]}}])
def test_a_denied_dtype_leaves_the_serving_revision_as_it_is_until_the_spec_names_another(more):
    spec = {"kvCache": {}, **more}
    cluster = ModelCluster(fixed("k4v4"), bad=frozenset({BAD}))
    cluster.settle()
    serving = list(cluster.deployments)
    cluster.edit(manifest(**{**spec, "kvCache": {"mode": "Fixed", "dtype": BAD, **spec["kvCache"]}}))
    cluster.until(lambda s: s.last_trial is not None and s.canary is None)
    for _ in range(20):
        cluster.tick()
        assert list(cluster.deployments) == serving
    assert f"revision {serving[0]} (k4v4) keeps serving" in cluster.parsed().condition("Stalled").message
    cluster.edit(manifest(**{**spec, "kvCache": {"mode": "Fixed", "dtype": "k4v4", **spec["kvCache"]}}))
    status = cluster.settle()
    assert status.condition("Ready").status == "True"
    assert list(cluster.deployments) == [revision_of(cluster.obj, "k4v4")] != serving


def test_a_service_whose_engines_are_gone_starts_the_serving_dtype_while_the_specs_dtype_is_denied():
    cluster = ModelCluster(fixed("k4v4"), bad=frozenset({BAD}))
    cluster.settle()
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": BAD, "recentTokens": 0}))
    cluster.settle()
    cluster.api.drop("Deployment", f"chat-{cluster.traffic}")
    cluster.settle()
    assert list(cluster.deployments.values()) == [("k4v4", 1)]
    assert cluster.answering() == 1


def test_a_canary_that_fails_at_a_full_context_is_rolled_back_at_once_and_gets_no_traffic():
    crashed = ProbeFailed("EngineCrashed", "pod p: the engine failed at a prompt of 32760 tokens")
    cluster = ModelCluster(manifest(**AUTO), demand=9000, measured=crashed)
    cluster.watch = lambda one: stable_alone(one)
    status = cluster.until(lambda s: s.last_trial is not None and s.canary is None)
    assert (status.last_trial.verdict, status.last_trial.reason) == ("Error", "EngineCrashed")
    assert status.last_trial.message == crashed.message
    # Another image or more memory may cure the failure, so the operator tries the dtype again within the hour.
    (denied,) = status.kv_cache.denied
    assert denied.until <= cluster.now + timedelta(hours=1)


def test_an_engine_that_dies_during_a_probe_has_failed_it():
    cluster = on_trial(1)
    asked = None
    while not isinstance(asked, Measure):
        cluster.tick()
        s = replace(cluster.snapshot(), probe_result=None)
        asked = decide(s).probe
    pods = tuple(replace(one, ready=False, containers_ready=False) if one.name == asked.pod else one for one in s.pods)
    # The probe continues while the pod is missing, and its result counts once.
    gone = replace(s, pods=pods, probe_result=ProbeResult(asked, None))
    assert decide(gone).probe == asked
    ended_by = {"EngineCrashed": "RollingBack", "EngineUnreachable": "Probing"}
    for reason, where in ended_by.items():
        after = decide(replace(gone, probe_result=ProbeResult(asked, ProbeFailed(reason, "the pod died"))))
        assert after.status.canary.stage == where
        again = replace(gone, status=after.status, now=gone.now + timedelta(minutes=1))
        assert decide(replace(again, probe_result=ProbeResult(asked, None))).probe is None


def stable_alone(cluster: ModelCluster) -> None:
    stable = parse_status(cluster.status).stable
    assert set(cluster.shares()) <= ({stable.revision} if stable is not None else set())


def test_a_denied_dtype_is_tried_again_once_denials_are_turned_off():
    cluster = ModelCluster(manifest(**AUTO), bad=frozenset({BAD}))
    cluster.settle()
    cluster.edit(fixed(BAD))
    cluster.settle()
    cluster.bad = frozenset()
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": BAD}, rollout={"denySeconds": 0}))
    assert cluster.settle().kv_cache.active_dtype == BAD


def test_a_formerly_denied_dtype_that_passes_stays_when_denials_are_turned_on_again():
    cluster = ModelCluster(manifest(**AUTO), bad=frozenset({BAD}))
    cluster.settle()
    cluster.edit(fixed(BAD))
    assert [d.dtype for d in cluster.settle().kv_cache.denied] == [BAD]
    cluster.bad = frozenset()
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": BAD}, rollout={"denySeconds": 0}))
    assert cluster.settle().kv_cache.active_dtype == BAD
    cluster.edit(fixed(BAD))
    status = cluster.settle()
    assert status.kv_cache.active_dtype == BAD
    assert status.kv_cache.denied == ()


def test_a_baseline_replica_is_borrowed_when_no_16_bit_engine_serves():
    cluster = ModelCluster(fixed("k4v4"))
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "k4v4"
    assert status.accuracy.baseline is None
    cluster.edit(fixed("k8v4"))
    status = cluster.settle()
    assert status.kv_cache.active_dtype == "k8v4"
    assert status.accuracy.baseline is not None
    assert list(cluster.deployments) == [revision_of(cluster.obj, "k8v4")]


def test_recommend_mode_names_the_dtype_and_changes_nothing():
    wanted = manifest(kvCache={**AUTO["kvCache"], "mode": "Recommend"})
    cluster = ModelCluster(wanted, demand=9000)
    status = cluster.settle()
    assert status.kv_cache.recommended_dtype == "k4v4"
    assert status.kv_cache.active_dtype == "auto"
    assert status.last_trial is None


def test_no_second_change_comes_within_min_dwell_seconds():
    cluster = ModelCluster(manifest(**AUTO, scaling={"mode": "External"}), demand=5000)
    cluster.settle()
    cluster.demand = 10_000
    changed = parse_status(cluster.status).kv_cache.changed_time
    assert changed is not None
    while cluster.now < changed + timedelta(seconds=590):
        cluster.tick()
        assert "canary" not in cluster.status
    assert cluster.settle().kv_cache.active_dtype == "k4v4"


def test_a_paused_rollout_starts_no_canary():
    cluster = ModelCluster(manifest(**AUTO, rollout={"paused": True}), demand=9000)
    assert cluster.settle().last_trial is None


def test_a_paused_rollout_reports_the_waiting_change():
    cluster = ModelCluster(fixed("auto"))
    cluster.settle()
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": "k4v4"}, rollout={"paused": True}))
    status = cluster.settle()
    assert status.last_trial is None
    stalled = status.condition("Stalled")
    assert stalled is not None
    assert stalled.reason == "RolloutPaused"
    assert "k4v4" in stalled.message


def test_no_canary_starts_while_the_probe_sets_cannot_be_used():
    cluster = ModelCluster(manifest(**AUTO), demand=9000, probe_fault="configmap/empty: prompts is empty")
    status = cluster.settle()
    assert status.last_trial is None
    verified = status.condition("AccuracyVerified")
    assert verified is not None
    assert verified.reason == "ProbeSetInvalid"


def test_a_first_revision_that_never_answered_is_replaced_without_a_canary():
    first = manifest(model={"source": "file:///models/missing"})
    cluster = ModelCluster(first, starts=False)
    cluster.tick()
    cluster.edit(manifest(model={"source": "file:///models/there"}))
    cluster.tick()
    assert "canary" not in cluster.status
    assert cluster.status["stable"]["revision"] == revision_of(cluster.obj, "auto")


def test_a_first_revision_that_answers_while_it_is_being_replaced_stays_and_its_successor_is_a_canary():
    cluster = ModelCluster(manifest(kvCache={"mode": "Fixed", "dtype": "auto"}), start_ticks=2)
    cluster.tick()
    first = cluster.status["stable"]["revision"]
    cluster.edit(manifest(kvCache={"mode": "Fixed", "dtype": "k8v4"}))
    cluster.tick(cut_after=1)
    assert cluster.status["stable"]["revision"] != first
    cluster.tick()
    assert cluster.status["stable"]["revision"] == first
    assert cluster.shares() == {first: 1.0}
    cluster.watch = at_every_moment
    assert cluster.until(ended).last_trial.verdict == "Passed"


def test_an_invalid_spec_changes_no_object_and_is_reported():
    good = running(manifest(**AUTO), "auto")
    bad = manifest(**AUTO, engine={"extraArgs": ["--kv-cache-dtype=fp8"]})
    decision = decide(snapshot(bad, status=good.status, pods=good.pods, traffic=good.traffic))
    assert decision.objects is None
    stalled = decision.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "SpecInvalid")
    assert "--kv-cache-dtype" in stalled.message


def _end(cluster: ModelCluster) -> tuple[object, ...]:
    status = cluster.settle()
    return (
        status.kv_cache.active_dtype,
        [d.dtype for d in status.kv_cache.denied],
        sorted(cluster.deployments),
        cluster.traffic,
        status.canary,
    )


@cache
def _undisturbed() -> tuple[object, ...]:
    return _story({})


def _story(kills: dict[int, int]) -> tuple[object, ...]:
    cluster = ModelCluster(manifest(**AUTO), bad=frozenset({BAD}), demand=9000)
    for tick in range(50):
        cluster.tick(cut_after=kills.get(tick))
    cluster.settle()
    cluster.edit(fixed(BAD))
    for tick in range(50, 70):
        cluster.tick(cut_after=kills.get(tick))
    return _end(cluster)


@pytest.mark.slow
@given(cuts=st.dictionaries(st.integers(0, 70), st.integers(0, 5), max_size=12))
@settings(max_examples=20)
def test_a_kill_between_any_two_writes_ends_in_the_same_state(cuts):
    assert _story(cuts) == _undisturbed()


@given(st.integers(0, 100_000_000), st.integers(0, 1000), st.integers(0, 20))
@settings(max_examples=20)
def test_a_promotion_always_has_a_passed_verdict(kl, agreement, prompts):
    cluster = ModelCluster(manifest(**AUTO), demand=9000, measured=measurement(kl, agreement, prompts))
    cluster.settle()
    status = parse_status(cluster.status)
    last = status.last_trial
    assert status.kv_cache.active_dtype == "auto" or (last is not None and last.verdict == "Passed")


def test_after_a_lost_status_the_answering_revision_keeps_serving_with_its_replicas():
    cluster = ModelCluster(manifest(**AUTO, scaling={"maxReplicas": 4}), demand=9000, start_ticks=3)
    cluster.settle()
    cluster.status["scaling"]["desiredReplicas"] = 3
    cluster.settle()
    serves = revision_of(cluster.obj, "k4v4")
    assert cluster.deployments == {serves: ("k4v4", 3)}
    cluster.status, seen = {}, set()
    cluster.watch = lambda now: seen.add(now.answering())
    for _ in range(20):
        cluster.tick()
    status = cluster.parsed()
    assert (status.stable.revision, status.scaling.desired_replicas) == (serves, 3)
    assert cluster.deployments == {serves: ("k4v4", 3)}
    assert min(seen) == 3
    assert [(one.action, one.reason) for one in status.decisions][-1] == ("Serve", "TakenBack")


def test_a_status_lost_during_a_traffic_step_ends_no_service():
    cluster = on_trial(4)
    cluster.until(lambda s: stage("Shifting")(s) and cluster.traffic == "")
    cluster.status, seen = {}, set()
    cluster.watch = lambda now: seen.add(now.answering())
    cluster.until(ended)
    assert min(seen) >= 3
    assert cluster.settle().kv_cache.active_dtype == NEW


def test_recorded_rates_are_dropped_with_another_engine_but_not_with_another_dtype():
    learnt = {
        "saturations": [{"dtype": "auto", "requestsPerHour": 900, "meanPrompt": 100, "meanGeneration": 50}],
        "scaleInBackoff": {"dtype": "auto", "replicas": 1, "time": "2026-11-21T12:00:00Z"},
    }
    cluster = ModelCluster(manifest(**AUTO))
    cluster.settle()
    cluster.status["scaling"] |= learnt
    cluster.demand = 5000
    cluster.until(lambda s: s.kv_cache.active_dtype == "k8v4")
    assert {one.dtype for one in cluster.parsed().scaling.saturations} >= {"auto"}
    assert cluster.parsed().scaling.scale_in_backoff is not None
    cluster.edit(manifest(**AUTO, engine={"image": "kvpilot/runtime:2"}))
    status = cluster.until(ended)
    assert status.last_trial.verdict == "Passed"
    assert status.scaling.saturations == ()
    assert status.scaling.scale_in_backoff is None
