"""What of a ruling is written down: each step that is taken with what was weighed, and each hold as it begins."""

from __future__ import annotations

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging.arbiter import Ruling
from kvpilot_operator.decide.target import Target
from kvpilot_operator.state.snapshot import Snapshot


def ruled(draft: Draft, s: Snapshot, spec: Spec, ruling: Ruling, target: Target) -> None:
    """Write the ruling of this pass into the journal where it is news."""
    if s.status.stable is None:
        if target.warning is not None:
            draft.event("PreflightWarning", target.warning, warning=True)
        return
    step = ruling.chosen
    if spec.kv_cache.mode == "Recommend":
        _recommend(draft, s, ruling)
    elif step.action in ("ScaleOut", "ScaleIn"):
        draft.record(
            step.action, ruling.reason, ruling.message, options=ruling.options, event=f"{step.action}{ruling.reason}"
        )
    _hold(draft, s, ruling, target)


def _recommend(draft: Draft, s: Snapshot, ruling: Ruling) -> None:
    step = ruling.wanted or ruling.chosen
    stable = s.status.stable
    now = (draft.status.kv_cache.recommended_dtype, draft.status.scaling.recommended_replicas)
    before = (s.status.kv_cache.recommended_dtype, s.status.scaling.recommended_replicas)
    if now == before or step.action == "Stay" or stable is None:
        return
    draft.record(
        "Recommend",
        ruling.reason,
        f"recommended, not applied: {ruling.message}",
        from_dtype=stable.dtype,
        to_dtype=step.dtype,
        options=ruling.options,
        event="Recommended",
    )


def _hold(draft: Draft, s: Snapshot, ruling: Ruling, target: Target) -> None:
    """Say once why nothing moves although the load or the spec asks for it."""
    if target.held is None or draft.status.canary is not None:
        return
    before = s.status.condition("Progressing")
    newest = draft.status.decisions[0] if draft.status.decisions else None
    told = newest is not None and (newest.action, newest.reason) == ("Hold", target.reason)
    if told or (before is not None and before.reason == target.reason):
        return
    ours = ruling.hold is not None and target.held == ruling.hold
    draft.record(
        "Hold",
        target.reason,
        ruling.message if ours else target.held,
        warning=True,
        options=ruling.options if ours else (),
    )
