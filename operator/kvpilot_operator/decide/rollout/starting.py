"""Start a canary if its preconditions hold, and find the causes that keep its pods from starting."""

from collections.abc import Sequence
from datetime import timedelta

from kvpilot_operator.api.words import Action, Reason, Stage, TrafficMode
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.context import Context, Target, in_flight
from kvpilot_operator.decide.diagnosis import waits_for_volume
from kvpilot_operator.decide.objects import storage
from kvpilot_operator.decide.rejections import finding, of_workload, rejected
from kvpilot_operator.decide.traffic_plan import one_can_leave
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import ON_ITS_WAY, PodView
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import Canary, Stable, clip

# Reason of a target that replaces a dtype whose answers are wrong. Its canary is probed, but skips the traffic steps.
URGENT = Reason.ACCURACY_DRIFTED
IDLE_SECONDS = 300


def start_fault(c: Context, target: Target | None = None) -> Cause | None:
    """Return the cause that keeps a canary for this target (None: any) from starting, or None if it may start."""
    spec, replicas = c.spec, c.replicas
    canary = f"a canary for {target.dtype}" if target is not None else "a canary"
    needed = (Question.POOLS, Question.PROBE_SETS, Question.NODE)
    unread = next((one for one in map(c.snapshot.unread, needed) if one is not None), None)
    if unread is not None:
        return Cause(Reason.RECONCILE_INCOMPLETE, f"no canary starts while facts that it needs are unknown: {unread}")
    broken = c.snapshot.probes.fault
    if broken is not None:
        text = f"{canary} starts once the probe sets can be used: {broken}"
        return Cause(Reason.PROBE_SET_INVALID, text)
    if replicas == 0:
        return Cause(Reason.SCALED_TO_ZERO, f"spec.replicas is 0: {canary} starts once there are replicas again")
    if spec.canary.capacity_policy == "ReplaceOne" and not one_can_leave(spec, replicas):
        return Cause(
            Reason.UNSCHEDULABLE,
            f"with spec.canary.capacityPolicy ReplaceOne a canary replaces one of {replicas} replicas, but "
            f"spec.disruption.maxUnavailable {spec.disruption.max_unavailable} permits no replacement (only 100% "
            "permits replacing the last one); raise the replicas or maxUnavailable, or choose Surge",
        )
    if spec.canary.capacity_policy == "WhenIdle" and not _idle(c):
        text = f"{canary} replaces a replica once no request has come for {IDLE_SECONDS} s (canary.capacityPolicy)"
        return Cause(Reason.BUSY, text)
    unfit = None if baseline.known(c) is not None else baseline.misreported(c)
    if unfit is not None:
        return Cause(unfit.reason, f"{canary} would have no baseline to compare with: {unfit.message}")
    held = None if target is not None and target.reason == URGENT else c.plan.held
    name = c.snapshot.key.name
    pool = c.snapshot.objects.get(("InferencePool", name))
    refused = pool is not None and pool.owned and c.snapshot.rejection("InferencePool", name) is not None
    if held is None and refused:
        # A refused InferencePool cannot be switched to another revision, so no trial could end.
        held = f"no canary starts while the API server refuses InferencePool {name}: the condition Stalled says why"
    return None if held is None else Cause(Reason.ROUTE_UNUSABLE, held)


def _idle(c: Context) -> bool:
    """Return True if no scrape of the last IDLE_SECONDS saw a request, or no serving pod answers."""
    name, since = c.stable.revision if c.stable is not None else "", c.now - timedelta(seconds=IDLE_SECONDS)
    seen = c.snapshot.samples.get(name, ())
    recent = [one for one in seen if one.time > since]
    busy = any(one.running or one.waiting or one.flows.finished or not one.pods or one.unanswered for one in recent)
    return not c.snapshot.answering_pods(name) or (bool(recent) and seen[0].time <= since and not busy)


def turn(c: Context) -> Cause | None:
    """Return the cause if this service must wait for another service of its namespace, else None.

    A change of the installation's engine defaults reaches the services of a namespace one by one.
    """
    stable, target, other = c.stable, c.target, c.snapshot.rolling
    if other is None or stable is None or target.dtype != stable.dtype or target.revision == stable.revision:
        return None
    text = f"waits until {other} has replaced its pods: in a namespace, one service at a time does so"
    return Cause(Reason.SPEC_CHANGED, f"{text} ({target.message})")


