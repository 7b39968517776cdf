"""Which 16-bit answers is accuracy measured against? Kept ones if there are any, else captured from a 16-bit replica.

A baseline belongs to a model, its revision, the baseline dtype and the probe sets' content, never to an image. It is
captured from a revision that the present spec renders with that dtype: any other may hold another model.
"""

from __future__ import annotations

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.target import render
from kvpilot_operator.probes.codec import Baseline as ProbeBaseline
from kvpilot_operator.render.names import baseline_name, engine_url
from kvpilot_operator.state.decision import Capture, Find
from kvpilot_operator.state.snapshot import Captured, NothingKept, Snapshot
from kvpilot_operator.state.status import Baseline, Canary


def known(draft: Draft, s: Snapshot) -> Baseline | None:
    """The baseline of the present model and probe sets, if the status names it."""
    baseline = draft.status.accuracy.baseline
    return baseline if baseline is not None and baseline.identity == s.probes.identity else None


def on_trial(canary: Canary | None) -> bool:
    """Whether there is a canary whose accuracy is still to be judged."""
    return canary is not None and canary.stage in ("Starting", "Probing") and canary.verdict == "Pending"


def wanted(draft: Draft, s: Snapshot, spec: Spec) -> Find | Capture | None:
    """The request that leads to a baseline, or None where one is known or nobody needs one.

    Auto captures it ahead of need, while 16-bit replicas serve; otherwise the first canary makes it worth having. A
    dtype that serves without one, after a lost status, can only be watched if one is found.
    """
    if known(draft, s) is not None:
        return None
    canary, stable = draft.status.canary, draft.status.stable
    trial = on_trial(canary)
    reference = render(s, spec, spec.kv_cache.baseline)[0]
    pods = s.ready_pods(reference)
    config_map = baseline_name(s.key.name, s.probes.identity)
    if pods and (trial or spec.kv_cache.mode == "Auto"):
        pod = s.pod_to_ask(pods)
        return Capture(
            identity=f"capture/{s.probes.identity}/{canary.errors if canary is not None else 0}/{pod.name}",
            pod=pod.name,
            url=engine_url(pod.ip),
            model=spec.model.served_name,
            baseline=s.probes.identity,
            config_map=config_map,
            serving=s.traffic == reference,
        )
    if trial or (stable is not None and stable.dtype != spec.kv_cache.baseline):
        return Find(_find_identity(s), s.probes.identity, config_map)
    return None


def reference_revision(draft: Draft, s: Snapshot, spec: Spec) -> str | None:
    """The revision of a 16-bit replica that is borrowed to capture the baseline, where none is kept and none serves."""
    canary, stable = draft.status.canary, draft.status.stable
    if s.probes.fault is not None or not on_trial(canary) or known(draft, s) is not None:
        return None
    reference = render(s, spec, spec.kv_cache.baseline)[0]
    if reference in {part.revision for part in (stable, canary) if part is not None}:
        return None
    # What is borrowed already stays until the baseline is there: the search's answer is not repeated.
    return reference if reference in s.deployments or _nothing_kept(s) else None


def take(draft: Draft, s: Snapshot, spec: Spec, captured: Captured) -> ProbeBaseline | None:
    """Name the baseline in the status; return it where it must be written first."""
    control = captured.baseline.control
    if control is None or captured.baseline.identity != s.probes.identity or known(draft, s) is not None:
        return None
    draft.set_accuracy(
        baseline=Baseline(
            config_map=baseline_name(s.key.name, s.probes.identity),
            identity=s.probes.identity,
            dtype=captured.baseline.dtype,
            captured_time=control.captured,
            prompts=control.prompts,
            positions=control.positions,
            control_mean_kl_micronats=control.mean_kl_micronats,
            control_p99_kl_micronats=control.p99_kl_micronats,
            control_top1_agreement_permille=control.top1_agreement_permille,
        )
    )
    draft.record(
        "KeepBaseline",
        "BaselineAdopted" if captured.adopted else "BaselineCaptured",
        f"{control.positions} positions of {control.prompts} prompts in {captured.baseline.dtype}"
        f"{f', captured at {control.captured:%Y-%m-%dT%H:%M:%SZ}' if captured.adopted else ''}; the control: mean KL "
        f"{control.mean_kl_micronats / 1000:.2f} millinats, top-1 agreement "
        f"{control.top1_agreement_permille / 10:.1f}%",
    )
    return None if captured.adopted else captured.baseline


def _find_identity(s: Snapshot) -> str:
    return f"find/{s.probes.identity}"


def _nothing_kept(s: Snapshot) -> bool:
    result = s.probe_result
    return (
        result is not None and result.request.identity == _find_identity(s) and isinstance(result.outcome, NothingKept)
    )
