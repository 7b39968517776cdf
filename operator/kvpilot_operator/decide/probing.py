"""What must be asked of the engines, and what did they answer? Baseline, control and the canary's measurement."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.rollout import roll_back
from kvpilot_operator.decide.target import render
from kvpilot_operator.decide.verdict import judge
from kvpilot_operator.probes.codec import Baseline as ProbeBaseline
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.render.names import ENGINE_PORT, baseline_name
from kvpilot_operator.state.decision import Capture, Measure
from kvpilot_operator.state.snapshot import Captured, PodView, ProbeFailed, Snapshot
from kvpilot_operator.state.status import Baseline, Bucket, Canary, Measured, Sample, clip

# After a probe that ended in an error the next waits this long, times the errors so far.
ERROR_BACKOFF_SECONDS = 10


def probe(draft: Draft, s: Snapshot, spec: Spec) -> tuple[Capture | Measure | None, ProbeBaseline | None]:
    """Take in the finished probe and name the next one: (request, baseline to keep)."""
    if s.probes.fault is not None:
        _refuse_canary(draft, s, spec, s.probes.fault)
        return None, None
    captured = _take_result(draft, s, spec)
    return _next(draft, s, spec), captured


def reference_revision(draft: Draft, s: Snapshot, spec: Spec) -> str | None:
    """The revision of a 16-bit replica that is needed only to capture the baseline, where no 16-bit one serves."""
    canary, stable = draft.status.canary, draft.status.stable
    if canary is None or canary.stage not in ("Starting", "Probing") or _baseline(draft, s) is not None:
        return None
    if s.probes.fault is not None or (stable is not None and stable.dtype == spec.kv_cache.baseline):
        return None
    return render(s, spec, spec.kv_cache.baseline)[0]


def _baseline(draft: Draft, s: Snapshot) -> Baseline | None:
    kept = draft.status.accuracy.baseline
    return kept if kept is not None and kept.identity == s.probes.identity else None


def _next(draft: Draft, s: Snapshot, spec: Spec) -> Capture | Measure | None:
    canary = draft.status.canary
    probing = canary is not None and canary.stage == "Probing" and canary.verdict == "Pending"
    baseline = _baseline(draft, s)
    if baseline is None:
        if not probing and spec.kv_cache.mode != "Auto":
            return None
        return _capture(draft, s, spec, canary)
    if canary is None or not probing or _backing_off(s, canary):
        return None
    pods = s.ready_pods(canary.revision)
    if not pods:
        return None
    return Measure(
        identity=_measure_identity(canary, baseline),
        url=_url(pods[0]),
        model=spec.model.served_name,
        config_map=baseline.config_map,
    )


def _capture(draft: Draft, s: Snapshot, spec: Spec, canary: Canary | None) -> Capture | None:
    if canary is not None and _backing_off(s, canary):
        return None
    source = _reference_pod(draft, s, spec)
    if source is None:
        return None
    return Capture(
        identity=_capture_identity(s, canary),
        url=_url(source),
        model=spec.model.served_name,
        baseline=s.probes.identity,
    )


def _reference_pod(draft: Draft, s: Snapshot, spec: Spec) -> PodView | None:
    stable = draft.status.stable
    revisions = [stable.revision] if stable is not None and stable.dtype == spec.kv_cache.baseline else []
    reference = reference_revision(draft, s, spec)
    if reference is not None:
        revisions.append(reference)
    return next((pod for name in revisions for pod in s.ready_pods(name)), None)


def _take_result(draft: Draft, s: Snapshot, spec: Spec) -> ProbeBaseline | None:
    result, canary = s.probe_result, draft.status.canary
    if result is None:
        return None
    baseline = _baseline(draft, s)
    if isinstance(result.outcome, Captured):
        if baseline is None and result.identity == _capture_identity(s, canary):
            _keep(draft, s, spec, result.outcome)
            return result.outcome.baseline
        return None
    if canary is None or canary.stage != "Probing" or canary.verdict != "Pending":
        return None
    expected = _capture_identity(s, canary) if baseline is None else _measure_identity(canary, baseline)
    if result.identity != expected:
        return None
    if isinstance(result.outcome, ProbeFailed):
        _count_error(draft, s, spec, canary, result.outcome)
    elif baseline is not None:
        _judge(draft, s, spec, canary, result.outcome, baseline)
    return None


def _keep(draft: Draft, s: Snapshot, spec: Spec, captured: Captured) -> None:
    control = captured.control
    draft.set_accuracy(
        baseline=Baseline(
            config_map=baseline_name(s.key.name, s.probes.identity),
            identity=s.probes.identity,
            dtype=spec.kv_cache.baseline,
            captured_time=s.now,
            prompts=control.prompts,
            positions=control.positions,
            control_mean_kl_micronats=control.mean_kl_micronats,
            control_p99_kl_micronats=control.p99_kl_micronats,
            control_top1_agreement_permille=control.top1_agreement_permille,
        )
    )
    draft.record(
        "KeepBaseline",
        "BaselineCaptured",
        f"{control.positions} positions of {control.prompts} prompts in {spec.kv_cache.baseline}; the control: "
        f"mean KL {control.mean_kl_micronats / 1000:.2f} millinats, top-1 agreement "
        f"{control.top1_agreement_permille / 10:.1f}%",
    )


def _judge(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, measured: Measurement, baseline: Baseline) -> None:
    judgement = judge(measured, baseline, spec.accuracy)
    draft.set_accuracy(last=_measured(s, canary, measured, judgement.verdict, judgement.excess_kl_micronats))
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


def _measured(s: Snapshot, canary: Canary, m: Measurement, verdict: str, excess: int) -> Measured:
    sample = m.sample
    return Measured(
        revision=canary.revision,
        dtype=canary.dtype,
        verdict=verdict,  # type: ignore[arg-type]
        probe_time=s.now,
        prompts=m.prompts,
        positions=m.positions,
        mean_kl_micronats=m.mean_kl_micronats,
        p99_kl_micronats=m.p99_kl_micronats,
        excess_kl_micronats=excess,
        top1_agreement_permille=m.top1_agreement_permille,
        buckets=tuple(
            Bucket(
                from_position=b.from_position,
                to_position=b.to_position,
                mean_kl_micronats=b.mean_kl_micronats,
                top1_agreement_permille=b.top1_agreement_permille,
            )
            for b in m.buckets
        ),
        sample=None
        if sample is None
        else Sample(prompt=clip(sample.prompt, 500), stable=clip(sample.stable, 500), canary=clip(sample.canary, 500)),
    )


def _capture_identity(s: Snapshot, canary: Canary | None) -> str:
    return f"capture/{s.probes.identity}/{canary.errors if canary is not None else 0}"


def _measure_identity(canary: Canary, baseline: Baseline) -> str:
    return f"measure/{baseline.identity}/{canary.revision}/{canary.errors + canary.failures}"


def _backing_off(s: Snapshot, canary: Canary) -> bool:
    wait = timedelta(seconds=ERROR_BACKOFF_SECONDS * canary.errors)
    return canary.errors > 0 and s.now < canary.stage_time + wait


def _url(pod: PodView) -> str:
    host = f"[{pod.ip}]" if pod.ip and ":" in pod.ip else pod.ip
    return f"http://{host}:{ENGINE_PORT}"
