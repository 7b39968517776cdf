"""A canary under live traffic in a model cluster: its steps, their verdicts, and a user's route."""

from datetime import timedelta

import pytest

from kvpilot_operator.api.names import REVISION_LABEL
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import KEY, manifest, revision_of
from support.trials import BUSY, NEW, OLD, ROUTE, STEPS, at_every_moment, ended, on_trial, service, stage


def test_a_good_canary_goes_through_every_step_and_is_promoted():
    cluster = on_trial(4)
    seen = []
    while not ended(parse_status(cluster.status)):
        cluster.tick()
        canary = parse_status(cluster.status).canary
        share = cluster.shares().get(revision_of(cluster.obj, NEW), 0.0)
        if canary is not None and canary.stage == "Shifting" and canary.step_time is not None:
            seen.append((canary.step, round(share, 2)))
    assert sorted(set(seen)) == [(0, 0.2), (1, 0.4)]
    status = parse_status(cluster.status)
    assert status.last_trial.verdict == "Passed"
    assert [d.reason for d in status.decisions].count("WithinLimits") == 2
    assert cluster.services[KEY.name][REVISION_LABEL] == revision_of(cluster.obj, NEW)
    assert list(cluster.deployments) == [revision_of(cluster.obj, NEW)]


def test_a_slow_canary_is_rolled_back_early_and_its_dtype_is_denied():
    cluster = on_trial(cluster={"slow": {NEW: 1.4}})
    cluster.until(stage("Shifting"))
    began = cluster.now
    status = cluster.until(stage("RollingBack"))
    assert cluster.now - began < timedelta(seconds=90)
    assert (status.canary.verdict, status.canary.reason) == ("Failed", "PerformanceRegressed")
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [(NEW, "PerformanceRegressed")]
    assert status.canary.itl_p95_change_percent > 10
    status = cluster.until(ended)
    assert status.history[0].verdict == "Failed"
    assert status.history[0].itl_p95_change_percent > 10
    assert status.kv_cache.active_dtype == OLD


def test_a_rollback_moves_traffic_in_the_same_reconcile_and_before_pods_are_deleted():
    for rules in (None, ROUTE):
        route_ref = {"routeRef": {"name": "web"}} if rules else {}
        cluster = on_trial(cluster={"slow": {NEW: 1.4}, "rules": rules}, **route_ref)
        cluster.until(stage("RollingBack"))
        new = revision_of(cluster.obj, NEW)
        assert new not in cluster.shares()
        assert cluster.rules == rules
        assert cluster.engines.answering(new) > 0


def test_failed_requests_fail_a_canary():
    cluster = on_trial(cluster={"failing": {NEW: 0.1}})
    status = cluster.until(stage("RollingBack"))
    assert (status.canary.verdict, status.canary.reason) == ("Failed", "ErrorsIncreased")


def test_a_step_with_too_few_requests_waits_and_ends_without_promotion():
    cluster = on_trial(cluster={"requests": 1.0})
    status = cluster.until(lambda s: stage("Shifting")(s) and s.canary.verdict == "Inconclusive")
    assert status.canary.reason == "TooFewSamples"
    held = status.condition("CanaryHealthy")
    assert held is not None
    assert held.status == "Unknown"
    status = cluster.until(ended)
    assert status.last_trial.verdict == "Inconclusive"
    until = status.kv_cache.denied[0].until
    assert until - cluster.now <= timedelta(hours=1)


def test_hold_seconds_do_not_count_towards_the_progress_deadline():
    steps = [{"weightPercent": 50, "holdSeconds": 1000}]
    cluster = on_trial(steps=steps, progressDeadlineSeconds=60)
    assert cluster.until(ended, 600).last_trial.verdict == "Passed"


def test_a_step_lasts_at_least_its_hold_seconds():
    cluster = on_trial(steps=[{"weightPercent": 50, "holdSeconds": 300}])
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    began = cluster.now
    cluster.until(stage("Promoting"))
    assert cluster.now - began >= timedelta(seconds=300)


