"""Watch the serving dtype for drift: answers that become worse than the limits after the promotion.

In each period, one serving replica is probed. `failureLimit` failed probes in a row count as drift. A probe without a
verdict counts only as an error. All state is in `status.accuracy`, which is written once per probe. Serving replicas
are not probed during a trial, while the baseline dtype serves, or while the serving revision is not the spec's.
"""

import hashlib
from collections.abc import Sequence

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


def begin(c: Context) -> Context:
    """Reset the counts of failures and errors when a new revision serves, and while the baseline dtype serves."""
    accuracy, checked, stable = c.status.accuracy, c.status.accuracy.checked_time, c.stable
    if stable is None:
        return c
    if stable.dtype == c.spec.kv_cache.baseline:
        counted = checked is not None or accuracy.failures or accuracy.errors
        return c.set_accuracy(checked_time=None, failures=0, errors=0) if counted else c
    begun = checked is not None and checked >= stable.since
    return c if begun else c.set_accuracy(checked_time=stable.since, failures=0, errors=0)


def drifted(c: Context) -> bool:
    """Return True if the serving replicas failed `failureLimit` probes in a row."""
    return c.status.accuracy.failures >= c.spec.accuracy.failure_limit


def check(c: Context, kept: Baseline) -> Measure | None:
    """Return the request for the periodic probe that is due, or None."""
    s, stable, accuracy = c.snapshot, c.stable, c.status.accuracy
    # Probe only the spec's revision. Another revision may run another model, for which the baseline does not hold.
    if stable is None or not s.traffic == stable.revision == c.render(stable.dtype).name:
        return None
    pods, checked = s.ready_pods(stable.revision), accuracy.checked_time
    if not pods or checked is None or not due(s, c.spec, accuracy):
        return None
    if stable.dtype == c.spec.kv_cache.baseline or not as_asked(s, stable.revision, stable.dtype):
        return None
    run = f"check/{kept.identity}/{stable.revision}/{{}}/{int(checked.timestamp())}"
    # Continue a running probe on its replica, even if other replicas are added or removed.
    pod = s.pod_to_ask(pods)
    if s.probe_result is None or s.probe_result.request.identity != run.format(pod.name):
        pod = next_pod(pods, accuracy, stable.revision)
    return baseline.measure(c, kept, pod, stable.dtype, run.format(pod.name), serving=True)


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
    """Count a probe without a verdict. Post warnings until `consecutiveErrorLimit` errors in a row are reached."""
    if failed.reason == Reason.BASELINE_LOST:
        return c.set_accuracy(baseline=None).event(Reason.BASELINE_LOST, failed.message, warning=True)
    errors, limit = c.status.accuracy.errors + 1, c.spec.accuracy.consecutive_error_limit
    c = c.set_accuracy(checked_time=c.now, errors=errors)
    text = f"pod {pod}: {failed.reason}: {failed.message} ({errors} runs in a row without a verdict)"
    if errors == limit:
        return c.event("AccuracyUnknown", text, warning=True)
    return c if errors > limit else c.event("ProbeError", text, warning=True)


def due(s: Snapshot, spec: Spec, accuracy: Accuracy) -> bool:
    """Return True if a new period has begun since the last probe.

    A hash of the service's uid shifts its periods, so that services are not all probed at the same time.
    """
    seconds = spec.accuracy.period_seconds
    shift = int.from_bytes(hashlib.sha256(s.uid.encode()).digest()[:8], "big") % seconds
    now, last = ((int(time.timestamp()) - shift) // seconds for time in (s.now, accuracy.checked_time or s.now))
    return now > last


def next_pod(pods: Sequence[PodView], accuracy: Accuracy, revision: str) -> PodView:
    """Return the replica to probe: the next one by name, or the same one if it has just failed.

    After a failure, a pass of another replica would reset the count of failures.
    """
    ordered, last = sorted(pods, key=lambda pod: pod.name), accuracy.last
    before = (last.pod or "") if last is not None and last.revision == revision else ""
    again = [pod for pod in ordered if pod.name == before and accuracy.failures and not accuracy.errors]
    done = sum(pod.name <= before for pod in ordered)
    return again[0] if again else ordered[(done + accuracy.errors) % len(ordered)]


def _act_on_drift(c: Context, dtype: str, text: str, *, new: bool) -> Context:
    """Deny the serving dtype if `onFailure` is Rollback, so that the next reconcile replaces it. Else post an event."""
    seconds, reason = c.spec.rollout.deny_seconds, Reason.ACCURACY_DRIFTED
    if c.spec.accuracy.on_failure == "Rollback" and seconds > 0:
        # Only a denial for accuracy makes kvpilot replace a serving dtype. An earlier denial, such as one for latency,
        # does not, so deny the dtype again.
        standing = c.denial(dtype)
        if standing is not None and standing.reason in ACCURACY_REASONS:
            return c
        c = c.record(Action.ROLL_BACK, reason, f"{text}; {dtype} gives way", from_dtype=dtype, warning=True)
        return c.deny(dtype, reason, text, seconds)
    why = "accuracy.onFailure is Report" if seconds > 0 else "rollout.denySeconds is 0, so nothing is denied"
    return c.event(reason, f"{text}; {dtype} keeps serving: {why}", warning=True) if new else c
