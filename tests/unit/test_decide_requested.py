"""A person's requests about one trial (annotation kvpilot.io/canary) in a model cluster."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.state.status import Status
from kvpilot_operator.times import utc
from support.model_cluster import ModelCluster
from support.services import manifest
from support.trials import NEW, OLD, at_every_moment, ended, on_trial, service, stage

HOUR = timedelta(hours=1)


def ask(cluster: ModelCluster, verb: str) -> None:
    """Annotate the service as `kubectl kvpilot` does."""
    status = cluster.parsed()
    canary, last = status.canary, status.last_trial
    if canary is not None:
        cluster.request = f"{verb}@{canary.revision}/{utc(canary.started_time)}"
    else:
        assert last is not None
        cluster.request = f"{verb}@{last.revision}/{utc(last.time)}"


def reasons(status: Status) -> list[str]:
    return [one.reason for one in status.decisions]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("where", ["Starting", "Probing", "Shifting", "Promoting"])
def test_abort_ends_a_canary_in_any_stage_without_a_denial(where: str, paused: bool) -> None:
    cluster = on_trial()
    cluster.watch = at_every_moment
    cluster.until(stage(where))
    cluster.edit(service(NEW, paused=paused))
    ask(cluster, "abort")
    status = cluster.until(ended)
    assert (status.last_trial.verdict, status.last_trial.reason) == ("Inconclusive", "RolledBack")
    assert status.kv_cache.denied == ()
    assert status.stable.dtype == OLD
    ends = [one.message for one in status.decisions if one.action == "RollBack"]
    assert ends == [f"ended by annotation kvpilot.io/canary ({cluster.request}); {OLD} keeps serving"]


def test_an_aborted_revision_waits_and_then_the_same_annotation_does_nothing() -> None:
    cluster = on_trial()
    cluster.until(stage("Probing"))
    ask(cluster, "abort")
    first = cluster.until(ended)
    stalled = first.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "RevisionFailed")
    assert "kubectl kvpilot retry" in stalled.message
    status = cluster.until(lambda s: s.canary is not None, 800)
    assert cluster.now - first.last_trial.time >= HOUR
    assert status.canary.started_time > first.last_trial.time
    # A GitOps tool applies the annotation of the first trial again and again.
    assert cluster.until(ended).last_trial.verdict == "Passed"
    assert reasons(cluster.parsed()).count("RolledBack") == 1


def test_deny_ends_a_canary_and_denies_its_dtype() -> None:
    cluster = on_trial()
    cluster.until(stage("Probing"))
    ask(cluster, "deny")
    status = cluster.until(ended)
    assert [(one.dtype, one.reason) for one in status.kv_cache.denied] == [(NEW, "RolledBack")]


def test_promote_skips_hold_times_and_missing_requests() -> None:
    cluster = on_trial(cluster={"requests": 1.0}, steps=[{"weightPercent": 50, "holdSeconds": 86_400}])
    cluster.watch = at_every_moment
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.step_time is not None)
    ask(cluster, "promote")
    status = cluster.until(ended)
    assert status.last_trial.verdict == "Passed"
    promoted = next(one for one in status.decisions if one.action == "Promote")
    assert f"at once (annotation {cluster.request})" in promoted.message


def test_promote_never_skips_the_probes() -> None:
    cluster = on_trial(cluster={"bad": frozenset({NEW})})
    cluster.until(stage("Starting"))
    ask(cluster, "promote")
    status = cluster.until(ended)
    assert (status.last_trial.verdict, status.last_trial.reason) == ("Failed", "AccuracyRegressed")


def test_promote_before_the_probes_waits_for_them_and_then_skips_the_steps() -> None:
    cluster = on_trial()
    cluster.until(stage("Starting"))
    ask(cluster, "promote")
    seen: set[str] = set()
    while not ended(cluster.parsed()):
        cluster.tick()
        canary = cluster.parsed().canary
        seen |= {canary.stage} if canary is not None else set()
    assert seen == {"Starting", "Probing", "Promoting"}
    assert "CanaryPassed" in reasons(cluster.parsed())


def test_promote_does_not_promote_a_canary_that_failed_a_traffic_step() -> None:
    cluster = on_trial(cluster={"slow": {NEW: 1.4}})
    asked = service(NEW)
    asked["spec"]["accuracy"]["failureLimit"] = 2
    cluster.edit(asked)
    cluster.until(lambda s: stage("Shifting")(s) and s.canary.failures == 1)
    ask(cluster, "promote")
    assert cluster.until(ended).last_trial.verdict == "Failed"


def test_promote_of_a_paused_canary_waits_for_the_end_of_the_pause() -> None:
    cluster = on_trial()
    cluster.until(stage("Shifting"))
    cluster.edit(service(NEW, paused=True))
    ask(cluster, "promote")
    for _ in range(30):
        cluster.tick()
    assert cluster.parsed().canary.stage == "Shifting"
    cluster.edit(service(NEW))
    assert cluster.until(ended).last_trial.verdict == "Passed"


def aborted() -> ModelCluster:
    cluster = on_trial()
    cluster.until(stage("Probing"))
    ask(cluster, "abort")
    cluster.until(ended)
    return cluster


def garbled() -> ModelCluster:
    cluster = on_trial(cluster={"bad": frozenset({NEW})})
    cluster.until(ended)
    cluster.bad = frozenset()
    return cluster


@pytest.mark.parametrize("make", [aborted, garbled])
def test_retry_lifts_the_wait_and_the_denial_of_the_last_trial_once(make: Callable[[], ModelCluster]) -> None:
    cluster = make()
    ask(cluster, "retry")
    began = cluster.now
    cluster.until(lambda s: s.canary is not None)
    assert cluster.now - began < timedelta(minutes=1)
    status = cluster.until(ended)
    assert (status.last_trial.verdict, status.kv_cache.denied) == ("Passed", ())
    assert reasons(status).count("RetryAllowed") == 1


def test_an_unreadable_request_is_reported_once_with_the_remedy() -> None:
    cluster = on_trial()
    cluster.request = "abort@3740aaaa"
    status = cluster.until(ended)
    told = [one.message for one in status.decisions if one.reason == "RequestUnreadable"]
    assert status.last_trial.verdict == "Passed"
    assert all("'abort@3740aaaa'" in one and "VERB@REVISION/TIME" in one for one in told)
    assert told


def test_the_cache_accepts_any_value_of_the_annotation() -> None:
    told: list[ServiceKey] = []
    cache = InformerCache(None, ())  # type: ignore[arg-type]  # nothing is watched
    cache.on_change = told.append
    obj = manifest()
    for version, value in ((1, None), (2, "abort@3740aaaa/2026-11-27T12:00:00Z"), (3, "x" * 250_000)):
        annotations = {} if value is None else {"kvpilot.io/canary": value}
        about = {**obj["metadata"], "resourceVersion": str(version), "annotations": annotations}
        cache.wrote("QuantizedLLMService", about["namespace"], about["name"], {**obj, "metadata": about})
        assert cache.services.get(about["namespace"], about["name"]).canary_annotation == (value or "")[:100]
    assert len(told) == 3
