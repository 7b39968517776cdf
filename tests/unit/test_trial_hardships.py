"""Disturbances in every stage of a trial: a new leader, an evicted pod, or a clock that jumps.

Every limit holds after each single write, and the trial has the same end as without the disturbance.
"""

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.state.status import Status
from support.model_cluster import ModelCluster
from support.trials import NEW, ROUTE, at_every_moment, end_of, ended, on_trial

STORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "promoted by ratio": ({}, {}),
    "promoted by route": ({"rules": ROUTE}, {"routeRef": {"name": "web"}}),
    "promoted without steps": ({}, {"steps": []}),
    "promoted in the place of one": ({"places": 3, "drain_ticks": 1}, {"capacityPolicy": "ReplaceOne", "steps": []}),
    "rolled back for its answers": ({"bad": frozenset([NEW])}, {}),
    "rolled back for its latency": ({"slow": {NEW: 1.6}}, {}),
    "rolled back from a route": ({"rules": ROUTE, "slow": {NEW: 1.6}}, {"routeRef": {"name": "web"}}),
}
STAGES = ("Starting", "Probing", "Shifting", "Promoting", "RollingBack")
HOUR = timedelta(hours=1)


def story(name: str) -> ModelCluster:
    cluster, spec = STORIES[name]
    made = on_trial(3, cluster=dict(cluster), **spec)
    made.watch = at_every_moment
    return made


def stage_of(status: Status) -> str:
    return status.canary.stage if status.canary is not None else ""


def end(cluster: ModelCluster, ticks: int = 600) -> tuple[Any, ...]:
    if not ended(cluster.parsed()):
        cluster.until(ended, ticks)
    status = cluster.settle(600)
    return (
        end_of(status),
        status.last_trial.verdict,
        status.kv_cache.active_dtype,
        sorted(cluster.deployments.values()),
        cluster.services,
        cluster.rules,
        [d.dtype for d in status.kv_cache.denied],
        status.condition("Serving").status,
    )


@cache
def undisturbed(name: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return the end of the undisturbed trial, and its stages."""
    cluster = story(name)
    seen: dict[str, None] = {}
    while not ended(cluster.parsed()):
        cluster.tick()
        seen[stage_of(cluster.parsed())] = None
    return end(cluster), tuple(stage for stage in STAGES if stage in seen)


def test_the_simulated_trials_pass_through_every_stage():
    assert {stage for name in STORIES for stage in undisturbed(name)[1]} == set(STAGES)


@pytest.mark.parametrize("name", STORIES)
@given(
    changes=st.lists(st.tuples(st.sampled_from(STAGES), st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=4)
)
@settings(max_examples=4, deadline=None)
def test_a_new_leader_in_any_stage_and_between_any_two_writes_ends_the_trial_the_same(name, changes):
    cluster = story(name)
    in_stage: dict[str, int] = {}
    while not ended(cluster.parsed()):
        stage = stage_of(cluster.parsed())
        nth = in_stage.get(stage, 0)
        cut = next((writes for where, when, writes in changes if (where, when) == (stage, nth)), None)
        in_stage[stage] = nth + 1
        assert nth < 400, stage
        cluster.tick(cut_after=cut)
        if cut is not None:
            cluster.probe, cluster.samples = None, {}  # the complete in-memory state of a leader
    assert end(cluster) == undisturbed(name)[0]


@pytest.mark.parametrize("name", STORIES)
@given(evictions=st.lists(st.tuples(st.sampled_from(STAGES), st.integers(0, 8), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=4, deadline=None)
def test_pods_that_are_evicted_in_any_stage_are_replaced_and_the_trial_ends_the_same(name, evictions):
    cluster = story(name)
    cluster.watch = lambda _: None  # the operator does not control evictions, and an eviction may remove any pod
    in_stage: dict[str, int] = {}
    while not ended(cluster.parsed()):
        status = cluster.parsed()
        stage = stage_of(status)
        nth = in_stage.get(stage, 0)
        for where, when, canarys in evictions:
            if (where, when) == (stage, nth):
                cluster.engines.evict((status.canary if canarys else status.stable).revision)
        in_stage[stage] = nth + 1
        assert nth < 400, stage
        cluster.tick()
        last = cluster.parsed().accuracy.last
        assert last is None or last.verdict != "Passed" or NEW not in cluster.bad
    assert end(cluster) == undisturbed(name)[0]


@pytest.mark.parametrize("name", STORIES)
@given(where=st.sampled_from(STAGES), nth=st.integers(0, 8), hours=st.sampled_from([-1, 1]), back=st.booleans())
@settings(max_examples=4, deadline=None)
def test_a_trial_keeps_its_limits_and_ends_although_the_clock_jumps_by_an_hour(name, where, nth, hours, back):
    cluster = story(name)
    seen = 0
    for _ in range(1500):
        status = cluster.parsed()
        if ended(status):
            break
        if stage_of(status) == where:
            if seen == nth:
                cluster.now += hours * HOUR
            if seen == nth + 3 and back:
                cluster.now -= hours * HOUR
            seen += 1
        cluster.tick()
    outcome = end(cluster)
    promoted, expected = outcome[0] == "Promoted", undisturbed(name)[0]
    # The clock jumped forward by an hour, so a deadline may end the trial. Rejected figures never lead to a promotion.
    assert promoted is False or expected[0] == "Promoted"
    assert outcome[2] == (NEW if promoted else "auto")
    assert outcome[-1] == "True"
