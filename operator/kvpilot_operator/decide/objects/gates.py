"""Decide the readiness gates of pods (docs/decisions/0030).

A canary's pods have a closed readiness gate. It opens once the written status lets their revision serve. Later pods of
that revision have no gate.
"""

from dataclasses import replace
from typing import TypeVar

from kvpilot_operator.api.words import Stage
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.render.workloads import DEPLOYMENT
from kvpilot_operator.state.decision import Ungating
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.status import Canary

D = TypeVar("D", bound=Draft)


def admit(c: Context) -> Context:
    """Decide which pods' readiness gates to open and which to close."""
    if c.stable is None:
        return c
    wanted = [(pod, _gate(c, pod)) for pod in c.snapshot.pods if pod.admitted is not None and not pod.terminating]
    gates = {pod.name: open_ for pod, open_ in wanted if open_ not in (None, pod.admitted)}
    return replace(c, gates=gates, ungating=_ungating(c))


def admit_serving(draft: D) -> D:
    """Open the gates of revisions that already get requests, and close no gate. Used while the spec is invalid."""
    s, stable, canary = draft.snapshot, draft.stable, draft.canary
    sent = canary is not None and _opens(draft, canary)
    serving = {s.traffic, *(one.revision for one in (stable, canary if sent else None) if one is not None)}
    pods = (pod for pod in s.pods if pod.admitted is False and not pod.terminating)
    return replace(draft, gates={pod.name: True for pod in pods if pod.revision in serving}, ungating=_ungating(draft))


def _ungating(draft: Draft) -> Ungating | None:
    """Return the next change that removes the readiness gate from the serving Deployment's template, or None.

    The Deployment has the gate because it began as a canary. A changed template makes a Deployment replace its pods,
    unless its ReplicaSet has the same template. So it is paused while both templates change, and resumed once its
    controller has observed that they are equal.
    """
    view = None if draft.stable is None else draft.snapshot.deployments.get(draft.stable.revision)
    if view is None or view.kind != DEPLOYMENT.name or not (view.has_gate or view.paused):
        return None
    return Ungating(view.revision, paused=True if view.has_gate else False if view.in_step else None)


def _gate(c: Context, pod: PodView) -> bool | None:
    """Return True to open the pod's readiness gate, False to close it, None to leave it unchanged."""
    if c.stable is not None and pod.revision == c.stable.revision:
        return True
    canary = c.canary
    if canary is None or pod.revision != canary.revision:
        return None
    if canary.stage == Stage.ROLLING_BACK and traffic.selected(c) == traffic.EVERY_REVISION:
        # The canary's pods serve until stable pods replace them. So leave their open gates open, and open no others.
        return None
    return _opens(c, canary)


def _opens(draft: Draft, canary: Canary) -> bool:
    """Return True to open the canary's readiness gates. Multi-node groups restart without a gate instead."""
    view = draft.snapshot.deployments.get(canary.revision)
    return traffic.has_passed(draft, canary.revision) and (view is None or view.kind == DEPLOYMENT.name)
