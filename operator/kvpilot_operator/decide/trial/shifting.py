"""Stage Shifting: the canary goes through the steps of live traffic, and each is judged before the next.

    not in effect --pods ready, traffic as wanted--> warm-up --> measured --Passed--> next step, or promotion
                                                                     |--Failed--> rolled back
                                                                     |--Inconclusive--> stays, until the deadline

A step is looked at when its holdSeconds are over, and again each time the measured span has doubled; look k may err
with ALPHA / 2^(k+1), so that all looks together err with less than ALPHA. In between only a clear failure counts, at
EARLY_ALPHA, which makes looking at every scrape cost little (Haybittle 1971, British Journal of Radiology 44:793).
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.decide.trial.comparison import Finding, compare
from kvpilot_operator.decide.trial.ending import roll_back
from kvpilot_operator.decide.trial.exchange import side
from kvpilot_operator.decide.trial.route import weighted
from kvpilot_operator.decide.trial.traffic import Plan, Step
from kvpilot_operator.render.names import canary_service
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary

ALPHA = 0.05
EARLY_ALPHA = 0.001
# Less than this many seconds of figures, some six scrapes, are never judged, however short holdSeconds is.
MIN_SECONDS = 30


def begin(draft: Draft, s: Snapshot, plan: Plan) -> None:
    """Enter the stage at its first step."""
    draft.set_canary(traffic_mode=plan.mode, errors=0, failures=0, verdict="Pending")
    _enter(draft, s, plan, 0)


def advance(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, replicas: int) -> bool:
    """Go on by at most one step; True when the last one has passed, or the user has taken all of them away."""
    plan = traffic.plan(s, spec, canary, replicas)
    if not spec.canary.steps:
        return True
    if plan.held is not None or not plan.steps:
        # What a step has not passed is not promoted for want of a step: the deadline ends it.
        reason, text = ("RouteUnusable", plan.held) if plan.held is not None else ("NoStepLeft", plan.message)
        if canary.message != text:
            draft.set_canary(verdict="Pending", reason=reason, message=text)
        return False
    place = max((i for i, p in enumerate(plan.steps) if p.index <= (canary.step or 0)), default=0)
    step = plan.steps[place]
    if canary.weight_percent != step.weight_percent:
        draft.set_canary(weight_percent=step.weight_percent)
    if canary.step_time is None:
        _wait(draft, s, spec, canary, plan, step, replicas)
        return False
    verdict = look(s, spec, canary, step)
    if verdict is not None:
        return _conclude(draft, s, spec, canary, plan, place, verdict)
    return False


def deadline(spec: Spec, canary: Canary) -> datetime:
    """When a canary has been at this stage, or this step, for too long. Warm-up and holdSeconds do not count."""
    grace = timedelta(seconds=spec.canary.progress_deadline_seconds)
    if canary.stage != "Shifting" or canary.step_time is None or canary.step is None:
        return canary.stage_time + grace
    held = spec.canary.steps[canary.step].hold_seconds if canary.step < len(spec.canary.steps) else 0
    return canary.step_time + timedelta(seconds=spec.canary.warm_up_seconds + _first(spec, held)) + grace


def look(s: Snapshot, spec: Spec, canary: Canary, step: Step) -> Finding | None:
    """What the figures say of the step now; None while there is nothing to say."""
    if canary.step_time is None or s.status.stable is None:
        return None
    start = canary.step_time + timedelta(seconds=spec.canary.warm_up_seconds)
    stable, ours = (s.samples.get(name, ()) for name in (s.status.stable.revision, canary.revision))
    measured, first = (s.now - start).total_seconds(), _first(spec, step.hold_seconds)
    found = None
    if measured >= first:
        nth = int(math.log2(measured / first))
        end = start + timedelta(seconds=first * 2**nth)
        found = compare(stable, ours, spec.canary, start, end, ALPHA / 2 ** (nth + 1))
        if found.outcome != "Inconclusive":
            return found
    if measured >= MIN_SECONDS:
        early = compare(stable, ours, spec.canary, start, s.now, EARLY_ALPHA)
        if early.outcome == "Failed":
            return early
    return found


def _first(spec: Spec, hold_seconds: int) -> int:
    """Seconds of figures at the first look."""
    return max(hold_seconds - spec.canary.warm_up_seconds, MIN_SECONDS)


def _enter(draft: Draft, s: Snapshot, plan: Plan, place: int) -> None:
    step = plan.steps[place]
    draft.set_canary(
        stage="Shifting",
        stage_time=s.now,
        step=step.index,
        step_time=None,
        weight_percent=step.weight_percent,
        verdict="Pending",
        reason="Shifting",
        message=f"{_named(plan, step)}: {_first_answer(step)}",
    )
    draft.event("CanaryStep", f"{_named(plan, step)}, {plan.message}")


def _named(plan: Plan, step: Step) -> str:
    return f"step {plan.steps.index(step) + 1} of {len(plan.steps)}, {step.weight_percent}% of the traffic"


def _first_answer(step: Step) -> str:
    return f"{step.replicas} {'replica' if step.replicas == 1 else 'replicas'} of the canary must answer first"


def _wait(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, plan: Plan, step: Step, replicas: int) -> None:
    """The step counts from when its pods answer and traffic is seen to be shared as it says."""
    missing = _missing(draft, s, spec, canary, step, replicas)
    if missing is not None:
        text = f"{_named(plan, step)}: {missing}"
        if canary.message != text:
            draft.set_canary(message=text)
        return
    start = s.now + timedelta(seconds=spec.canary.warm_up_seconds)
    judged = start + timedelta(seconds=_first(spec, step.hold_seconds))
    draft.set_canary(
        step_time=s.now,
        message=f"{_named(plan, step)}: measured from {start:%H:%M:%SZ}, judged at {judged:%H:%M:%SZ}",
    )


def _missing(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, step: Step, replicas: int) -> str | None:
    ours = side(s, canary.revision)
    if ours.ready < step.replicas or ours.replicas != step.replicas:
        return _first_answer(step)
    if canary.traffic_mode == "HTTPRoute":
        if s.route is None:
            return "the HTTPRoute is gone"
        name = s.key.name
        wanted = weighted(s.route.rules, s.key.namespace, name, canary_service(name), step.weight_percent)
        return None if wanted == tuple(s.route.rules) else "its weight is to appear in the HTTPRoute"
    if s.traffic:
        others = traffic.strangers(s, draft.status)
        blocked = f" ({', '.join(others)} must go first)" if others else ""
        return f"the Service is to select both revisions{blocked}"
    return None


def _conclude(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, plan: Plan, place: int, verdict: Finding) -> bool:
    """Act on a look; True when the last step has passed."""
    step = plan.steps[place]
    text = f"{_named(plan, step)}: {verdict.message}"
    draft.set_canary(
        ttft_p95_change_percent=_kept(verdict.ttft_p95_change, canary.ttft_p95_change_percent),
        itl_p95_change_percent=_kept(verdict.itl_p95_change, canary.itl_p95_change_percent),
        throughput_change_percent=_kept(verdict.throughput_change, canary.throughput_change_percent),
    )
    if verdict.outcome == "Inconclusive":
        if (canary.verdict, canary.message) != ("Inconclusive", text):
            draft.set_canary(verdict="Inconclusive", reason=verdict.reason, message=text)
        return False
    if verdict.outcome == "Passed":
        draft.set_canary(verdict="Passed", reason="StepPassed", message=text)
        draft.record("Judge", "StepPassed", text, from_dtype=canary.from_dtype, to_dtype=canary.dtype)
        if place + 1 == len(plan.steps):
            return True
        _enter(draft, s, plan, place + 1)
        return False
    failed = verdict.outcome == "Failed"
    counts = (canary.failures + failed, canary.errors + (not failed))
    draft.set_canary(failures=counts[0], errors=counts[1], reason=verdict.reason, message=text)
    limits = spec.accuracy.failure_limit, spec.accuracy.consecutive_error_limit
    if counts[0] >= limits[0] or counts[1] >= limits[1]:
        roll_back(draft, s, spec, verdict.outcome, verdict.reason, text)
    else:
        # Measured anew: what was seen so far is not counted twice.
        draft.set_canary(step_time=s.now)
        draft.event("StepRepeated", f"{text} ({counts[0]} failures, {counts[1]} errors so far)", warning=True)
    return False


def _kept(new: int | None, old: int | None) -> int | None:
    return old if new is None else new
