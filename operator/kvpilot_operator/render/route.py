"""Set a canary's share in the rules of an HTTPRoute, or copy requests to the canary, and remove both again.

Weights in a rule are relative to one another, so during a trial all weights of a rule with our backend are multiplied
by 100. Our weight W becomes W x (100 - share) for the stable backend and W x share for the canary's, where `share` is
in percent. Any other weight V becomes V x 100. After the trial, the original weights are computed from these.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

# Largest weight in a user's rule. Scaled by 100, it is the largest that the Gateway API allows.
MAX_WEIGHT = 10_000


class Backend(NamedTuple):
    """The backend, a Service or an InferencePool, to which routes send the requests of one service."""

    namespace: str
    name: str
    kinds: Kinds = SERVICES

    @property
    def canary(self) -> "Backend":
        """Return the backend that takes the canary's share."""
        return self._replace(name=canary_service(self.name))

    def named_by(self, ref: Rule) -> bool:
        """Return True if a rule's backendRef names this backend."""
        here = ref.get("name") == self.name and ref.get("namespace", self.namespace) == self.namespace
        return here and _kind(ref) in self.kinds


def backend(s: Snapshot) -> Backend:
    """Return the service's own backend. It includes InferencePools if the spec asks for one or one still exists."""
    asked = s.spec is not None and s.spec.inference_pool is not None
    kinds = SERVICES | POOLS if asked or s.status.inference_pool is not None else SERVICES
    return Backend(s.key.namespace, s.key.name, kinds)


def weighted(rules: Sequence[Rule], ours: Backend, share: int, mirrored: int = 0) -> tuple[Rule, ...]:
    """Return the rules with `share` percent of our requests sent to the canary, and `mirrored` percent copied to it.

    If both are 0, return the rules as the user wrote them.
    """
    written = tuple(_without(rule, ours) for rule in rules)
    if mirrored:
        written = tuple(_mirroring(rule, ours, mirrored) for rule in written)
    return tuple(_with(rule, ours, share) for rule in written) if share else written


def carries(route: RouteView | None, named: Backend) -> bool:
    """Return True if a rule of the route names the backend, or copies requests to it."""
    rules = route.rules if route is not None else ()
    return any(named.named_by(ref) for rule in rules for ref in (*_refs(rule), *map(_mirror_of, _filters(rule))))


def route_fault(s: Snapshot, spec: Spec) -> str | None:
    """Return the reason why the route cannot hold a canary's share, with the remedy, or None.

    The text begins with the name of the field in the spec.
    """
    field, ref, service, lent = "spec.canary.routeRef", spec.canary.route_ref, s.key.name, canary_service(s.key.name)
    if ref is None:
        return f"{field} was removed during the trial; put it back, or end the trial"
    unread = s.unread(Question.ROUTE)
    if unread is not None:
        return f"{field}: HTTPRoute {ref.name} could not be read: {unread}"
    if not s.server.http_routes:
        missing = f"this API server does not serve {HTTP_ROUTE_API}"
        return f"{field}: {missing}; install the Gateway API, or remove routeRef"
    if spec.inference_pool is not None and not s.server.inference_pools:
        missing = f"this API server does not serve {INFERENCE_POOL_API}, which spec.inferencePool needs"
        return f"{field}: {missing}; install the Gateway API Inference Extension, or remove spec.inferencePool"
    refused = next((pool for pool in (service, lent) if s.rejection("InferencePool", pool) is not None), None)
    if spec.inference_pool is not None and refused is not None:
        why = f"InferencePool {refused}, a backend of the route, is refused"
        return f"{field}: {why}; the condition Stalled has the remedy"
    if s.route is None:
        return f"{field}: namespace {s.key.namespace} has no HTTPRoute {ref.name}; create it, or remove routeRef"
    own = backend(s)
    ours = [rule for rule in weighted(s.route.rules, own, 0) if _sends(rule, own)]
    if not ours:
        alone = own.kinds == SERVICES
        named = "Service" if alone else "Service or InferencePool"
        none = f"no rule of HTTPRoute {ref.name} sends requests to {named} {service}"
        unpooled = alone and carries(s.route, own._replace(kinds=POOLS))
        pools = ", set spec.inferencePool" if unpooled else ""
        return f"{field}: {none}; add it to a rule's backendRefs{pools}, or remove routeRef"
    largest = max(_weight(ref) for rule in ours for ref in _refs(rule))
    if largest <= MAX_WEIGHT:
        return None
    heavy = f"HTTPRoute {ref.name} has a weight of {largest} in a rule with {service}"
    return f"{field}: {heavy}; kvpilot can split weights up to {MAX_WEIGHT}: make them smaller"


