"""Services whose volume claim a Job fills before engines start, that Job, and decisions about both."""

from dataclasses import replace
from typing import Any

from kvpilot_operator.api.words import CachePhase
from kvpilot_operator.decide import decide
from kvpilot_operator.render.prefetch import job
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.objects import PodView, PrefetchView
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Condition, Status
from support.services import KEY, manifest, spec_of

JOB = ("Job", "chat-prefetch")
FIXED = {"mode": "Fixed", "dtype": "auto"}
FILLED = {"weights": {"size": "100Gi"}, "prefetch": True}
GB = 10**9


def obj(**spec: Any) -> dict[str, Any]:
    return manifest(**{"kvCache": FIXED, "cache": FILLED, **spec})


def made(**spec: Any) -> dict[str, Any]:
    return job(KEY, "u-1", spec_of(obj(**spec)), assigned_user=False)


def pod_of(made: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def view(content: str = "", **changes: Any) -> PrefetchView:
    """Return a running Job of the current spec that has reported no progress."""
    whole = content or made()["metadata"]["annotations"]["kvpilot.io/identity"]
    return replace(PrefetchView(whole, False, None, (worker(),), None, None), **changes)


def worker(**changes: Any) -> PodView:
    base = PodView("chat-prefetch-x", "", "10.0.0.9", "node-1", True, False, 0, None, None, None)
    return replace(base, **changes)


def said(decision: Decision, kind: str) -> Condition:
    found = decision.status.condition(kind)
    assert found is not None
    return found


def applied(decision: Decision, kind: str) -> list[Any]:
    return [] if decision.objects is None else [one for one in decision.objects.apply if one["kind"] == kind]


def deleted(decision: Decision) -> list[str]:
    return [] if decision.objects is None else [name for _, kind, name in decision.objects.absent if kind == "Job"]


def kept(s: Snapshot, phase: CachePhase) -> Snapshot:
    """Return a snapshot whose status says how far the claim is filled for this spec."""
    decided = decide(replace(s, prefetch=None)).status
    assert decided.cache is not None
    cache = type(decided.cache)(identity=decided.cache.identity, phase=phase)
    status = Status(cache=cache, stable=s.status.stable, conditions=decided.conditions)
    return replace(s, status=status)
