"""Which revision should serve? The user's dtype, or the ladder's, rendered into a pod template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.ladder import Choice, denial, step_down, veto
from kvpilot_operator.decide.workload import Workload
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Denied, Status

# A revision that failed for want of capacity, or for errors, may be tried again after this long.
RETRY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Target:
    """The revision to converge to. `template` is None where nothing new may be started (`held` says why)."""

    dtype: str
    revision: str
    template: dict[str, Any] | None
    reason: str
    message: str
    held: str | None = None
    recommended: str | None = None
    warning: str | None = None


def choose(s: Snapshot, spec: Spec, workload: Workload) -> Target:
    """The target of this pass."""
    if spec.kv_cache.mode == "Fixed":
        return _fixed(s, spec)
    return _laddered(s, spec, workload)


def render(s: Snapshot, spec: Spec, dtype: str) -> tuple[str, dict[str, Any]]:
    """Revision and pod template of the current spec with this dtype."""
    template = pod_template(s.key.name, spec, dtype)
    return revision(template), template


def standing_denial(s: Snapshot, spec: Spec) -> Callable[[str], Denied | None]:
    """Looks up a dtype's denial as of now."""
    return lambda dtype: denial(dtype, spec, s.node, s.status.kv_cache.denied, s.now)


def _fixed(s: Snapshot, spec: Spec) -> Target:
    wanted = spec.kv_cache.dtype
    assert wanted is not None  # noqa: S101 - the API's rule: Fixed comes with a dtype
    stable = s.status.stable
    standing = standing_denial(s, spec)(wanted)
    warning = veto(wanted, s.node)
    if (
        standing is not None
        and standing.reason == "AccuracyRegressed"
        and stable is not None
        and stable.dtype != wanted
    ):
        held = (
            f"spec.kvCache.dtype {wanted} is denied until {standing.until:%Y-%m-%dT%H:%M:%SZ}: {standing.message}; "
            f"{stable.dtype} keeps serving. Choose another dtype, or set spec.rollout.denySeconds to 0 to try again"
        )
        return _guarded(s, spec, stable.dtype, "DtypeDenied", held, held=held, warning=warning)
    return _guarded(s, spec, wanted, "FixedDtype", f"spec.kvCache.dtype is {wanted}", warning=warning)


def _laddered(s: Snapshot, spec: Spec, workload: Workload) -> Target:
    stable, canary = s.status.stable, s.status.canary
    if stable is None:
        baseline = spec.kv_cache.baseline
        return _guarded(s, spec, baseline, "Baseline", f"starts with the baseline dtype {baseline}")
    if canary is not None and canary.stage != "RollingBack":
        return _guarded(s, spec, canary.dtype, canary.reason, canary.message, recommended=canary.dtype)
    choice = _step(s, spec, stable.dtype, workload)
    recommended = choice.dtype if choice is not None else stable.dtype
    if choice is None or spec.kv_cache.mode == "Recommend":
        text = workload.message if choice is None else f"recommended, not applied: {choice.message}"
        return _guarded(s, spec, stable.dtype, "Steady", text, recommended=recommended)
    dwelling = _dwelling(s, spec)
    if dwelling is not None:
        return _guarded(s, spec, stable.dtype, "Dwelling", dwelling, held=dwelling, recommended=recommended)
    return _guarded(
        s, spec, choice.dtype, "MemoryPressured", f"{workload.message}; {choice.message}", recommended=recommended
    )


def _step(s: Snapshot, spec: Spec, current: str, workload: Workload) -> Choice | None:
    if workload.kind != "MemoryBound":
        return None
    return step_down(spec, current, workload, s.node, standing_denial(s, spec))


def _dwelling(s: Snapshot, spec: Spec) -> str | None:
    changed = s.status.kv_cache.changed_time
    if changed is None:
        return None
    until = changed + timedelta(seconds=spec.kv_cache.min_dwell_seconds)
    if s.now >= until:
        return None
    return f"the last dtype change was at {changed:%H:%M:%SZ}; the next may come at {until:%Y-%m-%dT%H:%M:%SZ}"


def _guarded(
    s: Snapshot,
    spec: Spec,
    dtype: str,
    reason: str,
    message: str,
    *,
    held: str | None = None,
    recommended: str | None = None,
    warning: str | None = None,
) -> Target:
    """Render the target; a revision that has just failed is not tried again, the stable one stays."""
    name, template = render(s, spec, dtype)
    stable = s.status.stable
    failed = _failed_before(s.status, name, s, spec)
    if failed is not None and stable is not None and stable.revision != name:
        return Target(stable.dtype, stable.revision, None, "RevisionFailed", failed, failed, recommended, warning)
    return Target(dtype, name, template, reason, message, held, recommended, warning)


def _failed_before(status: Status, name: str, s: Snapshot, spec: Spec) -> str | None:
    last = status.last_canary
    if last is None or last.revision != name or last.stage != "RolledBack" or last.reason == "Superseded":
        return None
    wait = spec.rollout.deny_seconds if last.verdict == "Failed" else min(RETRY_SECONDS, spec.rollout.deny_seconds)
    until = last.stage_time + timedelta(seconds=wait)
    if s.now >= until:
        return None
    return (
        f"this very revision ({last.dtype}) was rolled back: {last.reason}: {last.message}; it may be tried again at "
        f"{until:%Y-%m-%dT%H:%M:%SZ}, or after a change of the spec"
    )
