"""The eviction API, which node drains use, obeys a service's disruption budget."""

import pytest

from kvpilot_operator.cluster.objects import Object, Ref
from support.drains import evicted
from support.faulty_world import NAMESPACE, FaultyWorld, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]


async def allowed(world: FaultyWorld, name: str) -> int:
    """Return the number of evictions that the budget's status allows now; -1 if the status is out of date."""
    budget = await world.cluster.get(Ref("policy/v1", "PodDisruptionBudget", NAMESPACE, name))
    status: Object = budget.get("status") or {}
    seen = status.get("observedGeneration") == budget["metadata"]["generation"]
    return int(status.get("disruptionsAllowed", 0)) if seen else -1


@pytest.mark.parametrize(("most", "leave"), [(None, 1), ("50%", 2), (0, 0)])
async def test_a_drain_of_all_nodes_at_once_respects_max_unavailable(world, most, leave):
    name = f"drained-{leave}"
    spec = {} if most is None else {"disruption": {"maxUnavailable": most}}
    await world.serving(name, 4, **spec)
    await until(lambda: is_allowed(world, name, leave), f"the budget allows {leave} evictions")
    pods = await world.pods(name)
    assert sum([await evicted(world, pod) for pod in pods]) == leave
    # The remaining pods can be evicted one after another, once new pods answer.
    if leave:
        for pod in pods:
            await until(lambda pod=pod: is_gone(world, pod), f"pod {pod['metadata']['name']} may leave in the end")
    await world.until_ready(name, 4)
    await world.delete(name)


async def is_allowed(world: FaultyWorld, name: str, evictions: int) -> bool:
    return await allowed(world, name) == evictions


async def is_gone(world: FaultyWorld, pod: Object) -> bool:
    found = await world.cluster.find(Ref("v1", "Pod", NAMESPACE, pod["metadata"]["name"]))
    return found is None or "deletionTimestamp" in found["metadata"] or await evicted(world, found)
