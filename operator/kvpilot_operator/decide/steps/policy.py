"""Choose the next step. A smaller dtype is cheaper than one more GPU, and one more GPU is safer than a smaller dtype.

- If memory is short: take the safest dtype in which the demand fits, else more replicas, else the smallest dtype.
- If another resource is short, or an objective is missed: add a replica. But add none if all objectives are met and one
  of them is for TTFT.
- In a surge: add replicas at once.
- After pressure: remove one replica, then take a larger dtype. If memory alone requires the replica, take a smaller
  dtype and remove it.

The policy takes one step at a time, and none while metrics are insufficient.
"""

from dataclasses import dataclass

import msgspec

from kvpilot_operator.api.words import Action, Outcome, Reason, WorkloadKind
from kvpilot_operator.decide.load.saturation import learned
from kvpilot_operator.decide.steps import options
from kvpilot_operator.decide.steps.options import Weighed
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.status import Option, Saturation


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """The step to take (`chosen`, which may be Stay). Alternatives are listed only if a step was needed."""

    options: tuple[Option, ...]
    """The step to take, and then the alternatives."""
    reason: str
    message: str
    hold: str | None = None
    """The reason to do nothing although a step is needed. The text has no changing figures."""
    wanted: Option | None = None
    """Step that the policy would take if no mode, limit or waiting time prevented it."""
    saturations: tuple[Saturation, ...] = ()
    """Request rates at which requests queued. The next decision reads them."""

    @property
    def chosen(self) -> Option:
        """Return the step to take, the first of the options."""
        return self.options[0]


def choose_step(s: PolicyInput) -> PolicyDecision:
    """Choose a step for one service at one moment. Every input gives a decision."""
    kind, surge = s.workload.kind, s.workload.surge is not None
    more = surge and options.needed(s) > s.replicas and options.out(s).open
    if s.busy is not None and not (s.yields and more):
        return _stay(s, Reason.BUSY, s.busy)
    if more:
        return _relieve(s)
    if s.loading and (surge or s.workload.missed or kind not in (WorkloadKind.NO_METRICS, WorkloadKind.WARMING)):
        return _stay(s, Reason.BUSY, _answering(s))
    if s.workload.bound or s.workload.missed or surge:
        return _relieve(s)
    if kind in (WorkloadKind.RELAXED, WorkloadKind.IDLE) and s.workload.calm:
        return _release(s)
    return _stay(s, kind, s.workload.message)


def nothing_weighed(dtype: str, replicas: int, saturations: tuple[Saturation, ...]) -> PolicyDecision:
    """Change nothing, because an error prevented the comparison of steps."""
    message = "an error prevented the comparison of steps"
    option = Option(action=Action.STAY, dtype=dtype, replicas=replicas, outcome=Outcome.CHOSEN, message=message)
    return PolicyDecision((option,), Reason.RECONCILE_INCOMPLETE, message, saturations=saturations)


def _stay(s: PolicyInput, reason: str, message: str, wanted: Option | None = None) -> PolicyDecision:
    chosen = options.stay(s, Outcome.CHOSEN, message)
    return PolicyDecision((chosen,), reason, message, wanted=wanted, saturations=s.saturations)


def _relieve(s: PolicyInput) -> PolicyDecision:
    """Choose a smaller dtype or more replicas, because requests wait or are late."""
    w, downs, more = s.workload, options.down(s), options.out(s)
    steps, memory = [*downs, more], w.kind == WorkloadKind.MEMORY_BOUND
    picked = more if more.open and (w.surge or not memory) else None
    if picked is None and memory:
        # Take the safest dtype that is enough, else replicas, else the smallest dtype unless all objectives are met.
        picked = next((step for step in downs if step.open and step.fits), None)
        if picked is None and more.option.outcome != Outcome.OBJECTIVES_HELD:
            picked = next((step for step in (more, *reversed(downs)) if step.open), None)
    if picked is not None:
        reason = Reason.MEMORY_PRESSURED if picked is not more else Reason.SURGE if w.surge else w.kind
        return _take(s, picked, steps, Reason.OBJECTIVE_MISSED if w.missed else reason, _evidence(s))
    if w.in_time:
        return _stay(s, Outcome.OBJECTIVES_HELD, f"{w.message}; {'; '.join(map(str, w.objectives))}")
    return _held(s, downs, more, steps)


