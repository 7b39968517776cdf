"""Does the serving dtype still answer as it did? One replica is probed each period, after promotion, for ever.

    watching --Failed, failureLimit in a row--> drifted --Passed--> watching
        |  any run without a verdict: errors + 1, nothing else

The state is `status.accuracy` alone (checkedTime, failures, errors, last), written once a run, so an operator restart
neither loses a count nor counts twice. Nothing is probed while a canary has the prober, while the baseline dtype itself
serves (there is nothing to compare it with, nor anything to fall back to), or while the spec asks for another revision
than serves: the kept answers may then be another model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import baseline
from kvpilot_operator.decide.accuracy.measured import measured
from kvpilot_operator.decide.accuracy.verdict import judge
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging.ladder import ACCURACY_REASONS, denial
from kvpilot_operator.decide.target import render
from kvpilot_operator.decide.trial.denial import deny
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.render.names import engine_url
from kvpilot_operator.state.decision import Measure
from kvpilot_operator.state.snapshot import PodView, ProbeFailed, Snapshot
from kvpilot_operator.state.status import Accuracy, Baseline, Stable, Status

REASON = "AccuracyDrifted"
# A probe that gave way to users for too long says nothing of the engine: no warning is worth it.
BUSY = "EngineBusy"


def begin(draft: Draft, spec: Spec) -> None:
    """Start counting anew when another revision serves, and forget the counts where nothing is watched."""
    accuracy, stable = draft.status.accuracy, draft.status.stable
    if stable is None:
        return
    if stable.dtype == spec.kv_cache.baseline:
        if (accuracy.checked_time, accuracy.failures, accuracy.errors) != (None, 0, 0):
            draft.set_accuracy(checked_time=None, failures=0, errors=0)
    elif accuracy.checked_time is None or accuracy.checked_time < stable.since:
        draft.set_accuracy(checked_time=stable.since, failures=0, errors=0)


def drifted(status: Status, spec: Spec) -> bool:
    """Whether the serving replicas failed `failureLimit` runs in a row."""
    return status.accuracy.failures >= spec.accuracy.failure_limit


def check(draft: Draft, s: Snapshot, spec: Spec) -> Measure | None:
    """The run that is due, or None."""
    watched = _watched(draft, s, spec)
    if watched is None or not due(s, spec, draft.status.accuracy):
        return None
    stable, kept, pods = watched
    accuracy, running = draft.status.accuracy, s.probe_result
    # Replicas that come and go meanwhile do not end a run of one that stays.
    pod = s.pod_to_ask(pods)
    if running is None or running.request.identity != _identity(kept, stable, pod, accuracy):
        pod = next_pod(pods, accuracy, stable.revision)
    return Measure(
        identity=_identity(kept, stable, pod, accuracy),
        pod=pod.name,
        url=engine_url(pod.ip),
        model=spec.model.served_name,
        config_map=kept.config_map,
        serving=True,
    )


def take(draft: Draft, s: Snapshot, spec: Spec, asked: Measure, outcome: Measurement | ProbeFailed) -> None:
    """Count the run that `check` asked for."""
    watched = _watched(draft, s, spec)
    if watched is None:
        return
    stable, kept, _ = watched
    if isinstance(outcome, ProbeFailed):
        _count_error(draft, spec, asked.pod, outcome)
    else:
        _count_verdict(draft, s, spec, stable, kept, asked.pod, outcome)


def due(s: Snapshot, spec: Spec, accuracy: Accuracy) -> bool:
    """Whether a new period has begun since the last run. Periods begin at a moment of their own for each service.

    So a fleet that was promoted, or an operator that was restarted, at one moment does not probe at one moment.
    """
    return accuracy.checked_time is not None and _period(s, spec, s.now) > _period(s, spec, accuracy.checked_time)


def next_pod(pods: Sequence[PodView], accuracy: Accuracy, revision: str) -> PodView:
    """The replica whose turn it is: in the order of names, one after the last, so that each one's GPU gets its turn.

    One that has just failed is asked again: another's pass would only hide it.
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


