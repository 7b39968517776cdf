"""What does an HTTPRoute look like with a canary's share in it, and what did it look like without?

A user's is changed from what it is; of ours (spec.route) the rules without a share are made here, too.

Its backends are Services or, with spec.inferencePool, InferencePools: a share of NAME goes to NAME-canary of the kind.
Weights of a rule are relative to one another, so a rule that names our backend beside other backends is scaled by 100
while a canary takes part: a weight W of ours becomes W x (100 - share) and W x share, every other one V x 100. That
keeps what the others get, and can be read back without a note of what stood there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, SERVICE_PORT, canary_service
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.objects import RouteView
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

Rule = Mapping[str, Any]
Kinds = frozenset[tuple[str, str]]
"""Group and kind of backends."""

SERVICES: Kinds = frozenset({("", "Service")})
POOLS: Kinds = frozenset({(INFERENCE_POOL_API.partition("/")[0], "InferencePool")})

# The Gateway API allows weights up to 1,000,000.
MAX_WEIGHT = 10_000
# The longest name of a Service (RFC 1123 label).
_MAX_NAME = 63


def kinds(s: Snapshot) -> Kinds:
    """The kinds of our backends; a pool is one for as long as it is there."""
    asked = s.spec is not None and s.spec.inference_pool is not None
    return SERVICES | POOLS if asked or s.status.inference_pool is not None else SERVICES


def weighted(
    rules: Sequence[Rule], namespace: str, service: str, canary: str, share: int, of: Kinds = SERVICES
) -> tuple[Rule, ...]:
    """`rules` with `share` percent of what goes to `service`, a backend of one of the kinds, sent to `canary`; 0 leaves
    them as the user wrote them."""
    written = tuple(_without(rule, namespace, service, canary, of) for rule in rules)
    if not share:
        return written
    return tuple(_with(rule, namespace, service, canary, share, of) for rule in written)


def own_rules(s: Snapshot) -> tuple[Rule, ...] | None:
    """The rules of the route of ours, without a share: to the pool where it is asked for and there, else to the
    Service; None where neither is ours, or it is not known."""
    if s.spec is None or s.unread(Question.POOLS) is not None:
        return None
    there = {kind: s.objects.get((kind, s.key.name)) for kind in ("InferencePool", "Service")}
    ours = {kind for kind, one in there.items() if one is not None and one.owned}
    if s.spec.inference_pool is not None and "InferencePool" in ours:
        ref = {"group": INFERENCE_POOL_API.partition("/")[0], "kind": "InferencePool", "name": s.key.name}
        return ({"backendRefs": [ref]},)
    return ({"backendRefs": [{"name": s.key.name, "port": SERVICE_PORT}]},) if "Service" in ours else None


def not_accepted(route: RouteView) -> str | None:
    """Why no Gateway takes the route as it is; None where one does, or has not said yet."""
    refused = [one for one in route.parents if one.accepted is False]
    if not refused or len(refused) < len(route.parents):
        return None
    return "; ".join(f"{one.name} says {one.message}" for one in refused)


def field_of(spec: Spec) -> str:
    """The field that asks for the route; both, where neither does any more."""
    if spec.route is not None:
        return "spec.route"
    return "spec.canary.routeRef" if spec.canary.route_ref is not None else "spec.route or spec.canary.routeRef"


def carries(route: RouteView | None, namespace: str, backend: str, of: Kinds = SERVICES) -> bool:
    """Whether a rule of the route names the backend of one of these kinds."""
    return route is not None and any(_is(ref, namespace, backend, of) for rule in route.rules for ref in _refs(rule))


def fault(s: Snapshot, spec: Spec) -> str | None:
    """What is wrong with the route of `field_of`, and the remedy; None where a canary's share can be set in it."""
    name, service, lent = spec.route_of(s.key.name), s.key.name, canary_service(s.key.name)
    remove = "remove route" if spec.route is not None else "remove routeRef"
    if name is None:
        return " was removed during the trial; put it back, or end the trial"
    if len(lent) > _MAX_NAME:
        long = f"the Service {lent} would have a name of more than {_MAX_NAME} characters"
        return f": {long}; give the service a shorter one, or {remove}"
    unread = s.unread(Question.ROUTE)
    if unread is not None:
        return f": HTTPRoute {name} could not be read: {unread}"
    if not s.server.http_routes:
        missing = f"this API server does not serve {HTTP_ROUTE_API}"
        return f": {missing}; install the Gateway API, or {remove}"
    if spec.inference_pool is not None and not s.server.inference_pools:
        missing = f"this API server does not serve {INFERENCE_POOL_API}, which spec.inferencePool needs"
        return f": {missing}; install the Gateway API Inference Extension, or remove spec.inferencePool"
    refused = next((pool for pool in (service, lent) if s.rejection("InferencePool", pool) is not None), None)
    if spec.inference_pool is not None and refused is not None:
        return f": InferencePool {refused}, which it is to send to, is refused; Stalled says why and what to do"
    if s.route is None and spec.route is not None:
        return f": HTTPRoute {name} of kvpilot's is not there; Stalled says why where it stays so"
    if s.route is None:
        return f": namespace {s.key.namespace} has no HTTPRoute {name}; create it, or {remove}"
    # Of a user's route a Gateway may dislike what is none of our business.
    closed = not_accepted(s.route) if spec.route is not None else None
    if closed is not None:
        return f": HTTPRoute {name} is accepted by no Gateway: {closed}; mend what it names, or {remove}"
    of = kinds(s)
    written = weighted(s.route.rules, s.key.namespace, service, lent, 0, of)
    ours = [rule for rule in written if _sends(rule, s.key.namespace, service, of)]
    if not ours:
        named = "Service" if of == SERVICES else "Service or InferencePool"
        none = f"no rule of HTTPRoute {name} sends to {named} {service}"
        pools = (
            ", set spec.inferencePool" if of == SERVICES and carries(s.route, s.key.namespace, service, POOLS) else ""
        )
        return f": {none}; add it to a rule's backendRefs{pools}, or {remove}"
    largest = max(_weight(ref) for rule in ours for ref in _refs(rule))
    if largest <= MAX_WEIGHT:
        return None
    heavy = f"HTTPRoute {name} has a weight of {largest} beside {service}"
    return f": {heavy}; a share can be taken of weights up to {MAX_WEIGHT}: make them smaller"


