"""The InferencePools of a service and their endpoint pickers. See docs/decisions/0031."""

from __future__ import annotations

from kvpilot_operator.api.names import INFERENCE_POOL_API, canary_service
from kvpilot_operator.api.words import Reason
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.render.objects import inference_pool
from kvpilot_operator.render.route import POOLS, Backend, carries
from kvpilot_operator.state.decision import Cause, Manifest


def own_pool(c: Context, selected: str) -> Manifest | None:
    """Render the pool that selects the Service's pods. Return None if the spec asks for none, or the server has no
    pools."""
    s, asked = c.snapshot, c.spec.inference_pool
    if asked is None or not s.server.inference_pools:
        return None
    return inference_pool(s.key, s.uid, s.key.name, selected, asked.endpoint_picker_ref)


def canarys(c: Context, selected: str) -> Manifest | None:
    """Render the canary's pool. It exists before any trial, because gateways need time to notice a pool."""
    s, asked, name = c.snapshot, c.spec.inference_pool, canary_service(c.snapshot.key.name)
    if asked is None or not s.server.inference_pools:
        return None
    routed, there = c.spec.route_of(s.key.name) is not None, s.objects.get(("InferencePool", name))
    if not routed and there is None:
        return None
    made = inference_pool(s.key, s.uid, name, selected, asked.canary_endpoint_picker_ref)
    unnamed = asked.endpoint_picker_ref is not None and asked.canary_endpoint_picker_ref is None
    if routed or there is None or there.picker is None or not unnamed:
        return made
    # The spec names no picker any more, but an earlier route may still use the pool, so keep its picker.
    return {**made, "spec": {**made["spec"], "endpointPickerRef": dict(there.picker)}}


def left_over(c: Context) -> tuple[tuple[str, str, str], ...]:
    """Return the pools to delete if the spec asks for none. A pool stays while the route names it."""
    s = c.snapshot
    if c.spec.inference_pool is not None:
        return ()
    pools = [name for kind, name in s.objects if kind == "InferencePool" and s.objects[kind, name].owned]
    named = {canary_service(s.key.name)} if traffic.routed(s) else set()
    if c.spec.route is not None and carries(s.route, Backend(*s.key, POOLS)):
        named.add(s.key.name)
    return tuple((INFERENCE_POOL_API, "InferencePool", name) for name in pools if name not in named)


def pool_fault(c: Context) -> Cause | None:
    """Return the cause if the existing pool cannot be switched to another revision. Then no trial could end."""
    s, name = c.snapshot, c.snapshot.key.name
    there = s.objects.get(("InferencePool", name))
    if there is None or not there.owned or s.rejection("InferencePool", name) is None:
        return None
    return Cause(Reason.ROUTE_UNUSABLE, f"no canary is started while InferencePool {name} is refused: Stalled says why")


def unwritten(c: Context) -> bool:
    """Return True if no pool was written since the operator started, so that refusals are still unknown."""
    return c.spec.inference_pool is not None and c.snapshot.rejections is None
