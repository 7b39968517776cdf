"""Which pods should a cluster autoscaler leave where they are? Those on trial, and one that is being asked.

An eviction there ruins minutes of measuring and nothing else, so the shelter is short and never a right to stay:
it is derived anew in every pass, ends with the trial's verdict, and a trial that the user has paused has none.
`kubectl drain` does not look at it at all.
"""

from __future__ import annotations

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import baseline
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.state.decision import Find, Request
from kvpilot_operator.state.snapshot import Snapshot

_JUDGED = ("Starting", "Probing", "Shifting")


def sheltered(draft: Draft, s: Snapshot, spec: Spec, request: Request | None) -> frozenset[str]:
    """Names of the pods of a canary until its verdict, of those borrowed for its baseline, and of the one probed."""
    asked = None if request is None or isinstance(request, Find) else request.pod
    trial = _on_trial(draft, s, spec)
    return frozenset(p.name for p in s.pods if not p.terminating and (p.revision in trial or p.name == asked))


def already_sheltered(s: Snapshot) -> frozenset[str]:
    """Names of the pods that are sheltered now."""
    return frozenset(p.name for p in s.pods if p.sheltered and not p.terminating)


def _on_trial(draft: Draft, s: Snapshot, spec: Spec) -> tuple[str, ...]:
    canary = draft.status.canary
    if canary is None or canary.stage not in _JUDGED or spec.rollout.paused:
        return ()
    borrowed = baseline.reference_revision(draft, s, spec)
    return (canary.revision,) if borrowed is None else (canary.revision, borrowed)
