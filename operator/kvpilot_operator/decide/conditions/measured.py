"""What was measured of a service, each as a condition: its metrics, its load, its canary, its answers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvpilot_formats import dtypes
from kvpilot_operator.api.words import ConditionType, ObjectiveState, Reason, Stage, Verdict, WorkloadKind
from kvpilot_operator.decide.accuracy.baseline import fault, known
from kvpilot_operator.decide.accuracy.drift import drifted
from kvpilot_operator.decide.accuracy.reported import mismatch
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import engine_failure, mixed_factors
from kvpilot_operator.decide.load.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.objects import storage
from kvpilot_operator.decide.rollout.waiting import held_up_by, why_waiting
from kvpilot_operator.state.samples import names

_WORST_FIRST = (ObjectiveState.MISSED, ObjectiveState.UNSETTLED, ObjectiveState.NO_SAMPLES, ObjectiveState.HELD)

Word = Literal["True", "False", "Unknown"]


class Line(NamedTuple):
    """What a condition says, before it has its type and times."""

    status: Word
    reason: str
    message: str


def model_cached(c: Context) -> Line:
    """Whether the weights are where engines look for them, or an engine has ever loaded the model."""
    stable, waits = c.stable, storage.wait(c)
    if waits is not None:
        return Line("False", *waits.cause)
    if c.spec.cache.prefetch:
        return Line("True", Reason.PREFETCHED, storage.told(c))
    if stable is not None and stable.ever_ready:
        return Line("True", Reason.ENGINE_LOADED_IT, "an engine has loaded the model")
    failure = engine_failure(c.snapshot.pods_of(stable.revision)) if stable is not None else None
    if failure is not None and failure.reason in ("ModelNotFound", "ModelUnsupported"):
        return Line("False", *failure)
    return Line("Unknown", Reason.NOT_LOADED_YET, "no engine has loaded the model yet")


def metrics(c: Context) -> Line:
    """Whether the engines give metrics, and whose are left out."""
    workload, backed_off = c.workload, c.snapshot.backed_off
    less = ""
    if backed_off:
        first, number = min(backed_off), len(backed_off)
        many = "1 pod is" if number == 1 else f"{number} pods are"
        less = f"; {many} scraped less often; {first}: {backed_off[first]}"
    if workload.kind in (WorkloadKind.NO_METRICS, WorkloadKind.ENGINES_STALLED):
        return Line("False", workload.kind, f"{workload.message}{less}")
    capacity = f"KV capacity {workload.capacity_tokens} tokens"
    # Names alone: the reasons hold figures that move, and are in the operator's log.
    if workload.implausible:
        less = f"; implausible: {names(workload.implausible)}{less}"
    if workload.stalled:
        less = f"; stalled, so they have work and do none of it: {names(workload.stalled)}{less}"
        return Line("True", WorkloadKind.ENGINES_STALLED, f"{capacity}{less}")
    if workload.implausible:
        return Line("True", Reason.PARTLY_BELIEVED, f"{capacity}{less}")
    return Line("True", Reason.SCRAPED, f"{capacity}{less}")


def memory_pressured(c: Context) -> Line:
    """What binds, and whether it is memory."""
    workload, before, usage = (
        c.workload,
        c.before.condition(ConditionType.MEMORY_PRESSURED),
        c.before.kv_cache.usage_percent,
    )
    if workload.kind in (WorkloadKind.NO_METRICS, WorkloadKind.ENGINES_STALLED):
        return Line("Unknown", workload.kind, workload.message)
    held = workload.kind == WorkloadKind.WARMING and before is not None and before.status == "True"
    word: Word = "True" if workload.kind == WorkloadKind.MEMORY_BOUND or held else "False"
    same = before is not None and (before.status, before.reason) == (word, workload.kind)
    if before is not None and same and usage is not None and abs(usage - workload.usage_percent) < USAGE_STEP_PERCENT:
        return Line(word, workload.kind, before.message)  # no write for figures that hardly moved
    return Line(word, workload.kind, workload.message)


def objectives(c: Context) -> Line | None:
    """Whether latencies are as spec.scaling.objectives asks; None where it asks for none."""
    if not c.status.objectives:
        return None
    found = "; ".join(
        f"{one.metric} p{one.percentile} "
        + ("not known" if one.observed_milliseconds is None else f"{one.observed_milliseconds} ms")
        + f" (objective {one.milliseconds} ms)"
        for one in c.status.objectives
    )
    states = {one.state for one in c.status.objectives}
    worst = next(state for state in _WORST_FIRST if state in states)
    words: dict[ObjectiveState, Word] = {ObjectiveState.HELD: "True", ObjectiveState.MISSED: "False"}
    return Line(words.get(worst, "Unknown"), worst, found)


def waiting(c: Context) -> str:
    """What keeps pods on trial from coming, to be said after what is found of the canary."""
    canary, why = c.canary, why_waiting(c) if c.canary is not None else ""
    if canary is None or canary.stage == Stage.ROLLING_BACK or why.removeprefix(": ") in canary.message:
        return ""
    return f"; it waits{why}"


def canary_healthy(c: Context) -> Line:
    """What was found of the canary in flight, or of the last one."""
    canary, last = c.canary, c.status.last_canary
    if canary is not None:
        passed: Word = "True" if canary.verdict == Verdict.PASSED else "Unknown"
        word: Word = "False" if canary.stage == Stage.ROLLING_BACK else passed
        held_up = None if word != "Unknown" else held_up_by(c)
        reason = held_up.reason if held_up is not None else canary.reason or canary.stage
        return Line(word, reason, f"{canary.dtype}: {canary.message}{waiting(c)}")
    if last is None:
        return Line("Unknown", Reason.NO_CANARY, "no canary has run")
    ended: Word = "True" if last.stage == Stage.PROMOTED else "False"
    return Line(ended, last.reason or last.stage, f"{last.stage} {last.dtype}: {last.message}")


def accuracy(c: Context) -> Line:
    """Whether the serving dtype still answers as 16 bits do."""
    stable, accuracy, spec = c.stable, c.status.accuracy, c.spec
    if c.snapshot.probes.fault is not None:
        return Line("False", Reason.PROBE_SET_INVALID, c.snapshot.probes.fault)
    if stable is None:
        return Line("Unknown", Reason.NO_REVISION, "nothing serves yet")
    other = mismatch(c.snapshot, stable.revision, stable.dtype)
    if other is not None:
        return Line("False", Reason.DTYPE_MISMATCH, other)
    noisy = fault(c)
    if noisy is not None and stable.revision == c.reference:
        return Line("False", *noisy)
    if stable.dtype == spec.kv_cache.baseline and not spec.kv_cache.bounded:
        return Line("True", Reason.REFERENCE, f"{stable.dtype} is what accuracy is measured against")
    last, runs = accuracy.last, f"of {spec.accuracy.failure_limit} runs in a row failed"
    if last is None or last.revision != stable.revision:
        found = f"{stable.dtype} has not been compared with a 16-bit engine"
    else:
        found = (
            f"{last.dtype}{f' on pod {last.pod}' if last.pod else ''}: excess KL "
            f"{last.excess_kl_micronats / 1000:.1f} millinats, top-1 agreement {last.top1_agreement_permille / 10:.1f}%"
        )
    if drifted(c):
        return Line("False", Reason.ACCURACY_DRIFTED, f"{found}; {accuracy.failures} runs in a row failed")
    if accuracy.errors >= spec.accuracy.consecutive_error_limit:
        # Not the number: it grows with every run, and nobody is helped by a new message each time.
        return Line("Unknown", Reason.PROBE_ERRORS, f"the last runs brought no verdict (see events); {found}")
    if last is None or last.revision != stable.revision:
        return Line("Unknown", Reason.NOT_PROBED, found)
    if accuracy.failures:
        return Line("Unknown", Reason.PROBE_FAILED, f"{found}; {accuracy.failures} {runs}")
    if noisy is not None:
        return Line("Unknown", *noisy)
    if known(c) is None:
        unwatched = "no 16-bit reference is kept for the present model and probe sets, the next canary captures one"
        return Line("Unknown", Reason.NOT_WATCHED, f"{found}; not watched since: {unwatched}")
    word: Word = "True" if last.verdict == Verdict.PASSED else "False"
    return Line(word, f"Probe{last.verdict}", found)


def calibration(c: Context) -> Line:
    """Whether the engines that serve, and those on trial, have the factors of their revision."""
    s, stable = c.snapshot, c.stable
    found = [text for revision in c.sides if (text := mixed_factors(s, revision)) is not None]
    if found:
        return Line("False", Reason.MIXED_FACTORS, "; ".join(found))
    sample = s.last_sample(stable.revision) if stable is not None else None
    stored = dtypes.parse(stable.dtype) if stable is not None else None
    if stable is not None and stored is not None and (stored.latent or not stored.ours):
        return Line("True", Reason.NOT_CALIBRATED, f"{stable.dtype} has no calibration factors")
    if sample is None or not sample.factors:
        return Line("Unknown", Reason.NOT_REPORTED, "no engine has told its calibration factors yet")
    return Line("True", Reason.SAME_FACTORS, f"all engines have the calibration factors {sample.factors}")
