"""Trials whose traffic an HTTPRoute splits among InferencePools or Services, with kills of the operator."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, REVISION_LABEL, SERVICE_PORT
from kvpilot_operator.cluster.objects import Ref
from support.faulty_world import NAMESPACE, FaultyWorld, until
from support.inference_gateway import InferenceGateway
from support.inference_kinds import picker_name
from support.killer import Killer
from support.ready_pods import API_OF, Backend, selected_by
from support.unprobed import ACCURACY, DRAIN, Requests, ends, requests


async def a_users_route(world: FaultyWorld, name: str, kind: Backend) -> dict[str, Any]:
    """Create an HTTPRoute to kvpilot's Service or InferencePool, like a user. Return the spec fields that name it."""
    group = INFERENCE_POOL_API.partition("/")[0]
    of_kind = {"group": group} if kind == "InferencePool" else {"port": SERVICE_PORT}
    backend = {"kind": kind, "name": name, "weight": 1, **of_kind}
    route = {"apiVersion": HTTP_ROUTE_API, "kind": "HTTPRoute", "metadata": {"name": name, "namespace": NAMESPACE}}
    await world.cluster.create({**route, "spec": {"rules": [{"backendRefs": [backend]}]}})
    return {"canary": {"routeRef": {"name": name}}}


def pickers_of(name: str) -> dict[str, Any]:
    """Return the fields of spec.inferencePool that name an endpoint picker for each of a service's InferencePools."""
    port = {"number": 9002}
    return {
        "endpointPickerRef": {"name": picker_name(name), "port": port},
        "canaryEndpointPickerRef": {"name": picker_name(f"{name}-canary"), "port": port},
    }


async def by_route(
    world: FaultyWorld, name: str, worth: Callable[[str], bool], kind: Backend, **more: Any
) -> tuple[Killer, Requests, float]:
    """Roll back a canary that gets half of the traffic, and promote another one.

    Args:
        name: the service.
        worth: function that is true for writes after which the operator is killed.
        kind: kind of the backends.
        more: additional sections of the spec.

    Returns:
        The killer of the operator, the requests, and the seconds that both trials took.
    """
    spec = {**await a_users_route(world, name, kind), **more}
    steps = [{"weightPercent": 50, "holdSeconds": 3600}]
    canary = {**spec.pop("canary", {}), "steps": steps, "warmUpSeconds": 0}
    if kind == "InferencePool":
        spec["inferencePool"] = pickers_of(name)
    await world.serving(name, 2, canary=canary, accuracy=ACCURACY, drain=DRAIN, **spec)

    async def revisions() -> list[str | None]:
        """Return the revisions that the backends select, or None for a missing backend.

        A canary's Service exists only during a trial.
        """
        found = [await world.cluster.find(Ref(API_OF[kind], kind, NAMESPACE, one)) for one in (name, f"{name}-canary")]
        return [None if one is None else selected_by({**one, "kind": kind}).get(REVISION_LABEL) for one in found]

    async def settled() -> bool:
        serves = (await world.status(name))["stable"]["revision"]
        return await revisions() == [serves, serves if kind == "InferencePool" else None]

    await until(settled, "the backends select the serving revision")
    gateway = InferenceGateway(world.cluster, NAMESPACE, name, (name, f"{name}-canary"), kind)
    async with gateway.following():
        await until(lambda: asyncio.sleep(0, gateway.is_ready), "the gateway has a pod")
        async with requests(world, name, gateway) as seen, Killer.of(world, name, worth) as killer:
            await world.patch(name, {"kvCache": {"dtype": "k4v4"}})
            await until(lambda: asyncio.sleep(0, len(seen.answered) > 1), "the canary has its share", seconds=1500)
            first, second = await revisions()
            assert first != second
            await world.patch(name, {"kvCache": {"dtype": "auto"}})
            taken = await ends(world, name, "RolledBack", "k4v4")
            await until(settled, "the backends select the serving revision")
            await world.patch(name, {"kvCache": {"dtype": "k8v4"}, "canary": {"steps": []}})
            taken += await ends(world, name, "Promoted", "k8v4")
            await until(settled, "the backends select the serving revision")
            third = (await revisions())[0]
    found = await world.cluster.get(Ref(HTTP_ROUTE_API, "HTTPRoute", NAMESPACE, name))
    assert [ref["name"] for ref in found["spec"]["rules"][0]["backendRefs"]] == [name]
    assert seen.unprobed == []
    assert seen.failed == []
    assert seen.nobody == 0
    assert set(seen.answered) == {first, second, third}
    await world.delete(name)
    return killer, seen, taken