def start(c: Context, stable: Stable) -> Context:
    """Begin a trial of the target next to the serving revision."""
    target, sample = c.target, c.snapshot.last_sample(stable.revision)
    canary = Canary(
        revision=target.revision,
        dtype=target.dtype,
        from_dtype=stable.dtype,
        stage=Stage.STARTING,
        started_time=c.now,
        stage_time=c.now,
        generation=c.snapshot.generation,
        reason=target.reason,
        message=clip(target.message),
        stable_capacity_tokens=sample.capacity_tokens // sample.pods if sample is not None else None,
        replaces_one=c.spec.canary.capacity_policy in ("ReplaceOne", "WhenIdle"),
        traffic_mode=TrafficMode.PROBE_ONLY if target.reason == URGENT else None,
    )
    c = c.set(canary=canary).set_scaling(saturations=c.policy.saturations)
    text, more = target.message, target.options
    c = c.record_trial(Action.START_CANARY, target.reason, text, event="CanaryStarted", options=more)
    return c if target.warning is None else c.event("PreflightWarning", target.warning, warning=True)


# With SurgeOrReplaceOne, a canary without a node stops waiting for spare capacity after this time.
SURGE_SECONDS = 60
# Seconds after which the status says that an answering engine has not reported its dtype. A scrape usually delivers it
# within a few seconds.
TOLD_SECONDS = 60
# For these reasons, quote the message of `storage.held_up`. For others, quote the reason in the pod's status.
_IN_WORDS = (Reason.UNSCHEDULABLE, Reason.CLAIM_NOT_BOUND, Reason.CONFIG_MISSING, *ON_ITS_WAY)


def pods_on_trial(c: Context) -> Sequence[PodView]:
    """Return the canary's pods and, until it has passed its probes, those of a borrowed 16-bit replica."""
    canary = in_flight(c)
    pods = c.snapshot.pods_of(canary.revision)
    borrows = canary.stage in (Stage.STARTING, Stage.PROBING) and c.reference not in c.sides
    return (*pods, *c.snapshot.pods_of(c.reference)) if borrows else pods


def unschedulable(c: Context) -> str | None:
    """Return the scheduler's message if a canary pod has waited for a node so long that it may replace a replica; else
    None."""
    canary = in_flight(c)
    if c.spec.canary.capacity_policy != "SurgeOrReplaceOne" or canary.replaces_one or c.replicas == 0:
        return None
    if c.now < canary.stage_time + timedelta(seconds=SURGE_SECONDS):
        return None
    pods = (one for pod in pods_on_trial(c) for one in pod.group)
    return next((pod.unschedulable for pod in pods if pod.unschedulable and not waits_for_volume(pod)), None)


def held_up_by(c: Context) -> Cause | None:
    """Return the cause that keeps canary pods from starting, or None. Leave out causes that usually pass in time."""
    cause = storage.held_up(c, [pod for pod in pods_on_trial(c) if not pod.answers])
    return cause if cause is not None and cause.reason not in ON_ITS_WAY else None


def why_waiting(c: Context) -> str:
    """Return the cause that keeps canary pods from starting, with a leading colon; empty if it is unknown."""
    refused = of_workload(c.snapshot, in_flight(c).revision, rejected(c.snapshot))
    if refused:
        return f": {finding(refused).message}"
    canary, s = in_flight(c), c.snapshot
    waits = canary.stage == Stage.PROBING and c.now >= canary.stage_time + timedelta(seconds=TOLD_SECONDS)
    if waits and s.answering_pods(canary.revision) and s.reported_dtype(canary.revision) is None:
        return ": its engine has not reported its dtype (vllm:cache_config_info on /metrics), and is not probed yet"
    pods = [one for pod in pods_on_trial(c) if not pod.answers for one in pod.group]
    return next((f": {reason}" for pod in pods if (reason := _held_back(c, pod))), "")


def _held_back(c: Context, pod: PodView) -> str:
    """Name the cause that keeps a pod from starting. A slow image pull is not a cause, but a missing volume is."""
    cause = storage.held_up(c, [pod])
    if cause is None or (cause.reason in ON_ITS_WAY and not pod.needs):
        return ""
    return cause.message if cause.reason in _IN_WORDS else ": ".join(pod.held_up or ()) or pod.waiting_reason or ""