def test_a_failure_limit_above_1_repeats_a_step_before_a_rollback():
    cluster = ModelCluster(service(OLD), start_ticks=2, requests=BUSY, slow={NEW: 1.4})
    cluster.settle()
    wanted = service(NEW)
    wanted["spec"]["accuracy"]["failureLimit"] = 2
    cluster.edit(wanted)
    status = cluster.until(lambda s: stage("Shifting")(s) and s.canary.failures == 1)
    assert status.canary.step_time == cluster.now
    cluster.until(stage("RollingBack"))
    assert cluster.parsed().canary.failures == 2


def test_if_pods_cannot_give_any_share_the_probes_alone_decide():
    cluster = on_trial(1, steps=[{"weightPercent": 5}])
    status = cluster.until(ended)
    assert (status.last_trial.verdict, status.last_trial.traffic_mode) == ("Passed", "ProbeOnly")


def test_a_canary_that_replaces_a_drifted_dtype_is_probed_and_skips_the_steps():
    cluster = on_trial(cluster={"slow": {OLD: 1.4}})
    cluster.until(ended)
    spec = cluster.obj["spec"]
    drifted = {
        "dtype": NEW,
        "model": spec["model"]["source"],
        "image": spec["engine"]["image"],
        "gpu": "cpu",
        "reason": "AccuracyDrifted",
        "message": "3 failed runs in a row",
        "until": "2027-01-01T00:00:00Z",
    }
    cluster.status = {**cluster.status, "kvCache": {**cluster.status["kvCache"], "denied": [drifted]}}
    stages = set()
    while parse_status(cluster.status).kv_cache.active_dtype != OLD:
        cluster.tick()
        stages |= {c.stage for c in [parse_status(cluster.status).canary] if c is not None}
        assert len(stages) < 6
    assert stages == {"Starting", "Probing", "Promoting"}
    last = parse_status(cluster.status).last_trial
    assert last is not None
    assert (last.traffic_mode, last.verdict) == ("ProbeOnly", "Passed")


def test_a_canary_beside_a_stable_revision_that_is_down_is_not_compared():
    cluster = on_trial()
    cluster.until(lambda s: s.canary is not None and s.canary.verdict == "Passed")
    old = revision_of(cluster.obj, OLD)
    began = cluster.now
    while stage("Probing")(parse_status(cluster.status)):
        cluster.scale(old, 0)
        cluster.tick()
    assert parse_status(cluster.status).canary.stage == "Promoting"
    assert cluster.now - began >= timedelta(seconds=60)


def test_a_canary_waits_for_a_stable_revision_that_is_down_for_a_moment():
    cluster = on_trial()
    cluster.until(lambda s: s.canary is not None and s.canary.verdict == "Passed")
    cluster.starts = False
    cluster.tick()
    assert parse_status(cluster.status).canary.stage == "Probing"
    cluster.starts = True
    cluster.until(stage("Shifting"))


# --- the route -----------------------------------------------------------------------------------------------------


def test_a_route_has_each_steps_weight_and_is_restored_afterwards():
    cluster = on_trial(1, cluster={"rules": ROUTE}, routeRef={"name": "web"})
    cluster.watch = at_every_moment
    cluster.until(lambda s: stage("Shifting", 0)(s) and s.canary.step_time is not None)
    assert {r["name"]: r["weight"] for r in cluster.rules[0]["backendRefs"]} == {"chat": 75, "chat-canary": 25}
    cluster.until(lambda s: stage("Shifting", 1)(s) and s.canary.step_time is not None)
    assert {r["name"]: r["weight"] for r in cluster.rules[0]["backendRefs"]} == {"chat": 50, "chat-canary": 50}
    assert cluster.until(ended).last_trial.traffic_mode == "HTTPRoute"
    cluster.settle()
    assert cluster.rules == ROUTE
    assert "chat-canary" not in cluster.services


MIRRORED = [{"weightPercent": 0, "holdSeconds": 90}, *STEPS]


