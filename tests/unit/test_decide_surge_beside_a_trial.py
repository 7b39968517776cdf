"""A surge ends the trial of a smaller dtype, because new replicas come first."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.decide import decide
from kvpilot_operator.state.samples import Flows, Sample
from support.model_cluster import ModelCluster
from support.services import manifest
from support.trials import edit, stage

OBJECTIVES = [{"metric": "TTFT", "percentile": 95, "milliseconds": 5000}]


def on_trial(at, **scaling):
    """Return a model cluster at this stage of a trial, whose smaller dtype was chosen to free memory."""
    scaling = {"mode": "Operator", "maxReplicas": 8, "objectives": OBJECTIVES} | scaling
    spec = {"kvCache": {"mode": "Auto", "ladder": ["k8v4"]}, "scaling": scaling, "replicas": 2}
    cluster = ModelCluster(manifest(**spec), demand=9000, start_ticks=2, requests=20.0)
    for _ in range(400):
        cluster.tick()
        if stage(at)(cluster.parsed()):
            return cluster
    raise AssertionError(f"no trial came to {at}")


def surging(cluster):
    """Return a snapshot of the cluster in which requests pile up in the last minute."""
    seen = cluster.snapshot()
    in_hand = [10.0] * 17 + [80.0, 300.0, 900.0]
    samples = [
        Sample(
            seen.now - timedelta(seconds=15 * back), 2, 0.2, number, 0.0, 6000, "auto",
            Flows(seconds=30.0, finished=150.0, generation_tokens=30_000.0, decode_seconds=300.0),
        )
        for back, number in zip(range(len(in_hand) - 1, -1, -1), in_hand, strict=True)
    ]  # fmt: skip
    return replace(seen, samples={**seen.samples, seen.status.stable.revision: tuple(samples)})


@pytest.mark.parametrize("at", ["Starting", "Probing"])
def test_a_surge_requests_replicas_at_once_and_ends_the_trial_without_a_denial(at):
    cluster = on_trial(at)
    status = decide(surging(cluster)).status
    assert status.scaling.desired_replicas == 6
    assert (status.canary.stage, status.canary.reason) == ("RollingBack", "Superseded")
    assert "the load grows too fast" in status.canary.message
    assert status.kv_cache.denied == ()
    assert [one.reason for one in status.history] == ["Superseded"]


def test_a_trial_without_a_surge_continues():
    cluster = on_trial("Probing")
    status = decide(cluster.snapshot()).status
    assert (status.canary.stage, status.scaling.desired_replicas) == ("Probing", 2)


def test_a_surge_does_not_change_a_trial_that_is_paused_or_takes_traffic():
    cluster = on_trial("Probing")
    edit(cluster, rollout={"paused": True})
    paused = decide(surging(cluster)).status
    assert (paused.canary.stage, paused.scaling.desired_replicas) == ("Probing", 2)
    promoting = decide(surging(on_trial("Promoting"))).status
    assert (promoting.canary.stage, promoting.scaling.desired_replicas) == ("Promoting", 2)


def test_without_objectives_a_trial_continues_under_any_load():
    cluster = on_trial("Probing", objectives=[])
    status = decide(surging(cluster)).status
    assert (status.canary.stage, status.scaling.desired_replicas) == ("Probing", 2)
