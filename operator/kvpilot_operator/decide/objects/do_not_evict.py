"""Which pods should a cluster autoscaler leave where they are? Those on trial, those borrowed, the one that is probed.

An eviction there ruins minutes of measuring and nothing else, so this is never a right to stay: it is derived anew in
every reconcile, ends with the trial's verdict, and a trial that stands still has none for long. `kubectl drain` does
not look at it at all.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from kvpilot_operator.api.words import ConditionType, Reason, Stage
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.state.decision import Find
from kvpilot_operator.state.questions import keeps_probe
from kvpilot_operator.state.snapshot import Snapshot

D = TypeVar("D", bound=Draft)

_JUDGED = (Stage.STARTING, Stage.PROBING, Stage.SHIFTING)
_SOON = timedelta(minutes=10)
"""So long somebody may take to mend a spec that is refused: its trial then goes on where it was."""


def mark(c: Context) -> Context:
    """What is judged now; of a trial that the user has paused nothing."""
    asked = None if c.request is None or isinstance(c.request, Find) else c.request.pod
    judged: set[str | None] = set()
    if c.canary is not None and c.canary.stage in _JUDGED and not c.spec.rollout.paused:
        judged = {c.canary.revision, baseline.borrowed(c)}
    pods = [p for p in c.snapshot.pods if not p.terminating]
    names = frozenset(p.name for p in pods if p.revision in judged or p.name == asked)
    # A probe that goes on goes on undisturbed.
    return replace(c, do_not_evict=names | _marked(c.snapshot) if keeps_probe(c.unanswered) else names)


def as_now(draft: D) -> D:
    """The pods that autoscalers are asked to leave alone already."""
    return replace(draft, do_not_evict=_marked(draft.snapshot))


def while_refused(draft: Draft) -> Draft:
    """As now for a trial that goes on once the spec is mended. One that nobody mends soon keeps no node."""
    told = draft.before.condition(ConditionType.STALLED)
    refused = told is not None and (told.status, told.reason) == ("True", Reason.SPEC_INVALID)
    since = told.last_transition_time if told is not None and refused else draft.now
    return as_now(draft) if draft.canary is not None and draft.now - since < _SOON else draft


def _marked(s: Snapshot) -> frozenset[str]:
    return frozenset(p.name for p in s.pods if p.do_not_evict and not p.terminating)
