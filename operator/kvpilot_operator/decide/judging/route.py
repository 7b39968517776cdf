"""What does the user's HTTPRoute look like with a canary's share in it, and what did it look like without?

Weights of a rule are relative to one another, so a rule that names our Service beside other backends is scaled by 100
while a canary takes part: a weight W of ours becomes W x (100 - share) and W x share, every other one V x 100. That
keeps what the others get, and can be read back without a note of what stood there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.names import HTTP_ROUTE_API, canary_service
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import RouteView, Snapshot

Rule = Mapping[str, Any]

# The Gateway API allows weights up to 1,000,000.
MAX_WEIGHT = 10_000
# The longest name of a Service (RFC 1123 label).
_MAX_NAME = 63


def weighted(rules: Sequence[Rule], namespace: str, service: str, canary: str, share: int) -> tuple[Rule, ...]:
    """`rules` with `share` percent of what goes to `service` sent to `canary`; 0 leaves them as the user wrote them."""
    written = tuple(_without(rule, namespace, service, canary) for rule in rules)
    if not share:
        return written
    return tuple(_with(rule, namespace, service, canary, share) for rule in written)


def carries(route: RouteView | None, namespace: str, backend: str) -> bool:
    """Whether a rule of the route names the Service `backend`."""
    return route is not None and any(_is(ref, namespace, backend) for rule in route.rules for ref in _refs(rule))


def fault(s: Snapshot, spec: Spec) -> str | None:
    """What is wrong with spec.canary.routeRef, and the remedy; None where a canary's share can be set in it."""
    name, service, lent = spec.canary.route_ref, s.key.name, canary_service(s.key.name)
    if name is None:
        return " was removed during the trial; put it back, or end the trial"
    if len(lent) > _MAX_NAME:
        long = f"the Service {lent} would have a name of more than {_MAX_NAME} characters"
        return f": {long}; give the service a shorter one, or remove routeRef"
    if not s.server.http_routes:
        missing = f"this API server does not serve {HTTP_ROUTE_API}"
        return f": {missing}; install the Gateway API and restart the operator, or remove routeRef"
    unread = s.unread(Question.ROUTE)
    if unread is not None:
        return f": HTTPRoute {name} could not be read: {unread}"
    if s.route is None:
        return f": namespace {s.key.namespace} has no HTTPRoute {name}; create it, or remove routeRef"
    written = weighted(s.route.rules, s.key.namespace, service, lent, 0)
    ours = [rule for rule in written if _sends(rule, s.key.namespace, service)]
    if not ours:
        none = f"no rule of HTTPRoute {name} sends to Service {service}"
        return f": {none}; add it to a rule's backendRefs, or remove routeRef"
    largest = max(_weight(ref) for rule in ours for ref in _refs(rule))
    if largest <= MAX_WEIGHT:
        return None
    heavy = f"HTTPRoute {name} has a weight of {largest} beside Service {service}"
    return f": {heavy}; a share can be taken of weights up to {MAX_WEIGHT}: make them smaller"


def _with(rule: Rule, namespace: str, service: str, canary: str, share: int) -> Rule:
    if not _sends(rule, namespace, service):
        return rule
    refs: list[Rule] = []
    for ref in _refs(rule):
        weight = _weight(ref)
        if not _is(ref, namespace, service):
            refs.append({**ref, "weight": weight * 100})
        elif weight:
            refs.append({**ref, "weight": weight * (100 - share)})
            refs.append({**ref, "name": canary, "weight": weight * share})
        else:
            refs.append(ref)
    return {**rule, "backendRefs": refs}


def _without(rule: Rule, namespace: str, service: str, canary: str) -> Rule:
    refs = _refs(rule)
    lent = [ref for ref in refs if _is(ref, namespace, canary)]
    if not lent:
        return rule
    merged = [_merged(ref, lent, namespace, service) for ref in refs if ref not in lent]
    # A weight that is no multiple of 100 was written by somebody else since: then all stand as they were written.
    scaled = all(_weight(ref) % 100 == 0 for ref in merged)
    kept = [_unscaled(ref) for ref in merged] if scaled else [ref for ref in refs if ref not in lent]
    return {**rule, "backendRefs": kept}


def _merged(ref: Rule, lent: Sequence[Rule], namespace: str, service: str) -> Rule:
    if not _is(ref, namespace, service):
        return ref
    back = sum(_weight(other) for other in lent if other.get("port") == ref.get("port"))
    return {**ref, "weight": _weight(ref) + back}


def _unscaled(ref: Rule) -> Rule:
    weight = _weight(ref) // 100
    kept = {key: value for key, value in ref.items() if key != "weight"}
    return kept if weight == 1 else {**kept, "weight": weight}


def _sends(rule: Rule, namespace: str, service: str) -> bool:
    return any(_is(ref, namespace, service) and _weight(ref) > 0 for ref in _refs(rule))


def _refs(rule: Rule) -> Sequence[Rule]:
    return rule.get("backendRefs") or ()


def _weight(ref: Rule) -> int:
    weight = ref.get("weight")
    return weight if isinstance(weight, int) else 1


def _is(ref: Rule, namespace: str, service: str) -> bool:
    return (
        ref.get("name") == service
        and ref.get("kind", "Service") == "Service"
        and ref.get("group", "") == ""
        and ref.get("namespace", namespace) == namespace
    )
