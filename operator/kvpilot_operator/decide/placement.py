"""Which objects must exist? Deployments by revision, the Service's selector, the disruption budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.probing import reference_revision
from kvpilot_operator.decide.target import Target, render
from kvpilot_operator.render.engine import startup_budget_seconds
from kvpilot_operator.render.objects import deployment, disruption_budget, service
from kvpilot_operator.state.decision import Manifest, Objects
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Status


def place(draft: Draft, s: Snapshot, spec: Spec, target: Target, replicas: int) -> Objects:
    """The objects of the decided status, in the order in which they are applied: engines before traffic."""
    wanted = _replicas(draft, s, spec, replicas)
    templates = _templates(draft, s, spec, target, wanted)
    traffic = traffic_revision(draft.status, s, replicas)
    apply: list[Manifest] = [
        deployment(s.key, s.uid, template, wanted[name], startup_budget_seconds(spec))
        for name, template in templates.items()
    ]
    apply.append(service(s.key, s.uid, traffic))
    if s.server.pod_disruption_budgets and replicas > spec.disruption.min_available:
        apply.append(disruption_budget(s.key, s.uid, traffic, spec.disruption.min_available))
    scale = {name: count for name, count in wanted.items() if name not in templates}
    return Objects(tuple(apply), scale, frozenset(wanted))


def traffic_revision(status: Status, s: Snapshot, replicas: int) -> str:
    """The one revision that gets requests: the canary's only once it is promoted and all its replicas answer."""
    stable, canary = status.stable, status.canary
    if stable is None:
        raise LookupError("a service without a stable revision has no traffic")
    if canary is not None and canary.stage == "Promoting":
        ready = len(s.ready_pods(canary.revision))
        if s.traffic == canary.revision or ready >= replicas:
            return canary.revision
    return stable.revision


def _replicas(draft: Draft, s: Snapshot, spec: Spec, replicas: int) -> Mapping[str, int]:
    status = draft.status
    wanted: dict[str, int] = {}
    reference = reference_revision(draft, s, spec)
    if reference is not None:
        wanted[reference] = 1
    canary = status.canary
    if canary is not None:
        if canary.stage == "Promoting":
            wanted[canary.revision] = replicas
        elif canary.stage != "RollingBack" or s.traffic == canary.revision:
            wanted[canary.revision] = 1
    if status.stable is not None:
        wanted[status.stable.revision] = replicas
    return wanted


def _templates(
    draft: Draft, s: Snapshot, spec: Spec, target: Target, wanted: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Templates of the wanted revisions that the current spec still renders; older ones can only be scaled."""
    dtypes = {target.dtype, spec.kv_cache.baseline}
    dtypes |= {part.dtype for part in (draft.status.stable, draft.status.canary) if part is not None}
    rendered = dict(render(s, spec, dtype) for dtype in sorted(dtypes))
    return {name: rendered[name] for name in wanted if name in rendered}
