"""No request reaches a pod before its revision has passed its probes, by whatever label a client selects pods.

The tests cover a whole canary and a rollback, wherever the operator is killed.
"""

import pytest
import pytest_asyncio

from kvpilot_operator.api.names import HTTP_ROUTE_API
from kvpilot_operator.cluster.objects import Ref
from support.faulty_record import record
from support.faulty_world import NAMESPACE
from support.gateway import ROUTE_CRD
from support.inference_kinds import POOL_CRD
from support.routed import by_route
from support.unprobed import promoted_and_rolled_back

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]


def moves_traffic(written: str) -> bool:
    """Return True for a write that moves traffic. A short test has time to kill the operator only after such writes."""
    return written.split()[1].startswith(("quantizedllmservices", "services", "inferencepools", "httproutes"))


def moves_route(written: str) -> bool:
    """Return True for a write of a route or its backends. Another test kills the operator at the stages of a trial."""
    return written.split()[1].startswith(("services", "inferencepools", "httproutes"))


def moves_share(written: str) -> bool:
    """Return True for a write of a route or its backends, or of the status while the canary gets requests."""
    return moves_route(written) or "Shifting" in written


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def definitions(world):
    """Install the CRDs before the first test, but after the operator has started."""
    await world.define(POOL_CRD, ROUTE_CRD)


async def test_a_users_pool_on_the_service_label_never_picks_an_unprobed_pod(world):
    killer, seen, taken = await promoted_and_rolled_back(world, "pooled", moves_traffic)
    assert seen.nobody == 0
    await world.delete("pooled")
    assert any("Promoting" in written for written in killer.killed)
    record(
        f"operator killed {len(killer.killed)} times while a canary is promoted and another rolled back",
        taken,
        what="both trials end; a user's pool that selects the service's label picked no unprobed pod",
        answered=seen.answered.total(),
    )


@pytest.mark.long
async def test_a_users_pool_picks_no_unprobed_pod_even_if_the_operator_is_killed_after_any_write(world):
    killer, seen, _ = await promoted_and_rolled_back(world, "killed", lambda _: True)
    assert seen.nobody == 0
    await world.delete("killed")
    kinds = {written.split()[1].partition("/")[0] for written in killer.killed}
    assert {"quantizedllmservices", "deployments", "services", "pods"} <= kinds


async def test_a_route_over_services_never_sends_requests_to_an_unprobed_pod(world):
    killer, seen, taken = await by_route(world, "over-services", moves_route, "Service")
    await world.cluster.delete(Ref(HTTP_ROUTE_API, "HTTPRoute", NAMESPACE, "over-services"))
    assert {written.split()[1].partition("/")[0] for written in killer.killed} >= {"httproutes", "services"}
    record(
        f"operator killed {len(killer.killed)} times while a canary takes its share of a route over Services",
        taken,
        what="the canary is rolled back, another is promoted; no request reached an unprobed pod, and none failed",
        answered=seen.answered.total(),
    )


async def test_a_route_over_our_pools_never_sends_requests_to_an_unprobed_pod(world):
    killer, seen, taken = await by_route(world, "routed", moves_share, "InferencePool")
    await world.cluster.delete(Ref(HTTP_ROUTE_API, "HTTPRoute", NAMESPACE, "routed"))
    assert {written.split()[1].partition("/")[0] for written in killer.killed} >= {"httproutes", "inferencepools"}
    record(
        f"operator killed {len(killer.killed)} times while a canary takes its share of a route over InferencePools",
        taken,
        what="the canary is rolled back, another is promoted; no request reached an unprobed pod, and none failed",
        answered=seen.answered.total(),
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["InferencePool", "Service"])
async def test_a_route_reaches_no_unprobed_pod_even_if_the_operator_is_killed_after_any_write(world, kind):
    killer, _, _ = await by_route(world, f"routed-{kind.lower()}", lambda _: True, kind)
    kinds = {written.split()[1].partition("/")[0] for written in killer.killed}
    assert {"quantizedllmservices", "deployments", "services", "pods", "httproutes"} <= kinds
