"""What must be asked of the engines, and what did they answer? The canary's probes, and the order of all others."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import baseline
from kvpilot_operator.decide.accuracy import drift
from kvpilot_operator.decide.accuracy.measured import measured
from kvpilot_operator.decide.accuracy.verdict import judge
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.rejections import finding
from kvpilot_operator.decide.trial.ending import roll_back
from kvpilot_operator.probes.codec import Baseline as ProbeBaseline
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.render.names import engine_url
from kvpilot_operator.state.decision import Find, Measure, Request
from kvpilot_operator.state.snapshot import Captured, NothingKept, ProbeFailed, Snapshot
from kvpilot_operator.state.status import Baseline, Canary

# After a probe that ended in an error the next waits this long, times the errors so far.
ERROR_BACKOFF_SECONDS = 10

Asked = tuple[Request | None, ProbeBaseline | None]
"""The next request, and a baseline to keep."""


def probe(draft: Draft, s: Snapshot, spec: Spec) -> Asked:
    """Take in the finished probe and name the next one."""
    drift.begin(draft, spec)
    if s.probes.fault is not None:
        _refuse_canary(draft, s, spec, s.probes.fault)
        return None, None
    captured = _take_result(draft, s, spec)
    return _next(draft, s, spec), captured


def _next(draft: Draft, s: Snapshot, spec: Spec) -> Request | None:
    canary = draft.status.canary
    if canary is not None and (_backing_off(s, canary) or _waits_for_pause_to_end(spec, canary)):
        return None
    searching = baseline.wanted(draft, s, spec)
    if searching is not None:
        return searching
    if canary is None:
        return drift.check(draft, s, spec)
    kept = baseline.known(draft, s)
    pods = s.ready_pods(canary.revision)
    if kept is None or not pods or canary.stage != "Probing" or canary.verdict != "Pending":
        return None
    pod = s.pod_to_ask(pods)
    return Measure(
        identity=f"{_measure_identity(canary, kept)}/{pod.name}",
        pod=pod.name,
        url=engine_url(pod.ip),
        model=spec.model.served_name,
        config_map=kept.config_map,
    )


def _take_result(draft: Draft, s: Snapshot, spec: Spec) -> ProbeBaseline | None:
    result, canary = s.probe_result, draft.status.canary
    if result is None or result.outcome is None:
        return None
    outcome = result.outcome
    asked = _next(draft, s, spec)
    if asked is None or asked.identity != result.request.identity or isinstance(outcome, NothingKept):
        return None
    refused = None if isinstance(asked, Measure) else s.rejection("ConfigMap", asked.config_map)
    if isinstance(outcome, Captured) and refused is not None and not outcome.adopted:
        outcome = ProbeFailed("BaselineNotKept", finding([refused]).message)
    if isinstance(outcome, Captured):
        return baseline.take(draft, s, spec, outcome)
    if canary is None:
        if isinstance(asked, Measure):
            drift.take(draft, s, spec, asked, outcome)
        return None
    if canary.stage != "Probing" or canary.verdict != "Pending" or isinstance(asked, Find):
        return None
    kept = baseline.known(draft, s)
    if isinstance(outcome, ProbeFailed):
        _count_error(draft, s, spec, canary, outcome)
    elif kept is not None:
        _judge(draft, s, spec, canary, asked.pod, outcome, kept)
    return None


def _judge(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, pod: str, found: Measurement, kept: Baseline) -> None:
    judgement = judge(found, kept, spec.accuracy)
    draft.set_accuracy(last=measured(s, found, judgement, revision=canary.revision, dtype=canary.dtype, pod=pod))
    if judgement.verdict == "Inconclusive":
        _count_error(draft, s, spec, canary, ProbeFailed(judgement.reason, judgement.message), inconclusive=True)
        return
    if judgement.verdict == "Passed":
        draft.set_canary(verdict="Passed", reason=judgement.reason, message=judgement.message)
        draft.record(
            "Judge", "CanaryPassed", judgement.message, from_dtype=canary.from_dtype, to_dtype=canary.dtype
        )  # fmt: skip
        return
    failures = canary.failures + 1
    if failures >= spec.accuracy.failure_limit:
        draft.set_canary(failures=failures)
        roll_back(draft, s, spec, "Failed", judgement.reason, judgement.message)
    else:
        draft.set_canary(failures=failures, stage_time=s.now, message=judgement.message)


def _count_error(
    draft: Draft, s: Snapshot, spec: Spec, canary: Canary, failed: ProbeFailed, *, inconclusive: bool = False
) -> None:
    errors = canary.errors + 1
    if failed.reason == "BaselineLost":
        draft.set_accuracy(baseline=None)
    if errors >= spec.accuracy.consecutive_error_limit:
        draft.set_canary(errors=errors)
        roll_back(draft, s, spec, "Inconclusive" if inconclusive else "Error", failed.reason, failed.message)
        return
    draft.set_canary(errors=errors, stage_time=s.now, message=failed.message)
    draft.event("ProbeError", f"{failed.reason}: {failed.message} ({errors} so far)", warning=True)


def _refuse_canary(draft: Draft, s: Snapshot, spec: Spec, fault: str) -> None:
    canary = draft.status.canary
    if canary is not None and canary.stage in ("Starting", "Probing"):
        roll_back(draft, s, spec, "Error", "ProbeSetInvalid", fault)


def _measure_identity(canary: Canary, kept: Baseline) -> str:
    return f"measure/{kept.identity}/{canary.revision}/{canary.errors + canary.failures}"


def _waits_for_pause_to_end(spec: Spec, canary: Canary) -> bool:
    """A canary that has used up its limits is not rolled back while the rollout is paused, nor probed for ever."""
    used_up = canary.failures >= spec.accuracy.failure_limit or canary.errors >= spec.accuracy.consecutive_error_limit
    return spec.rollout.paused and used_up


def _backing_off(s: Snapshot, canary: Canary) -> bool:
    wait = timedelta(seconds=ERROR_BACKOFF_SECONDS * canary.errors)
    return canary.errors > 0 and s.now < canary.stage_time + wait