def _held(s: PolicyInput, downs: list[Weighed], more: Weighed, steps: list[Weighed]) -> PolicyDecision:
    """Change nothing, because every step is ruled out. Name the preferred step and the reason against it."""
    w, closed, memory = s.workload, s.canary_closed(), s.workload.kind == WorkloadKind.MEMORY_BOUND
    none = {
        Outcome.NOT_OWNER: "an autoscaler or a person sets the replicas (scaling.mode External)",
        Outcome.AT_LIMIT: f"{s.replicas} replicas are the maximum (scaling.maxReplicas {s.spec.scaling.max_replicas})",
        Outcome.INSUFFICIENT: options.ALONE,
    }.get(more.option.outcome, _answering(s))
    waiting = [step for step in downs if step.option.outcome in (Outcome.COOLING_DOWN, Outcome.NO_CANARY)]
    if memory and waiting and closed is not None:
        wanted = next((step for step in waiting if step.fits), waiting[-1])
        return _hold(s, steps, wanted, closed[0], f"{closed[1]}; {none}")
    if memory and s.spec.kv_cache.mode != "Fixed":
        left = "; ".join(f"{step.option.dtype}: {step.option.outcome}" for step in downs) or "none is smaller"
        return _hold(s, steps, more, Reason.END_OF_LADDER, f"no smaller dtype is left ({left}); {none}")
    if not w.bound and not w.missed:
        return _stay(s, Reason.SURGE, f"{_evidence(s)}; {none}", more.option)
    what = "an objective is missed" if w.missed else w.kind
    return _hold(s, steps, more, more.option.outcome, f"{what}, but {none}")


def _evidence(s: PolicyInput) -> str:
    w = s.workload
    return "; ".join(part for part in (w.surge.message if w.surge else "", w.missed, w.message) if part)


def _answering(s: PolicyInput) -> str:
    return f"{s.ready} of {s.replicas} replicas answer"


def _release(s: PolicyInput) -> PolicyDecision:
    """Remove a replica or take a larger dtype, because hardly any request waits. If KV memory alone requires the
    replica, take a smaller dtype first."""
    low = s.spec.kv_cache.pressure.low_percent
    text = f"{s.workload.message}; below lowPercent {low}% for {s.spec.scaling.scale_down_stabilization_seconds} s"
    fewer = options.scale_in(s)
    if fewer.open:
        return _take(s, fewer, [fewer, *options.up(s)], Reason.LOAD_LEFT, text)
    if fewer.option.outcome in (Outcome.BACKING_OFF, Outcome.TOO_TIGHT):
        downs = options.instead_of_replicas(s)
        smaller = next((step for step in downs if step.open and step.fits), None)
        if smaller is not None:
            return _take(s, smaller, [*downs, fewer], Reason.LOAD_LEFT, text)
    ups = options.up(s)
    higher = next((step for step in ups if step.open), None)
    if higher is not None:
        return _take(s, higher, [*ups, fewer], Reason.LOAD_LEFT, text)
    would = fewer.option if fewer.option.outcome == Outcome.NOT_OWNER else None
    return _stay(s, s.workload.kind, s.workload.message, would)


def _take(s: PolicyInput, step: Weighed, steps: list[Weighed], reason: str, evidence: str) -> PolicyDecision:
    chosen = msgspec.structs.replace(step.option, outcome=Outcome.CHOSEN)
    others = [other for other in steps if other is not step]
    nothing = Weighed(options.stay(s, Outcome.POSSIBLE, "nothing changes"), open=False, fits=False)
    pressed = s.workload.bound or s.workload.missed or s.workload.surge
    weighed = options.listed(chosen, [*others, nothing])
    message = f"{evidence}; {chosen.message}"
    known = learned(s.saturations, s.workload, s.dtype) if pressed else s.saturations
    return PolicyDecision(weighed, reason, message, saturations=known)


def _hold(s: PolicyInput, steps: list[Weighed], wanted: Weighed, reason: str, why: str) -> PolicyDecision:
    weighed = options.listed(options.stay(s, Outcome.CHOSEN, why), steps)
    message = f"{_evidence(s)}; {why}"
    return PolicyDecision(weighed, reason, message, hold=why, wanted=wanted.option, saturations=s.saturations)
