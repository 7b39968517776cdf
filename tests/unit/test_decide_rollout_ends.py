"""Trials in a model cluster that the user pauses or changes, or during which the operator is killed."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.rollout import shifting
from kvpilot_operator.state.status import parse_status
from support.trials import BUSY, NEW, OLD, ROUTE, at_every_moment, ended, on_trial, service, stage


@pytest.mark.parametrize("where", ["Starting", "Probing", "Shifting", "Promoting"])
def test_a_paused_trial_is_neither_promoted_nor_rolled_back_and_continues_later(where):
    cluster = on_trial()
    cluster.until(stage(where))
    cluster.edit(service(NEW, paused=True))
    cluster.tick()
    before = parse_status(cluster.status).canary
    for _ in range(300):
        cluster.tick()
    after = parse_status(cluster.status).canary
    assert after is not None
    assert after.stage == before.stage
    cluster.edit(service(NEW))
    assert cluster.until(ended).last_trial.verdict == "Passed"


def test_a_failed_probe_during_a_pause_is_recorded_once_and_acted_on_later():
    cluster = on_trial(cluster={"bad": frozenset({NEW})})
    cluster.until(stage("Probing"))
    cluster.edit(service(NEW, paused=True))
    cluster.until(lambda s: s.canary is not None and s.canary.verdict == "Failed")
    for _ in range(20):
        cluster.tick()
    status = parse_status(cluster.status)
    assert (status.canary.stage, status.canary.failures) == ("Probing", 1)
    assert status.kv_cache.denied == ()
    cluster.edit(service(NEW))
    status = cluster.until(ended)
    assert status.last_trial.reason == "AccuracyRegressed"
    assert [d.dtype for d in status.kv_cache.denied] == [NEW]


def test_a_change_of_the_spec_during_a_promotion_rolls_back_replica_by_replica():
    cluster = on_trial(3)
    cluster.watch = at_every_moment
    cluster.until(lambda s: stage("Promoting")(s) and (s.canary.weight_percent or 0) > 50)
    cluster.edit(service(OLD, 3))
    status = cluster.until(ended)
    assert [one.reason for one in status.history] == ["Superseded"]
    cluster.settle()
    assert list(cluster.deployments.values()) == [(OLD, 3)]


@pytest.mark.parametrize("replicas", [1, 3])
def test_old_pods_go_only_after_the_newest_pod_has_been_ready_for_the_settle_time(replicas):
    cluster = on_trial(replicas, steps=[])
    before, went = Promotion(cluster), 0
    while not ended(cluster.parsed()):
        cluster.tick()
        now = Promotion(cluster)
        if now.promoting and now.ready > before.ready:
            since = cluster.now
        if before.promoting and (now.old, now.reached) < (before.old, before.reached):
            assert (cluster.now - since).total_seconds() >= traffic.SETTLE_SECONDS
            went += 1
        before = now
    assert went >= replicas


class Promotion:
    """One moment of a promotion: numbers of ready canary pods, of old pods, and of old revisions with requests."""

    def __init__(self, cluster):
        status = cluster.parsed()
        self.promoting = stage("Promoting")(status)
        canary = status.canary.revision if status.canary is not None else ""
        old = [name for name, (dtype, _) in cluster.deployments.items() if dtype == OLD]
        self.ready = cluster.engines.ready(canary)
        self.old = sum(cluster.deployments[name][1] for name in old)
        self.reached = sum(cluster.shares().get(name, 0.0) > 0 for name in old)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_spec_reverted_during_a_promotion_rolls_back_without_restarting_serving_pods(replicas):
    cluster = on_trial(replicas, steps=[])
    cluster.watch = at_every_moment
    cluster.until(lambda s: stage("Promoting")(s) and (replicas == 1 or (s.canary.weight_percent or 0) >= 33))
    before = cluster.parsed().stable.revision
    untouched = {one.name for one in cluster.engines.pods if one.revision == before and one.leaves_in is None}
    assert untouched
    cluster.edit(service(OLD, replicas, steps=[]))
    status = cluster.until(ended)
    cluster.settle()
    assert status.stable.revision == before
    assert [one.reason for one in status.history] == ["Superseded"]
    assert status.kv_cache.denied == ()
    assert list(cluster.deployments.values()) == [(OLD, replicas)]
    assert untouched <= cluster.pod_names()


@pytest.mark.parametrize("why", [{"slow": {NEW: 1.6}}, {"failing": {NEW: 0.5}}])
def test_after_a_rollback_the_status_says_why_the_spec_is_not_reached(why):
    cluster = on_trial(2, cluster=why)
    cluster.until(stage("RollingBack"))
    first = cluster.until(ended)
    assert first.last_trial.verdict != "Passed"
    cluster.tick()
    told = [{one.type: (one.status, one.reason) for one in status.conditions} for status in (first, cluster.parsed())]
    assert told[0]["Stalled"] == told[1]["Stalled"] == ("True", "RevisionFailed")
    assert told[0]["Ready"] == told[1]["Ready"]


def test_all_judgements_of_a_step_together_err_with_less_than_alpha():
    spent = sum(shifting.ALPHA / 2 ** (n + 1) for n in range(20))
    assert spent < shifting.ALPHA


STORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ratio": ({}, {}),
    "slow": ({"slow": {NEW: 1.4}}, {}),
    "route": ({"rules": ROUTE}, {"routeRef": {"name": "web"}}),
    "slow by route": ({"rules": ROUTE, "slow": {NEW: 1.4}}, {"routeRef": {"name": "web"}}),
    "no spare": ({"places": 3, "drain_ticks": 2}, {"capacityPolicy": "SurgeOrReplaceOne"}),
    "replace": ({"places": 3, "drain_ticks": 1}, {"capacityPolicy": "ReplaceOne", "steps": []}),
}


def end_of(name: str, cuts: dict[int, int]) -> tuple[Any, ...]:
    cluster, spec = STORIES[name]
    made = on_trial(3, cluster=cluster, **spec)
    made.watch = at_every_moment
    for tick in range(60):
        made.tick(cut_after=cuts.get(tick))
    status = made.settle(400)
    return (
        status.kv_cache.active_dtype,
        sorted(made.deployments.values()),
        made.services,
        made.rules,
        [d.dtype for d in status.kv_cache.denied],
        status.canary,
        [e.verdict for e in status.history],
    )


@cache
def undisturbed(name: str) -> tuple[Any, ...]:
    return end_of(name, {})


@pytest.mark.parametrize("name", STORIES)
@given(cuts=st.dictionaries(st.integers(0, 59), st.integers(0, 6), max_size=15))
@settings(max_examples=4, deadline=None)
def test_a_kill_between_any_two_writes_violates_no_limit_and_does_not_change_the_end(name, cuts):
    assert end_of(name, cuts) == undisturbed(name)


@given(
    slow=st.floats(0.5, 2.0),
    failing=st.floats(0.0, 0.3),
    requests=st.sampled_from([0.0, 2.0, BUSY]),
    flaps=st.sets(st.integers(0, 150), max_size=20),
)
@settings(max_examples=10, deadline=None)
def test_a_promotion_always_follows_steps_that_passed(slow, failing, requests, flaps):
    cluster = on_trial(cluster={"slow": {NEW: slow}, "failing": {NEW: failing}, "requests": requests})
    for tick in range(400):
        cluster.starts = tick not in flaps
        cluster.tick()
        status = parse_status(cluster.status)
        if status.canary is not None and status.canary.stage == "Promoting":
            passed = [d for d in status.decisions if d.reason == "WithinLimits"]
            assert status.canary.verdict == "Passed"
            assert len(passed) == 2
        if ended(status):
            break
    assert slow < 1.2 or status.last_trial is None or status.last_trial.verdict != "Passed"
