"""Which pods are on trial, and what keeps them from coming?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from kvpilot_operator.api.words import Reason, Stage
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.diagnosis import not_started, pending_reason, waits_for_volume
from kvpilot_operator.decide.rejections import finding, of_workload, rejected
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import ON_ITS_WAY, PodView

# With SurgeOrReplaceOne a canary without a node gives up on spare capacity after this long.
SURGE_SECONDS = 60
# An engine that answers is scraped within seconds.
TOLD_SECONDS = 60


def pods_on_trial(c: Context) -> Sequence[PodView]:
    """The canary's pods and, before its verdict, those that are borrowed for its baseline."""
    canary = in_flight(c)
    pods = c.snapshot.pods_of(canary.revision)
    borrows = canary.stage in (Stage.STARTING, Stage.PROBING) and c.reference not in c.sides
    return (*pods, *c.snapshot.pods_of(c.reference)) if borrows else pods


def unschedulable(c: Context) -> str | None:
    """Why a pod on trial has no node for so long that the policy lets it take the place of a replica."""
    canary = in_flight(c)
    if c.spec.canary.capacity_policy != "SurgeOrReplaceOne" or canary.replaces_one or c.replicas == 0:
        return None
    if c.now < canary.stage_time + timedelta(seconds=SURGE_SECONDS):
        return None
    pods = (one for pod in pods_on_trial(c) for one in pod.group)
    return next((pod.unschedulable for pod in pods if pod.unschedulable and not waits_for_volume(pod)), None)


def held_up_by(c: Context) -> Cause | None:
    """Return the cause that keeps pods on trial from coming and will not pass in a moment; None for none."""
    cause = pending_reason([pod for pod in pods_on_trial(c) if not pod.answers])
    return cause if cause is not None and cause.reason not in ON_ITS_WAY else None


def why_waiting(c: Context) -> str:
    """What keeps the pods on trial from coming, after a colon; empty where nothing is known to."""
    refused = of_workload(c.snapshot, in_flight(c).revision, rejected(c.snapshot))
    if refused:
        return f": {finding(refused).message}"
    unread = _dtype_not_told(c)
    if unread:
        return f": {unread}"
    pods = [one for pod in pods_on_trial(c) if not pod.answers for one in pod.group]
    return next((f": {reason}" for reason in map(_held_back, pods) if reason), "")


def _dtype_not_told(c: Context) -> str:
    """Say that the canary is not probed because its page of metrics has not told its dtype for a while."""
    canary, s = in_flight(c), c.snapshot
    waits = canary.stage == Stage.PROBING and c.now >= canary.stage_time + timedelta(seconds=TOLD_SECONDS)
    if not waits or not s.answering_pods(canary.revision) or s.reported_dtype(canary.revision) is not None:
        return ""
    return "its engine has not told its dtype (vllm:cache_config_info on /metrics), and is not probed before"


def _held_back(pod: PodView) -> str:
    """An image and containers take their time; a volume of something that is missing takes all of it."""
    cause = pending_reason([pod])
    if cause is not None and cause.reason == Reason.CONFIG_MISSING:
        return cause.message
    known = pod.unschedulable or ": ".join(pod.held_up or ()) or pod.waiting_reason or ""
    return (not_started(pod) if pod.needs else "") if known in ON_ITS_WAY else known