def _with(rule: Rule, namespace: str, service: str, canary: str, share: int, of: Kinds) -> Rule:
    if not _sends(rule, namespace, service, of):
        return rule
    refs: list[Rule] = []
    for ref in _refs(rule):
        weight = _weight(ref)
        if not _is(ref, namespace, service, of):
            refs.append({**ref, "weight": weight * 100})
        elif weight:
            refs.append({**ref, "weight": weight * (100 - share)})
            refs.append({**ref, "name": canary, "weight": weight * share})
        else:
            refs.append(ref)
    return {**rule, "backendRefs": refs}


def _without(rule: Rule, namespace: str, service: str, canary: str, of: Kinds) -> Rule:
    refs = _refs(rule)
    lent = [ref for ref in refs if _is(ref, namespace, canary, of)]
    if not lent:
        return rule
    merged = [_merged(ref, lent, namespace, service, of) for ref in refs if ref not in lent]
    # A weight that is no multiple of 100 was written by somebody else since: then all stand as they were written.
    scaled = all(_weight(ref) % 100 == 0 for ref in merged)
    kept = [_unscaled(ref) for ref in merged] if scaled else [ref for ref in refs if ref not in lent]
    return {**rule, "backendRefs": kept}


def _merged(ref: Rule, lent: Sequence[Rule], namespace: str, service: str, of: Kinds) -> Rule:
    if not _is(ref, namespace, service, of):
        return ref
    back = sum(_weight(one) for one in lent if (_kind(one), one.get("port")) == (_kind(ref), ref.get("port")))
    return {**ref, "weight": _weight(ref) + back}


def _unscaled(ref: Rule) -> Rule:
    weight = _weight(ref) // 100
    kept = {key: value for key, value in ref.items() if key != "weight"}
    return kept if weight == 1 else {**kept, "weight": weight}


def _sends(rule: Rule, namespace: str, service: str, of: Kinds) -> bool:
    return any(_is(ref, namespace, service, of) and _weight(ref) > 0 for ref in _refs(rule))


def _refs(rule: Rule) -> Sequence[Rule]:
    return rule.get("backendRefs") or ()


def _weight(ref: Rule) -> int:
    weight = ref.get("weight")
    return weight if isinstance(weight, int) else 1


def _kind(ref: Rule) -> tuple[str, str]:
    return ref.get("group", ""), ref.get("kind", "Service")


def _is(ref: Rule, namespace: str, service: str, of: Kinds) -> bool:
    return ref.get("name") == service and _kind(ref) in of and ref.get("namespace", namespace) == namespace
