"""Request the probe that is due, and judge its result for a canary. `accuracy/drift.py` judges serving replicas."""

from dataclasses import replace
from datetime import timedelta

from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.accuracy import baseline, drift
from kvpilot_operator.decide.accuracy.reported import as_asked
from kvpilot_operator.decide.accuracy.verdict import Judgement, both_answers, judge
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.rejections import finding
from kvpilot_operator.decide.rollout.ending import NOT_OF_THE_DTYPE, roll_back
from kvpilot_operator.state.accuracy import Baseline, Measured
from kvpilot_operator.state.decision import Captured, Find, Found, Measure, ProbeFailed, Request
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import Canary, clip
from kvpilot_probes.stats import Measurement

# Seconds to wait after a probe error, multiplied by the number of errors so far.
ERROR_BACKOFF_SECONDS = 10


def probe(c: Context) -> Context:
    """Judge the result of the probe that is due.

    Request the probe if it has no result yet, or if the judgement did not change the status.
    """
    if c.snapshot.unread(Question.PROBE_SETS) is not None:
        return c
    c = drift.begin(c)
    fault, canary = c.snapshot.probes.fault, c.canary
    if fault is not None:
        trial = canary is not None and canary.stage in (Stage.STARTING, Stage.PROBING)
        return roll_back(c, Verdict.ERROR, Reason.PROBE_SET_INVALID, fault) if trial else c
    kept, result = baseline.known(c), c.snapshot.probe_result
    due = _due(c, kept)
    if due is None or result is None or result.outcome is None or result.request.identity != due.identity:
        return replace(c, probe=due)
    after = _judge(c, due, result.outcome, kept)
    return after if after.status != c.status else replace(c, probe=due)


def _due(c: Context, kept: Baseline | None) -> Request | None:
    """Return the probe that is due: for a missing baseline first, then for the canary, else for a serving replica."""
    canary, limits = c.canary, c.spec.accuracy
    if canary is not None:
        used_up = canary.failures >= limits.failure_limit or canary.errors >= limits.consecutive_error_limit
        wait = timedelta(seconds=ERROR_BACKOFF_SECONDS * canary.errors)
        # A canary that has reached its limit of failures or errors remains only during a pause. Do not probe it again.
        if (c.spec.rollout.paused and used_up) or (canary.errors and c.now < canary.stage_time + wait):
            return None
    if kept is None:
        return baseline.wanted(c)
    if canary is None:
        return drift.check(c, kept)
    asked = f"measure/{kept.identity}/{canary.revision}/{canary.errors + canary.failures}/"
    pods = c.snapshot.answering_pods(canary.revision) or _asked(c, asked)
    if not pods or not _is_probed(canary) or not as_asked(c.snapshot, canary.revision, canary.dtype):
        return None
    pod = c.snapshot.pod_to_ask(pods)
    return baseline.measure(c, kept, pod, canary.dtype, f"{asked}{pod.name}")


def _asked(c: Context, asked: str) -> tuple[PodView, ...]:
    """Return the pod that is being probed. Include a pod that no longer answers, because an engine that dies during a
    probe has failed the probe."""
    result = c.snapshot.probe_result
    name = result.request.identity.removeprefix(asked) if result is not None else ""
    return tuple(pod for pod in c.snapshot.pods if pod.name == name and pod.ip and not pod.terminating)


def _judge(c: Context, asked: Request, outcome: Found, kept: Baseline | None) -> Context:
    if isinstance(outcome, Captured) and not isinstance(asked, Measure):
        refused = None if outcome.adopted else c.snapshot.rejection("ConfigMap", asked.config_map)
        if refused is None:
            return baseline.adopt(c, outcome)
        outcome = ProbeFailed(Reason.BASELINE_LOST, finding([refused]).message)
    side = c.canary or c.stable
    if isinstance(outcome, Measurement) and isinstance(asked, Measure) and kept is not None and side is not None:
        judgement = judge(outcome, kept, c.spec.accuracy)
        answers = both_answers(outcome, side.dtype) if judgement.verdict == Verdict.FAILED else None
        c = c if answers is None else c.event("AnswersDiffer", answers, warning=True)
        used = 0 if c.canary else outcome.milliseconds / 1000 * c.spec.engine.gpu_limit * c.spec.engine.nodes
        cost = f", at most {used * 86_400 / c.spec.accuracy.period_seconds:,.0f} GPU-seconds a day" if used else ""
        last = Measured(
            revision=side.revision,
            dtype=side.dtype,
            pod=asked.pod,
            verdict=judgement.verdict,
            probe_time=c.now,
            excess_kl_micronats=judgement.excess_kl_micronats,
            top1_agreement_permille=outcome.top1_agreement_permille,
            covered=clip(judgement.covered and judgement.covered + cost, 253) or None,
        )
        return drift.count(c, last, judgement) if c.canary is None else _count(c.set_accuracy(last=last), judgement)
    if not isinstance(outcome, ProbeFailed) or isinstance(asked, Find):
        return c
    if c.canary is not None and _is_probed(c.canary):
        return _count_error(c, outcome, Verdict.INCONCLUSIVE if outcome.reason in NOT_OF_THE_DTYPE else Verdict.ERROR)
    return drift.count_error(c, asked.pod, outcome) if c.canary is None and isinstance(asked, Measure) else c


def _count(c: Context, judgement: Judgement) -> Context:
    reason, message = judgement.reason, judgement.message
    if judgement.verdict == Verdict.INCONCLUSIVE:
        return _count_error(c, ProbeFailed(reason, message), Verdict.INCONCLUSIVE)
    if judgement.verdict == Verdict.PASSED:
        c = c.set_canary(verdict=Verdict.PASSED, reason=reason, message=message)
        return c.record_trial(Action.JUDGE, "CanaryPassed", message)
    failures = in_flight(c).failures + 1
    c = c.set_canary(failures=failures)
    if failures >= c.spec.accuracy.failure_limit:
        return roll_back(c, Verdict.FAILED, reason, message)
    return c.set_canary(stage_time=c.now, message=message)


def _count_error(c: Context, failed: ProbeFailed, verdict: Verdict) -> Context:
    errors = in_flight(c).errors + 1
    c = c.set_canary(errors=errors)
    if failed.reason == Reason.BASELINE_LOST:
        c = c.set_accuracy(baseline=None)
    # If an engine crashed under a probe, roll back at once: users' requests could crash it, too.
    limit = c.spec.accuracy.consecutive_error_limit
    if errors >= limit or failed.reason == Reason.ENGINE_CRASHED:
        return roll_back(c, verdict, failed.reason, failed.message)
    c = c.set_canary(stage_time=c.now, message=failed.message)
    return c.event("ProbeError", f"{failed.reason}: {failed.message} (error {errors} of {limit})", warning=True)


def _is_probed(canary: Canary) -> bool:
    return canary.stage == Stage.PROBING and canary.verdict == Verdict.PENDING
