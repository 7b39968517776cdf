"""What must be asked of the engines, and what did they answer? The canary's probes, and the order of all others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.accuracy import baseline, drift
from kvpilot_operator.decide.accuracy.reported import as_asked
from kvpilot_operator.decide.accuracy.verdict import judge, measured
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.rejections import finding
from kvpilot_operator.decide.rollout.ending import NOT_OF_THE_DTYPE, roll_back
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.decision import Captured, Find, Measure, NothingKept, ProbeFailed, Request
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import Canary

# After a probe that ended in an error the next waits this long, times the errors so far.
ERROR_BACKOFF_SECONDS = 10


def probe(c: Context) -> Context:
    """Take in the finished probe and name the next one."""
    if c.snapshot.unread(Question.PROBE_SETS) is not None:
        return c
    c = drift.begin(c)
    fault, canary = c.snapshot.probes.fault, c.canary
    if fault is None:
        c = _take_result(c)
        return replace(c, request=_next(c))
    if canary is not None and canary.stage in (Stage.STARTING, Stage.PROBING):
        return roll_back(c, Verdict.ERROR, Reason.PROBE_SET_INVALID, fault)
    return c


def _next(c: Context) -> Request | None:
    canary, kept = c.canary, baseline.known(c)
    if canary is not None and (_backing_off(c, canary) or _waits_for_pause_to_end(c, canary)):
        return None
    searching = baseline.wanted(c)
    if searching is not None:
        return searching
    if canary is None:
        return drift.check(c)
    pods = c.snapshot.answering_pods(canary.revision)
    if kept is None or not pods or not _is_probed(canary) or not as_asked(c.snapshot, canary.revision, canary.dtype):
        return None
    pod = c.snapshot.pod_to_ask(pods)
    identity = f"measure/{kept.identity}/{canary.revision}/{canary.errors + canary.failures}/{pod.name}"
    return baseline.measure(c, kept, pod, canary.dtype, identity)


def _take_result(c: Context) -> Context:
    result, canary, kept = c.snapshot.probe_result, c.canary, baseline.known(c)
    if result is None or result.outcome is None:
        return c
    outcome, asked = result.outcome, _next(c)
    if asked is None or asked.identity != result.request.identity or isinstance(outcome, NothingKept):
        return c
    refused = None if isinstance(asked, Measure) else c.snapshot.rejection("ConfigMap", asked.config_map)
    if isinstance(outcome, Captured):
        if outcome.adopted or refused is None:
            return baseline.take(c, outcome)
        outcome = ProbeFailed(Reason.BASELINE_LOST, finding([refused]).message)
    if canary is None:
        return drift.take(c, asked, outcome) if isinstance(asked, Measure) else c
    if not _is_probed(canary) or isinstance(asked, Find):
        return c
    if isinstance(outcome, ProbeFailed):
        return _count_error(c, outcome, Verdict.INCONCLUSIVE if outcome.reason in NOT_OF_THE_DTYPE else Verdict.ERROR)
    return _judge(c, asked.pod, outcome, kept) if kept is not None else c


def _judge(c: Context, pod: str, found: Measurement, kept: Baseline) -> Context:
    canary, judgement = in_flight(c), judge(found, kept, c.spec.accuracy)
    last = measured(c.snapshot, found, judgement, revision=canary.revision, dtype=canary.dtype, pod=pod)
    c = c.set_accuracy(last=last)
    reason, message = judgement.reason, judgement.message
    if judgement.verdict == Verdict.INCONCLUSIVE:
        return _count_error(c, ProbeFailed(reason, message), Verdict.INCONCLUSIVE)
    if judgement.verdict == Verdict.PASSED:
        c = c.set_canary(verdict=Verdict.PASSED, reason=reason, message=message)
        return c.record_trial(Action.JUDGE, "CanaryPassed", message)
    failures = canary.failures + 1
    c = c.set_canary(failures=failures)
    if failures >= c.spec.accuracy.failure_limit:
        return roll_back(c, Verdict.FAILED, reason, message)
    return c.set_canary(stage_time=c.now, message=message)


def _count_error(c: Context, failed: ProbeFailed, verdict: Verdict = Verdict.ERROR) -> Context:
    errors = in_flight(c).errors + 1
    c = c.set_canary(errors=errors)
    if failed.reason == Reason.BASELINE_LOST:
        c = c.set_accuracy(baseline=None)
    if errors >= c.spec.accuracy.consecutive_error_limit:
        return roll_back(c, verdict, failed.reason, failed.message)
    c = c.set_canary(stage_time=c.now, message=failed.message)
    return c.event("ProbeError", f"{failed.reason}: {failed.message} ({errors} so far)", warning=True)


def _is_probed(canary: Canary) -> bool:
    return canary.stage == Stage.PROBING and canary.verdict == Verdict.PENDING


def _waits_for_pause_to_end(c: Context, canary: Canary) -> bool:
    """A canary that has used up its limits is not rolled back while the rollout is paused, nor probed for ever."""
    limits = c.spec.accuracy
    used_up = canary.failures >= limits.failure_limit or canary.errors >= limits.consecutive_error_limit
    return c.spec.rollout.paused and used_up


def _backing_off(c: Context, canary: Canary) -> bool:
    wait = timedelta(seconds=ERROR_BACKOFF_SECONDS * canary.errors)
    return canary.errors > 0 and c.now < canary.stage_time + wait
