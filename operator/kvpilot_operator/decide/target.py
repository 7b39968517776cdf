"""Which revision should serve? The user's dtype, or the arbiter's, rendered into a pod template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.judging.arbiter import Ruling
from kvpilot_operator.decide.judging.capacity import smaller
from kvpilot_operator.decide.judging.ladder import ACCURACY_REASONS, denial, rungs
from kvpilot_operator.decide.judging.veto import veto
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Denied, Option, Stable, Status

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
    options: tuple[Option, ...] = ()
    """What was weighed before this target, where it is a step of the arbiter's."""


def choose(s: Snapshot, spec: Spec, ruling: Ruling) -> Target:
    """The target of this pass."""
    left = _left_behind(s, spec)
    if left is not None:
        return left
    if spec.kv_cache.mode == "Fixed":
        return _fixed(s, spec)
    return _laddered(s, spec, ruling)


def unchanged(s: Snapshot, spec: Spec) -> Target:
    """What is under way, where no target could be chosen: nothing new is started."""
    part = s.status.canary or s.status.stable
    dtype, name = (part.dtype, part.revision) if part is not None else (spec.kv_cache.baseline, "")
    held = "no target could be chosen: what serves stays as it is"
    return Target(dtype, name, None, "NotChosen", held, held, s.status.kv_cache.recommended_dtype)


def render(s: Snapshot, spec: Spec, dtype: str) -> tuple[str, dict[str, Any]]:
    """Revision and pod template of the current spec with this dtype."""
    template = pod_template(s.key.name, spec, dtype)
    return revision(template), template


def _left_behind(s: Snapshot, spec: Spec) -> Target | None:
    """Where the dtype that serves is denied for its answers: the next safer one, whatever the dwell and the mode.

    A canary that already leads away from it goes on; one that leads further down does not.
    """
    stable, canary = s.status.stable, s.status.canary
    if stable is None:
        return None
    standing = _standing(s, spec, stable.dtype)
    if standing is None or standing.reason not in ACCURACY_REASONS:
        return None
    if canary is not None and canary.stage != "RollingBack" and smaller(stable.dtype, canary.dtype):
        return _guarded(s, spec, canary.dtype, canary.reason, canary.message, recommended=canary.dtype)
    why = f"{stable.dtype} serves and is denied for its answers: {standing.message}"
    safer = _safer(s, spec, stable)
    if safer is None:
        held = f"{why}; every safer dtype is denied, too. Set spec.rollout.denySeconds to 0 to try them again"
        return _guarded(s, spec, stable.dtype, "AccuracyDrifted", held, held=held)
    return _guarded(s, spec, safer, "AccuracyDrifted", f"{why}; {safer} takes its place", recommended=safer)


def _safer(s: Snapshot, spec: Spec, stable: Stable) -> str | None:
    """The next larger dtype of the ladder that is not ruled out; with a fixed dtype there is only the baseline."""
    ladder = rungs(spec, s.node, s.model, s.status.kv_cache.denied, s.now)
    if spec.kv_cache.mode == "Fixed":
        ladder = ladder[:1]
    larger = [rung.dtype for rung in ladder if rung.outcome is None and smaller(stable.dtype, rung.dtype)]
    return larger[-1] if larger else None


def _standing(s: Snapshot, spec: Spec, dtype: str) -> Denied | None:
    return denial(dtype, spec, s.node, s.status.kv_cache.denied, s.now)


def _fixed(s: Snapshot, spec: Spec) -> Target:
    wanted = spec.kv_cache.dtype
    assert wanted is not None  # noqa: S101 - the API's rule: Fixed comes with a dtype
    stable = s.status.stable
    standing = _standing(s, spec, wanted)
    against = veto(wanted, spec, s.node, s.model)
    warning = against.message if against is not None else None
    if standing is not None and standing.reason in ACCURACY_REASONS and stable is not None and stable.dtype != wanted:
        held = (
            f"spec.kvCache.dtype {wanted} is denied until {standing.until:%Y-%m-%dT%H:%M:%SZ}: {standing.message}; "
            f"{stable.dtype} keeps serving. Choose another dtype, or set spec.rollout.denySeconds to 0 to try again"
        )
        return _guarded(s, spec, stable.dtype, "DtypeDenied", held, held=held, warning=warning)
    return _guarded(s, spec, wanted, "FixedDtype", f"spec.kvCache.dtype is {wanted}", warning=warning)


def _laddered(s: Snapshot, spec: Spec, ruling: Ruling) -> Target:
    stable, canary = s.status.stable, s.status.canary
    if stable is None:
        baseline = spec.kv_cache.baseline
        return _guarded(s, spec, baseline, "Baseline", f"starts with the baseline dtype {baseline}")
    if canary is not None and canary.stage != "RollingBack":
        return _guarded(s, spec, canary.dtype, canary.reason, canary.message, recommended=canary.dtype)
    step = ruling.chosen
    recommended = (ruling.wanted or step).dtype
    if spec.kv_cache.mode == "Recommend":
        text = "mode Recommend: nothing is changed"
        return _guarded(s, spec, stable.dtype, "Steady", text, recommended=recommended)
    if step.action in ("DtypeDown", "DtypeUp"):
        taken = _guarded(s, spec, step.dtype, ruling.reason, ruling.message, recommended=recommended)
        return replace(taken, options=ruling.options)
    if ruling.hold is not None:
        return _guarded(
            s, spec, stable.dtype, ruling.reason, ruling.hold, held=ruling.hold, recommended=recommended
        )  # fmt: skip
    return _guarded(s, spec, stable.dtype, "Steady", "no other dtype is called for", recommended=recommended)


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
    if wait == 0 and last.generation == s.generation:
        # Nothing is denied, yet nothing has changed either: a canary that fails in a loop helps nobody.
        wait = RETRY_SECONDS
    until = last.stage_time + timedelta(seconds=wait)
    if s.now >= until:
        return None
    return (
        f"this very revision ({last.dtype}) was rolled back: {last.reason}: {last.message}; it may be tried again at "
        f"{until:%Y-%m-%dT%H:%M:%SZ}, or after a change of the spec"
    )
