"""Take the canary through its steps of live traffic (stage Shifting), and judge each step.

- The first judgement of a traffic step comes once its pods serve, and its warm-up and holdSeconds are over.
- Without a verdict, the next judgement comes when the measured time has doubled. Judgement k (0, 1, ...) may err with
  probability ALPHA / 2^(k+1), so all judgements of a step together err with at most ALPHA.
- In between, every reconcile checks for a clear failure at level EARLY_ALPHA (Haybittle 1971, British Journal of
  Radiology 44:793). It also checks if users' answers differ beyond chance (`answers`).
"""

import math
from datetime import datetime, timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action, Reason, Stage, TrafficMode, Verdict
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.rollout.answers import differing
from kvpilot_operator.decide.rollout.comparison import Finding, compare
from kvpilot_operator.decide.rollout.ending import roll_back
from kvpilot_operator.decide.traffic_plan import TrafficPlan, TrafficStep, counts
from kvpilot_operator.render.route import backend, weighted
from kvpilot_operator.state.status import Canary

ALPHA = 0.05
EARLY_ALPHA = 0.001
# Measure for at least 30 s (about six scrapes), even if holdSeconds is shorter.
MIN_SECONDS = 30


def begin_steps(c: Context) -> Context:
    """Enter stage Shifting at its first traffic step."""
    return _enter(c.set_canary(traffic_mode=c.plan.mode, errors=0, failures=0, verdict=Verdict.PENDING), c.plan, 0)


def advance_step(c: Context) -> Context:
    """Judge the present traffic step, and advance by at most one."""
    plan, canary = c.plan, in_flight(c)
    if plan.held is not None or not plan.steps:
        # No traffic step can be judged now, so the canary waits until one can, or until its deadline ends the trial.
        reason = Reason.WITHIN_LIMITS if plan.held is None else Reason.ROUTE_UNUSABLE
        return noted(c, plan.held or plan.message, verdict=Verdict.PENDING, reason=reason)
    place = max((i for i, p in enumerate(plan.steps) if p.index <= (canary.step or 0)), default=0)
    step = plan.steps[place]
    if canary.weight_percent != step.weight_percent:
        c = c.set_canary(weight_percent=step.weight_percent)
    if canary.step_time is None:
        return _wait(c, plan, step)
    found = look(c, step)
    return c if found is None else _conclude(c, plan, place, found)


def noted(c: Context, message: str, **changes: object) -> Context:
    """Record why the canary waits, if the status does not say so yet."""
    return c if in_flight(c).message == message else c.set_canary(message=message, **changes)


def deadline(spec: Spec, canary: Canary) -> datetime:
    """Return the deadline of this stage or traffic step. Warm-up and holdSeconds do not count."""
    grace = timedelta(seconds=spec.canary.progress_deadline_seconds)
    if canary.stage != Stage.SHIFTING or canary.step_time is None or canary.step is None:
        return canary.stage_time + grace
    held = spec.canary.steps[canary.step].hold_seconds if canary.step < len(spec.canary.steps) else 0
    return canary.step_time + timedelta(seconds=spec.canary.warm_up_seconds + _first(spec, held)) + grace


def look(c: Context, step: TrafficStep) -> Finding | None:
    """Compare the metrics of canary and stable side in this step. Return None while there are too few to compare."""
    canary, limits = in_flight(c), c.spec.canary
    if canary.step_time is None or c.stable is None:
        return None
    start = canary.step_time + timedelta(seconds=limits.warm_up_seconds)
    stable, ours = (c.snapshot.samples.get(name, ()) for name in (c.stable.revision, canary.revision))
    # Compare answers only if nothing but the dtype differs: another model or image may rightly answer differently.
    if c.stable.revision == c.render(canary.from_dtype).name:
        text = differing(stable, ours, start, c.now)
        if text is not None:
            return Finding(Verdict.FAILED, Reason.ACCURACY_REGRESSED, text)
    measured, first = (c.now - start).total_seconds(), _first(c.spec, step.hold_seconds)
    found = None
    if measured >= first:
        nth = int(math.log2(measured / first))
        end = start + timedelta(seconds=first * 2**nth)
        found = compare(stable, ours, limits, start, end, ALPHA / 2 ** (nth + 1))
        if found.outcome != Verdict.INCONCLUSIVE:
            return found
    if measured >= MIN_SECONDS:
        early = compare(stable, ours, limits, start, c.now, EARLY_ALPHA)
        if early.outcome == Verdict.FAILED:
            return early
    return found


