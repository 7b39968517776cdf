"""Drift of the serving dtype: one replica is probed each period after its promotion.

    watching --Failed, failureLimit in a row--> drifted --Passed--> watching
        |  any run without a verdict: errors + 1, nothing else

The state is `status.accuracy` alone (checkedTime, failures, errors, last), written once a run, so an operator restart
does not lose a count or count twice. No probe runs while a canary uses the prober. None runs either while the baseline
dtype itself serves, because there is no safer dtype to compare with. No probe runs either while the spec asks for
another revision than the serving one, because the kept answers may be another model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action, Reason, Verdict
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.accuracy.reported import as_asked
from kvpilot_operator.decide.accuracy.verdict import Judgement
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.steps.ladder import ACCURACY_REASONS
from kvpilot_operator.state.accuracy import Accuracy, Baseline, Measured
from kvpilot_operator.state.decision import Measure, ProbeFailed
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Stable


def begin(c: Context) -> Context:
    """Reset the counts when another revision serves, and drop them if no watch is requested."""
    accuracy, stable = c.status.accuracy, c.stable
    if stable is None:
        return c
    if stable.dtype == c.spec.kv_cache.baseline:
        counted = (accuracy.checked_time, accuracy.failures, accuracy.errors) != (None, 0, 0)
        return c.set_accuracy(checked_time=None, failures=0, errors=0) if counted else c
    if accuracy.checked_time is None or accuracy.checked_time < stable.since:
        return c.set_accuracy(checked_time=stable.since, failures=0, errors=0)
    return c


def drifted(c: Context) -> bool:
    """Return True if the serving replicas failed `failureLimit` runs in a row."""
    return c.status.accuracy.failures >= c.spec.accuracy.failure_limit


def check(c: Context, kept: Baseline) -> Measure | None:
    """Return the run that is due, or None."""
    stable, accuracy, running = c.stable, c.status.accuracy, c.snapshot.probe_result
    pods = _watched(c)
    if stable is None or not pods or not due(c.snapshot, c.spec, accuracy):
        return None
    # Continue the run on its replica, even if other replicas are added or removed.
    pod = c.snapshot.pod_to_ask(pods)
    if running is None or running.request.identity != _identity(kept, stable, pod, accuracy):
        pod = next_pod(pods, accuracy, stable.revision)
    return baseline.measure(c, kept, pod, stable.dtype, _identity(kept, stable, pod, accuracy), serving=True)


def count(c: Context, last: Measured, judgement: Judgement) -> Context:
    """Count the verdict on a serving replica, and act on drift."""
    pod, before = last.pod or "", drifted(c)
    if judgement.verdict == Verdict.INCONCLUSIVE:
        return count_error(c, pod, ProbeFailed(judgement.reason, judgement.message))
    failures = c.status.accuracy.failures + 1 if judgement.verdict == Verdict.FAILED else 0
    c = c.set_accuracy(checked_time=c.now, failures=failures, errors=0, last=last)
    text = f"{last.dtype} on pod {pod}: {judgement.message}"
    if drifted(c):
        return _act_on_drift(c, last.dtype, f"{text}; {failures} failed runs in a row", new=not before)
    return c.event("AccuracyRecovered", text) if before else c


def count_error(c: Context, pod: str, failed: ProbeFailed) -> Context:
    """Count a run without a verdict, and warn once if there are too many."""
    if failed.reason == Reason.BASELINE_LOST:
        return c.set_accuracy(baseline=None).event(Reason.BASELINE_LOST, failed.message, warning=True)
    errors, limit = c.status.accuracy.errors + 1, c.spec.accuracy.consecutive_error_limit
    c = c.set_accuracy(checked_time=c.now, errors=errors)
    text = f"pod {pod}: {failed.reason}: {failed.message} ({errors} runs in a row without a verdict)"
    if errors == limit:
        return c.event("AccuracyUnknown", text, warning=True)
    # A probe that yielded to user requests for too long says nothing about the engine, so do not warn.
    quiet = errors > limit or failed.reason == Reason.ENGINE_BUSY
    return c if quiet else c.event("ProbeError", text, warning=True)


def due(s: Snapshot, spec: Spec, accuracy: Accuracy) -> bool:
    """Return True if a new period has begun since the last run.

    Periods start at a different time for each service, so that services promoted together are not probed together.
    """
    return accuracy.checked_time is not None and _period(s, spec, s.now) > _period(s, spec, accuracy.checked_time)


def next_pod(pods: Sequence[PodView], accuracy: Accuracy, revision: str) -> PodView:
    """Return the next replica in the order of names, so that every GPU gets its turn.

    Probe a failed replica again first, because a pass of another replica would hide the failure.
    """
    ordered = sorted(pods, key=lambda pod: pod.name)
    last = accuracy.last
    before = last.pod if last is not None and last.revision == revision and last.pod is not None else ""
    if accuracy.failures and not accuracy.errors:
        again = next((pod for pod in ordered if pod.name == before), None)
        if again is not None:
            return again
    done = sum(pod.name <= before for pod in ordered)
    return ordered[(done + accuracy.errors) % len(ordered)]


def _watched(c: Context) -> tuple[PodView, ...]:
    """Return the serving replicas if they run the spec's revision and not the baseline."""
    s, stable = c.snapshot, c.stable
    if stable is None or stable.dtype == c.spec.kv_cache.baseline:
        return ()
    asked = s.traffic == stable.revision == c.render(stable.dtype).name
    return s.ready_pods(stable.revision) if asked and as_asked(s, stable.revision, stable.dtype) else ()


def _act_on_drift(c: Context, dtype: str, text: str, *, new: bool) -> Context:
    """Deny the dtype for its accuracy. The next choice of a target then leaves it, although it serves."""
    seconds, reason = c.spec.rollout.deny_seconds, Reason.ACCURACY_DRIFTED
    if c.spec.accuracy.on_failure == "Rollback" and seconds > 0:
        # A denial for another reason, such as latency, only prevents trials. The dtype may continue to serve.
        standing = c.denial(dtype)
        if standing is not None and standing.reason in ACCURACY_REASONS:
            return c
        c = c.record(Action.ROLL_BACK, reason, f"{text}; {dtype} gives way", from_dtype=dtype, warning=True)
        return c.deny(dtype, reason, text, seconds)
    why = "accuracy.onFailure is Report" if seconds > 0 else "rollout.denySeconds is 0, nothing is denied"
    return c.event(reason, f"{text}; {dtype} keeps serving: {why}", warning=True) if new else c


def _identity(kept: Baseline, stable: Stable, pod: PodView, accuracy: Accuracy) -> str:
    since = int(accuracy.checked_time.timestamp()) if accuracy.checked_time is not None else 0
    return f"check/{kept.identity}/{stable.revision}/{pod.name}/{since}"


def _period(s: Snapshot, spec: Spec, time: datetime) -> int:
    """Return the number of the period that `time` lies in; a hash of the uid shifts its start."""
    seconds = spec.accuracy.period_seconds
    shift = int.from_bytes(hashlib.sha256(s.uid.encode()).digest()[:8], "big") % seconds
    return (int(time.timestamp()) - shift) // seconds