def _watched(draft: Draft, s: Snapshot, spec: Spec) -> tuple[Stable, Baseline, tuple[PodView, ...]] | None:
    stable, kept = draft.status.stable, baseline.known(draft, s)
    if stable is None or kept is None or stable.dtype == spec.kv_cache.baseline:
        return None
    if s.traffic != stable.revision or render(s, spec, stable.dtype)[0] != stable.revision:
        return None
    pods = s.ready_pods(stable.revision)
    return (stable, kept, pods) if pods else None


def _count_error(draft: Draft, spec: Spec, pod: str, failed: ProbeFailed) -> None:
    if failed.reason == "BaselineLost":
        draft.set_accuracy(baseline=None)
        draft.event("BaselineLost", failed.message, warning=True)
        return
    errors, limit = draft.status.accuracy.errors + 1, spec.accuracy.consecutive_error_limit
    draft.set_accuracy(checked_time=draft.now, errors=errors)
    text = f"pod {pod}: {failed.reason}: {failed.message} ({errors} runs in a row without a verdict)"
    if errors == limit:
        draft.event("AccuracyUnknown", text, warning=True)
    elif errors < limit and failed.reason != BUSY:
        draft.event("ProbeError", text, warning=True)


def _count_verdict(
    draft: Draft, s: Snapshot, spec: Spec, stable: Stable, kept: Baseline, pod: str, found: Measurement
) -> None:
    judgement = judge(found, kept, spec.accuracy)
    if judgement.verdict == "Inconclusive":
        _count_error(draft, spec, pod, ProbeFailed(judgement.reason, judgement.message))
        return
    before = drifted(draft.status, spec)
    failures = draft.status.accuracy.failures + 1 if judgement.verdict == "Failed" else 0
    last = measured(s, found, judgement, revision=stable.revision, dtype=stable.dtype, pod=pod)
    draft.set_accuracy(checked_time=s.now, failures=failures, errors=0, last=last)
    if drifted(draft.status, spec):
        text = f"{stable.dtype} on pod {pod}: {judgement.message}; {failures} failed runs in a row"
        _act_on_drift(draft, s, spec, stable.dtype, text, new=not before)
    elif before:
        draft.event("AccuracyRecovered", f"{stable.dtype} on pod {pod}: {judgement.message}")


def _act_on_drift(draft: Draft, s: Snapshot, spec: Spec, dtype: str, text: str, *, new: bool) -> None:
    """Hand over to the choice of the target: it leaves a dtype that is denied for its accuracy, though it serves."""
    seconds = spec.rollout.deny_seconds
    if spec.accuracy.on_failure == "Rollback" and seconds > 0:
        # A denial for another reason, such as its latency, keeps a dtype from being tried and does not end its service.
        standing = denial(dtype, spec, s.node, draft.status.kv_cache.denied, s.now)
        if standing is None or standing.reason not in ACCURACY_REASONS:
            draft.record("RollBack", REASON, f"{text}; {dtype} gives way", from_dtype=dtype, warning=True)
            deny(draft, s, spec, dtype, REASON, text, seconds)
    elif new:
        why = "accuracy.onFailure is Report" if seconds > 0 else "rollout.denySeconds is 0, nothing is denied"
        draft.event(REASON, f"{text}; {dtype} keeps serving: {why}", warning=True)


def _identity(kept: Baseline, stable: Stable, pod: PodView, accuracy: Accuracy) -> str:
    since = int(accuracy.checked_time.timestamp()) if accuracy.checked_time is not None else 0
    return f"check/{kept.identity}/{stable.revision}/{pod.name}/{since}"


def _period(s: Snapshot, spec: Spec, time: datetime) -> int:
    """The number of the service's period that `time` lies in; its start is shifted by a hash of the service's uid."""
    seconds = spec.accuracy.period_seconds
    shift = int.from_bytes(hashlib.sha256(s.uid.encode()).digest()[:8], "big") % seconds
    return (int(time.timestamp()) - shift) // seconds
