"""Decide the conditions that report measurements: metrics, memory pressure, objectives, canary and accuracy."""

from dataclasses import replace
from typing import Literal, NamedTuple

from kvpilot_operator.api.words import ConditionType, ObjectiveState, Outcome, Reason, Stage, Verdict, WorkloadKind
from kvpilot_operator.decide.accuracy.baseline import known, reference_fault
from kvpilot_operator.decide.accuracy.drift import drifted
from kvpilot_operator.decide.accuracy.reported import mismatch
from kvpilot_operator.decide.changes import spec_changes
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import mixed_factors
from kvpilot_operator.decide.load.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.rollout.starting import held_up_by, why_waiting
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.status import Canary

_WORST_FIRST = (ObjectiveState.MISSED, ObjectiveState.UNSETTLED, ObjectiveState.NO_SAMPLES, ObjectiveState.HELD)

Word = Literal["True", "False", "Unknown"]


class Line(NamedTuple):
    """A condition (status, reason, message) without its type and times."""

    status: Word
    reason: str
    message: str

    @property
    def cause(self) -> Cause:
        """Return the condition's reason and message as a Cause."""
        return Cause(self.reason, self.message)


def lines(c: Context) -> dict[ConditionType, Line]:
    """Decide all conditions of this module. Leave out those that do not apply to the service."""
    found = {
        ConditionType.METRICS_AVAILABLE: metrics(c),
        ConditionType.MEMORY_PRESSURED: memory_pressured(c),
        ConditionType.OBJECTIVES_HELD: objectives(c),
        ConditionType.CANARY_HEALTHY: canary_healthy(c),
        ConditionType.ACCURACY_VERIFIED: accuracy(c),
    }
    return {kind: line for kind, line in found.items() if line is not None}


def metrics(c: Context) -> Line:
    """Report whether engines deliver metrics, and which pods' metrics are left out."""
    workload, backed_off = c.workload, c.snapshot.backed_off
    less = ""
    if backed_off:
        first, number = min(backed_off), len(backed_off)
        many = "1 pod is" if number == 1 else f"{number} pods are"
        less = f"; {many} scraped less often; {first}: {backed_off[first]}"
    if workload.kind in (WorkloadKind.NO_METRICS, WorkloadKind.ENGINES_STALLED):
        return Line("False", workload.kind, f"{workload.message}{less}")
    capacity = f"KV capacity {workload.capacity_tokens} tokens"
    if workload.implausible:
        less = f"; left out for implausible metrics: {'; '.join(workload.implausible)}{less}"
    if workload.stalled:
        less = f"; engines with requests but without new tokens: {'; '.join(workload.stalled)}{less}"
        return Line("True", WorkloadKind.ENGINES_STALLED, f"{capacity}{less}")
    return Line("True", Reason.SCRAPED, f"{capacity}{less}")


def memory_pressured(c: Context) -> Line:
    """Report the resource that limits the service, and whether it is memory."""
    workload, usage = c.workload, c.before.kv_cache.usage_percent
    before = c.before.condition(ConditionType.MEMORY_PRESSURED)
    if workload.kind in (WorkloadKind.NO_METRICS, WorkloadKind.ENGINES_STALLED):
        return Line("Unknown", workload.kind, workload.message)
    held = workload.kind == WorkloadKind.WARMING and before is not None and before.status == "True"
    word: Word = "True" if workload.kind == WorkloadKind.MEMORY_BOUND or held else "False"
    same = before is not None and (before.status, before.reason) == (word, workload.kind)
    # Keep the message while its figures hardly change, to avoid a write of the status.
    steady = same and usage is not None and abs(usage - workload.usage_percent) < USAGE_STEP_PERCENT
    return Line(word, workload.kind, before.message if before is not None and steady else workload.message)


def objectives(c: Context) -> Line | None:
    """Report whether latencies meet spec.scaling.objectives. Return None if the spec has no objectives."""
    measured = c.workload.objectives
    if not measured:
        return None
    # Round, so that small changes do not cause a write of the status.
    rounded = [None if one.seconds is None else float(f"{one.seconds:.2g}") for one in measured]
    found = "; ".join(str(replace(one, seconds=seconds)) for one, seconds in zip(measured, rounded, strict=True))
    states = {one.state for one in measured}
    worst = next(state for state in _WORST_FIRST if state in states)
    words: dict[ObjectiveState, Word] = {ObjectiveState.HELD: "True", ObjectiveState.MISSED: "False"}
    return Line(words.get(worst, "Unknown"), worst, found)