def _with(rule: Rule, ours: Backend, share: int) -> Rule:
    if not _sends(rule, ours):
        return rule
    refs: list[Rule] = []
    for ref in _refs(rule):
        weight = _weight(ref)
        if not ours.named_by(ref):
            refs.append({**ref, "weight": weight * 100})
        elif weight:
            refs.append({**ref, "weight": weight * (100 - share)})
            refs.append({**ref, "name": ours.canary.name, "weight": weight * share})
        else:
            refs.append(ref)
    return {**rule, "backendRefs": refs}


def _mirroring(rule: Rule, ours: Backend, percent: int) -> Rule:
    if not _sends(rule, ours):
        return rule
    # Write fields that the API server would default, so that the stored rule equals the rendered one.
    ref = {"group": "", "kind": "Service", "name": ours.canary.name, "port": SERVICE_PORT}
    some = {"percent": percent} if percent < 100 else {}
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": ref, **some}}
    return {**rule, "filters": [*_filters(rule), mirror]}


def _without(rule: Rule, ours: Backend) -> Rule:
    filters = [one for one in _filters(rule) if not ours.canary.named_by(_mirror_of(one))]
    if len(filters) < len(_filters(rule)):
        rule = {key: value for key, value in rule.items() if key != "filters"} | (
            {"filters": filters} if filters else {}
        )
    refs = _refs(rule)
    lent = [ref for ref in refs if ours.canary.named_by(ref)]
    if not lent:
        return rule
    merged = [_merged(ref, lent, ours) for ref in refs if ref not in lent]
    # If a weight is not a multiple of 100, another writer set it: keep all weights as written.
    scaled = all(_weight(ref) % 100 == 0 for ref in merged)
    kept = [_unscaled(ref) for ref in merged] if scaled else [ref for ref in refs if ref not in lent]
    return {**rule, "backendRefs": kept}


def _merged(ref: Rule, lent: Sequence[Rule], ours: Backend) -> Rule:
    if not ours.named_by(ref):
        return ref
    back = sum(_weight(one) for one in lent if (_kind(one), one.get("port")) == (_kind(ref), ref.get("port")))
    return {**ref, "weight": _weight(ref) + back}


def _unscaled(ref: Rule) -> Rule:
    weight = _weight(ref) // 100
    kept = {key: value for key, value in ref.items() if key != "weight"}
    return kept if weight == 1 else {**kept, "weight": weight}


def _sends(rule: Rule, ours: Backend) -> bool:
    return any(ours.named_by(ref) and _weight(ref) > 0 for ref in _refs(rule))


def _refs(rule: Rule) -> Sequence[Rule]:
    return rule.get("backendRefs") or ()


def _filters(rule: Rule) -> Sequence[Rule]:
    return rule.get("filters") or ()


def _mirror_of(one: Rule) -> Rule:
    """Return the backend that a filter copies requests to; empty for other filters."""
    ref: Rule = (one.get("requestMirror") or {}).get("backendRef") or {}
    return ref


def _weight(ref: Rule) -> int:
    weight = ref.get("weight")
    return weight if isinstance(weight, int) else 1


def _kind(ref: Rule) -> tuple[str, str]:
    return ref.get("group", ""), ref.get("kind", "Service")
