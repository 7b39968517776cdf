"""Sources of a canary's GPU in a model cluster: a spare GPU, a replaced replica, a changed replica count."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import KEY, revision_of
from support.trials import BUSY, NEW, OLD, at_every_moment, end_of, ended, on_trial, service, stage


def test_without_a_spare_gpu_the_canary_replaces_a_replica_after_a_minute():
    cluster = on_trial(cluster={"places": 3}, capacityPolicy="SurgeOrReplaceOne")
    cluster.watch = at_every_moment
    began = cluster.now
    status = cluster.until(lambda s: s.canary is not None and s.canary.replaces_one)
    assert cluster.now - began >= timedelta(seconds=60)
    assert any(d.reason == "NoSpareCapacity" for d in status.decisions)
    assert cluster.until(ended, 600).last_trial.verdict == "Passed"


def test_if_no_replica_may_be_removed_the_canary_waits_until_the_deadline():
    cluster = on_trial(cluster={"places": 3}, capacityPolicy="SurgeOrReplaceOne", max_unavailable=0)
    status = cluster.until(lambda s: s.canary is not None and "maxUnavailable" in s.canary.message)
    assert not status.canary.replaces_one
    status = cluster.until(ended)
    assert (status.last_trial.reason, status.last_trial.verdict) == ("ProgressDeadlineExceeded", "Error")


class WithoutVolume(ModelCluster):
    """Model cluster whose unscheduled pods also lack a volume, which the scheduler reports first."""

    def _pods(self):
        words = "pod has unbound immediate PersistentVolumeClaims"
        return [replace(view, unschedulable=view.unschedulable and words) for view in super()._pods()]


def test_no_replica_is_removed_for_a_canary_whose_claim_has_no_volume():
    asked = {"capacityPolicy": "SurgeOrReplaceOne"}
    cluster = WithoutVolume(service(OLD, 3, **asked), start_ticks=2, requests=BUSY, places=3)
    cluster.settle()
    cluster.edit(service(NEW, 3, **asked))
    began = cluster.now
    while not ended(status := parse_status(cluster.status)):
        assert status.canary is None or not status.canary.replaces_one
        cluster.tick()
    assert cluster.now - began >= timedelta(seconds=120)
    assert status.last_trial.reason == "ProgressDeadlineExceeded"
    assert "unbound immediate" in status.last_trial.message


def test_with_capacity_policy_surge_the_canary_waits_for_a_spare_gpu():
    cluster = on_trial(cluster={"places": 3}, capacityPolicy="Surge")
    for _ in range(40):
        cluster.tick()
    status = parse_status(cluster.status)
    assert status.canary.stage == "Starting"
    assert not status.canary.replaces_one
    cluster.places = 4
    assert cluster.until(ended).last_trial.verdict == "Passed"


def test_the_cause_of_a_missing_canary_pod_is_reported_while_it_waits():
    cluster = on_trial(cluster={"places": 3}, capacityPolicy="Surge")
    cluster.until(stage("Starting"))
    for _ in range(5):
        cluster.tick()
    for kind in ("Reconciling", "CanaryHealthy"):
        assert parse_status(cluster.status).condition(kind).message.endswith("; it waits: 0/1 nodes have a free GPU")
    cluster.places = 4
    status = cluster.until(stage("Probing"))
    assert not any("it waits" in status.condition(kind).message for kind in ("Reconciling", "CanaryHealthy"))


def test_with_replace_one_a_trial_never_requests_an_additional_pod():
    cluster = on_trial(cluster={"places": 3}, capacityPolicy="ReplaceOne")
    most = 0
    while not ended(parse_status(cluster.status)):
        cluster.tick()
        most = max(most, sum(count for _, count in cluster.deployments.values()))
    assert most == 3
    assert parse_status(cluster.status).last_trial.verdict == "Passed"


def test_replace_one_with_the_last_replica_is_reported_and_starts_nothing():
    cluster = on_trial(1, capacityPolicy="ReplaceOne")
    status = cluster.settle()
    assert status.last_trial is None
    stalled = status.condition("Stalled")
    assert stalled is not None
    assert stalled.reason == "Unschedulable"
    assert "maxUnavailable 1 permits no replacement" in stalled.message


def test_a_single_replica_may_be_replaced_if_all_may_be_unavailable():
    cluster = on_trial(1, cluster={"places": 1}, capacityPolicy="ReplaceOne", max_unavailable="100%")
    assert cluster.until(ended).last_trial.verdict == "Passed"


def test_with_when_idle_a_single_replica_is_replaced_only_after_a_time_without_requests():
    cluster = on_trial(1, cluster={"places": 1}, capacityPolicy="WhenIdle")
    for _ in range(100):
        cluster.tick()
        assert cluster.parsed().canary is None
    told = {one.type: (one.status, one.reason) for one in cluster.parsed().conditions}
    assert (told["Reconciling"], told["Stalled"]) == (("True", "Busy"), ("False", "Reconciling"))
    assert cluster.answering() == 1
    cluster.requests, quiet = 0.0, cluster.now
    cluster.watch = in_place
    started = cluster.until(stage("Starting")).canary.started_time
    assert 300 <= (started - quiet).total_seconds() < 330
    assert cluster.until(ended).last_trial.verdict == "Passed"
    cluster.settle()
    assert list(cluster.deployments.values()) == [(NEW, 1)]


def test_with_when_idle_a_busy_service_is_stalled_after_the_deadline():
    cluster = on_trial(1, cluster={"places": 1}, capacityPolicy="WhenIdle", progressDeadlineSeconds=600)

    def standing():
        told = {one.type: one for one in cluster.parsed().conditions}
        return (told["Reconciling"].status, told["Stalled"].status, told["Stalled"].reason)

    began = cluster.now
    cluster.until(lambda _: standing() == ("False", "True", "Busy"))
    assert (cluster.now - began).total_seconds() >= 600
    cluster.tick()
    assert standing() == ("False", "True", "Busy")
    cluster.requests = 0.0
    assert cluster.until(ended).last_trial.verdict == "Passed"
    cluster.settle()
    assert list(cluster.deployments.values()) == [(NEW, 1)]


def test_with_when_idle_a_canary_with_wrong_answers_gives_the_place_back_to_a_replica():
    cluster = on_trial(1, cluster={"places": 1, "bad": frozenset([NEW])}, capacityPolicy="WhenIdle")
    cluster.requests, cluster.watch = 0.0, in_place
    assert cluster.until(ended).last_trial.reason == "AccuracyRegressed"
    cluster.settle()
    assert list(cluster.deployments.values()) == [(OLD, 1)]
    assert cluster.answering() == 1


def in_place(cluster):
    """Check that the operator never requests a second pod, and that no canary gets traffic before its probes passed."""
    status = cluster.parsed()
    assert sum(count for _, count in cluster.deployments.values()) <= 1
    if status.canary is not None and status.canary.stage in ("Starting", "Probing", "RollingBack"):
        assert status.canary.revision not in cluster.shares()


def test_the_borrowed_replica_and_the_canary_use_the_gpu_of_one_replica_in_turn():
    cluster = ModelCluster(service("k4v4", 2), start_ticks=2, requests=BUSY, places=2)
    cluster.settle()
    cluster.edit(service("k8v4", 2, capacityPolicy="ReplaceOne"))
    cluster.watch = at_every_moment
    status = cluster.until(ended, 600)
    assert status.last_trial.verdict == "Passed"
    assert status.accuracy.baseline is not None


@pytest.mark.parametrize("where", ["Probing", "Promoting"])
def test_a_trial_ends_with_an_additional_pod_if_no_replica_may_be_removed_any_more(where):
    cluster = on_trial(2, capacityPolicy="ReplaceOne", steps=[])
    cluster.until(stage(where))
    answered = cluster.answering()
    cluster.edit(service(NEW, 2, capacityPolicy="ReplaceOne", max_unavailable=0, steps=[]))
    while not ended(parse_status(cluster.status)):
        cluster.tick()
        assert cluster.answering() >= answered
        # One more pod answers until the newest pod has been ready for 10 seconds.
        answered = min(2, cluster.answering())
    assert cluster.status["history"][0]["verdict"] == "Passed"


def test_a_service_that_is_scaled_during_a_trial_keeps_its_limits():
    cluster = on_trial(4)
    cluster.until(stage("Shifting"))
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": 2}})
    for _ in range(3):
        cluster.tick()
    cluster.watch = at_every_moment
    assert cluster.until(ended).last_trial.verdict == "Passed"
    assert list(cluster.deployments.values()) == [(NEW, 2)]


@pytest.mark.parametrize("slow", [False, True])
def test_a_new_image_goes_through_the_same_steps_beside_a_revision_that_the_spec_no_longer_renders(slow):
    cluster = ModelCluster(service(OLD), start_ticks=2, requests=BUSY)
    cluster.settle()
    before = dict(cluster.deployments)
    wanted = service(OLD)
    wanted["spec"]["engine"]["image"] = "kvpilot/runtime:2"
    cluster.edit(wanted)
    cluster.watch = at_every_moment
    cluster.until(stage("Shifting", 1))
    cluster.slow_revisions = frozenset({revision_of(wanted, OLD)}) if slow else frozenset()
    status = cluster.until(ended)
    cluster.settle()
    assert end_of(status) == ("RolledBack" if slow else "Promoted")
    assert status.kv_cache.denied == ()
    assert (cluster.deployments == before) is slow
    assert [count for _, count in cluster.deployments.values()] == [3]


def test_a_traffic_step_lost_by_a_scale_down_does_not_lead_to_a_promotion():
    cluster = on_trial(2, cluster={"requests": 1.0}, steps=[{"weightPercent": 33}])
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    cluster.edit(service(NEW, 1, steps=[{"weightPercent": 33}]))
    status = cluster.until(lambda s: s.canary is not None and s.canary.reason == "WithinLimits")
    assert "50%" in status.canary.message
    assert cluster.until(ended, 600).last_trial.verdict != "Passed"


def test_the_disruption_budget_covers_what_the_service_selects():
    cluster = on_trial(3)
    while not ended(parse_status(cluster.status)):
        cluster.tick()
        assert cluster.budget["selector"]["matchLabels"] == cluster.services[KEY.name]
        assert cluster.budget["maxUnavailable"] == 1


def test_a_canary_with_a_missing_secret_reports_it_while_it_waits_and_at_its_end():
    cluster = on_trial(2)
    cluster.start_ticks = 1000
    pods, waits = cluster._pods, {"waiting_reason": "ContainerCreating", "needs": ("Secret certificates",)}
    cluster._pods = lambda: [one if one.ready else replace(one, **waits) for one in pods()]
    cluster.until(stage("Starting"))
    cluster.tick()
    status = cluster.parsed()
    for kind in ("Reconciling", "CanaryHealthy"):
        assert "It needs Secret certificates." in status.condition(kind).message
    ended_with = cluster.until(ended)
    assert ended_with.last_trial.reason == "ProgressDeadlineExceeded"
    assert "It needs Secret certificates." in ended_with.last_trial.message