def said(c: Context, canary: Canary) -> str:
    """Return the canary's message, the changes of the spec, and the cause that keeps the canary's pods from starting.
    Leave out a change or a cause that the message already contains."""
    news = spec_changes(c, c.stable) if c.stable is not None else ""
    text = canary.message if news in canary.message else f"{canary.message}; the spec has changed: {news}"
    why = "" if canary.stage == Stage.ROLLING_BACK else why_waiting(c)
    return text if why.removeprefix(": ") in canary.message else f"{text}; it waits{why}"


def canary_healthy(c: Context) -> Line:
    """Report the state of the running canary, or the result of the last one."""
    canary, last = c.canary, c.status.last_trial
    if canary is not None:
        passed: Word = "True" if canary.verdict == Verdict.PASSED else "Unknown"
        word: Word = "False" if canary.stage == Stage.ROLLING_BACK else passed
        held_up = None if word != "Unknown" else held_up_by(c)
        reason = held_up.reason if held_up is not None else canary.reason or canary.stage
        return Line(word, reason, f"{canary.dtype}: {said(c, canary)}")
    if last is None:
        return Line("Unknown", Outcome.NO_CANARY, "no canary has run")
    if last.verdict == Verdict.PASSED:
        return Line("True", last.reason, f"{Stage.PROMOTED} {last.dtype}: {last.message}")
    return Line("False", last.reason, f"{Stage.ROLLED_BACK} {last.dtype}: {last.message}")


def accuracy(c: Context) -> Line:
    """Report whether the serving dtype's answers are still as accurate as the spec demands, on every pod."""
    found = [text for revision in c.sides if (text := mixed_factors(c.snapshot, revision)) is not None]
    line = _verified(c)
    if found and line.status != "False":
        return Line("False", Reason.MIXED_FACTORS, "; ".join([*found, line.message]))
    return line._replace(message="; ".join([line.message, *found]))


def _verified(c: Context) -> Line:
    stable, accuracy, spec = c.stable, c.status.accuracy, c.spec
    if c.snapshot.probes.fault is not None:
        return Line("False", Reason.PROBE_SET_INVALID, c.snapshot.probes.fault)
    if stable is None:
        return Line("Unknown", Reason.NOT_PROBED, "nothing serves yet")
    other = mismatch(c.snapshot, stable.revision, stable.dtype)
    if other is not None:
        return Line("False", Reason.DTYPE_MISMATCH, other)
    noisy = reference_fault(c)
    if noisy is not None and stable.revision == c.reference:
        return Line("False", *noisy)
    if stable.dtype == spec.kv_cache.baseline:
        return Line("True", Reason.REFERENCE, f"{stable.dtype} is the baseline for all other dtypes")
    last, runs = accuracy.last, f"of {spec.accuracy.failure_limit} runs in a row failed"
    probed = last is not None and last.revision == stable.revision
    found = f"{stable.dtype} has not been compared with a 16-bit engine"
    if probed and last is not None:
        found = (
            f"{last.dtype}{f' on pod {last.pod}' if last.pod else ''}: excess KL "
            f"{last.excess_kl_micronats / 1000:.1f} millinats, top-1 agreement {last.top1_agreement_permille / 10:.1f}%"
        )
    if drifted(c):
        return Line("False", Reason.ACCURACY_DRIFTED, f"{found}; {accuracy.failures} runs in a row failed")
    if accuracy.errors >= spec.accuracy.consecutive_error_limit:
        # Leave out the number of runs: it grows with every run and would cause a write of the status each time.
        return Line("Unknown", Reason.PROBE_ERRORS, f"the last probe runs gave no verdict (see events); {found}")
    if last is None or not probed:
        return Line("Unknown", Reason.NOT_PROBED, found)
    if accuracy.failures:
        return Line("Unknown", Reason.ACCURACY_REGRESSED, f"{found}; {accuracy.failures} {runs}")
    if noisy is not None:
        return Line("Unknown", *noisy)
    if known(c) is None:
        unwatched = "no 16-bit baseline is stored for the present model and probe sets; the next canary captures one"
        return Line("Unknown", Reason.NOT_PROBED, f"{found}; no probes since: {unwatched}")
    if last.verdict == Verdict.PASSED:
        return Line("True", Reason.WITHIN_LIMITS, found)
    return Line("False", Reason.ACCURACY_REGRESSED, found)