def test_a_canary_gets_copies_of_live_requests_before_any_user_depends_on_it():
    cluster = on_trial(2, cluster={"rules": ROUTE}, routeRef={"name": "web"}, steps=MIRRORED)
    cluster.watch = at_every_moment
    status = cluster.until(lambda s: stage("Shifting", 0)(s) and s.canary.step_time is not None)
    assert cluster.mirrored() == {status.canary.revision: 0.5}
    assert status.canary.revision not in cluster.shares()
    assert "0% of the traffic and copies of 50%" in status.canary.message
    cluster.until(lambda s: stage("Shifting", 1)(s) and s.canary.step_time is not None)
    assert cluster.mirrored() == {}
    assert cluster.until(ended).last_trial.verdict == "Passed"
    cluster.settle()
    assert cluster.rules == ROUTE


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"slow": {NEW: 1.6}}, "PerformanceRegressed"), ({"failing": {NEW: 0.3}}, "ErrorsIncreased")],
)
def test_a_canary_that_fails_with_copied_requests_gets_no_users(fault, reason):
    cluster = on_trial(2, cluster={"rules": ROUTE, **fault}, routeRef={"name": "web"}, steps=MIRRORED)

    def users_are_spared(one):
        at_every_moment(one)
        assert set(one.shares()) <= {one.parsed().stable.revision}

    cluster.watch = users_are_spared
    assert cluster.until(ended).last_trial.reason == reason
    cluster.settle()
    assert cluster.rules == ROUTE


def test_no_canary_starts_while_its_route_does_not_exist():
    cluster = on_trial(routeRef={"name": "web"})
    status = cluster.settle()
    assert status.last_trial is None
    stalled = status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "RouteUnusable")
    assert "HTTPRoute web" in stalled.message
    assert [d.reason for d in status.decisions].count("RouteUnusable") == 1
    cluster.edit_route(ROUTE)
    assert cluster.settle().kv_cache.active_dtype == NEW


def test_a_change_of_the_spec_that_cannot_start_is_reported_once_during_memory_pressure():
    asked = {
        "kvCache": {"mode": "Auto", "ladder": ["k8v4", "k4v4"], "pressure": {"sustainedSeconds": 30}},
        "canary": {"steps": STEPS, "routeRef": {"name": "web"}},
        "scaling": {"maxReplicas": 1},
    }
    cluster = ModelCluster(manifest(**asked), demand=9000)
    cluster.settle(60)
    cluster.edit(manifest(**asked, engine={"image": "kvpilot/runtime:2"}))
    status = cluster.settle(60)
    assert status.condition("MemoryPressured").status == "True"
    assert status.condition("Stalled").reason == "RouteUnusable"
    assert "HTTPRoute web" in status.condition("Stalled").message
    assert [d.reason for d in status.decisions].count("RouteUnusable") == 1
    before = cluster.writes
    cluster.tick()
    assert cluster.writes == before


def test_a_route_that_vanishes_during_a_step_stops_the_canary_there():
    cluster = on_trial(cluster={"rules": ROUTE}, routeRef={"name": "web"})
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    cluster.edit_route(None)
    status = cluster.until(ended)
    assert status.last_trial.verdict != "Passed"
    assert status.kv_cache.active_dtype == OLD


def test_a_users_edit_of_the_route_is_kept_through_the_trial():
    cluster = on_trial(cluster={"rules": ROUTE}, routeRef={"name": "web"})
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    cluster.edit_route([{**cluster.rules[0], "timeouts": {"request": "5s"}}])
    cluster.until(ended)
    assert cluster.rules == [{**ROUTE[0], "timeouts": {"request": "5s"}}]


def test_a_canary_that_stops_answering_gets_no_weight():
    cluster = on_trial(cluster={"rules": ROUTE}, routeRef={"name": "web"})
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    cluster.starts = False
    cluster.tick()
    cluster.tick()
    assert cluster.rules == ROUTE
