"""Evictions like those of `kubectl drain`."""

import asyncio

from kvpilot_localcluster.rest import ApiError
from kvpilot_operator.cluster.objects import Object
from support.faulty_world import NAMESPACE, FaultyWorld


async def evicted(world: FaultyWorld, pod: Object) -> bool:
    """Evict a pod, if it still exists. Return False if its disruption budget forbids the eviction now."""
    about = {"name": pod["metadata"]["name"], "namespace": NAMESPACE}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{about['name']}/eviction"
    body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": about}
    try:
        await asyncio.to_thread(world.rest.create, path, body)
    except ApiError as error:
        if error.status not in (404, 429):
            raise
        return error.status == 404
    return True