def _first(spec: Spec, hold_seconds: int) -> int:
    """Return the seconds of measured traffic after which a traffic step is judged for the first time."""
    return max(hold_seconds - spec.canary.warm_up_seconds, MIN_SECONDS)


def _enter(c: Context, plan: TrafficPlan, place: int) -> Context:
    step = plan.steps[place]
    c = c.set_canary(
        stage=Stage.SHIFTING,
        stage_time=c.now,
        step=step.index,
        step_time=None,
        weight_percent=step.weight_percent,
        verdict=Verdict.PENDING,
        reason=Stage.SHIFTING,
        message=f"{_named(plan, step)}: {_first_answer(step)}",
    )
    return c.event("CanaryStep", f"{_named(plan, step)}, {plan.message}")


def _named(plan: TrafficPlan, step: TrafficStep) -> str:
    copies = f" and copies of {step.mirrored_percent}%" if step.mirrored_percent else ""
    return f"step {plan.steps.index(step) + 1} of {len(plan.steps)}, {step.weight_percent}% of the traffic{copies}"


def _first_answer(step: TrafficStep) -> str:
    return f"{step.replicas} {'replica' if step.replicas == 1 else 'replicas'} of the canary must answer first"


def _wait(c: Context, plan: TrafficPlan, step: TrafficStep) -> Context:
    """Wait until the step's pods answer and get their share of the traffic. Then start the step's time."""
    missing = _not_in_effect(c, step)
    if missing is not None:
        return noted(c, f"{_named(plan, step)}: {missing}")
    start = c.now + timedelta(seconds=c.spec.canary.warm_up_seconds)
    judged = start + timedelta(seconds=_first(c.spec, step.hold_seconds))
    text = f"{_named(plan, step)}: measured from {start:%H:%M:%SZ}, judged at {judged:%H:%M:%SZ}"
    return c.set_canary(step_time=c.now, message=text)


def _not_in_effect(c: Context, step: TrafficStep) -> str | None:
    s, canary = c.snapshot, in_flight(c)
    ours = counts(s, canary.revision)
    if ours.ready < step.replicas or ours.replicas != step.replicas:
        return _first_answer(step)
    if canary.traffic_mode == TrafficMode.HTTP_ROUTE:
        if s.route is None:
            return "the HTTPRoute does not exist"
        wanted = weighted(s.route.rules, backend(s), step.weight_percent, step.mirrored_percent)
        return None if wanted == tuple(s.route.rules) else "the HTTPRoute does not have the canary's weight yet"
    if s.traffic:
        others = traffic.orphans(c)
        blocked = f" ({', '.join(others)} must be deleted first)" if others else ""
        return f"the Service does not select both revisions yet{blocked}"
    return None


def _conclude(c: Context, plan: TrafficPlan, place: int, found: Finding) -> Context:
    """Act on the result of a comparison: go on to the next traffic step, repeat this one, or roll back."""
    canary, text = in_flight(c), f"{_named(plan, plan.steps[place])}: {found.message}"
    if found.itl_p95_change_percent is not None:
        c = c.set_canary(itl_p95_change_percent=found.itl_p95_change_percent)
    if found.outcome == Verdict.INCONCLUSIVE:
        return c.set_canary(verdict=Verdict.INCONCLUSIVE, reason=found.reason, message=text)
    if found.outcome == Verdict.PASSED:
        c = c.set_canary(verdict=Verdict.PASSED, reason=Reason.WITHIN_LIMITS, message=text)
        c = c.record_trial(Action.JUDGE, Reason.WITHIN_LIMITS, text)
        return c if place + 1 == len(plan.steps) else _enter(c, plan, place + 1)
    failed = found.outcome == Verdict.FAILED
    failures, errors = canary.failures + failed, canary.errors + (not failed)
    c = c.set_canary(failures=failures, errors=errors, reason=found.reason, message=text)
    if failures >= c.spec.accuracy.failure_limit or errors >= c.spec.accuracy.consecutive_error_limit:
        return roll_back(c, found.outcome, found.reason, text)
    # Start a new measurement, so that earlier samples are not counted twice.
    c = c.set_canary(step_time=c.now)
    return c.event("StepRepeated", f"{text} ({failures} failures, {errors} errors so far)", warning=True)
