"""In a traffic step of 0%, a real proxy copies live requests to the canary, and stable engines answer every user."""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from nginx_gateway import SERVED_BY, NginxGateway

from kvpilot_operator.api.names import ENGINE_PORT, REVISION_LABEL
from support.faulty_world import NAMESPACE, until
from support.gateway import ROUTE_CRD
from support.routed import a_users_route
from support.unprobed import ACCURACY, DRAIN, ends

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]
NAME = "mirrored"
FINISHED = "vllm:request_success_total"


async def answered(world, revision):
    """Return how many requests the engines of a revision have finished, and their addresses."""
    pods = [pod for pod in await world.pods(NAME) if pod["metadata"]["labels"][REVISION_LABEL] == revision]
    urls = [f"{pod['status']['podIP']}:{ENGINE_PORT}" for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    total = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
        for url in urls:
            page = (await http.get(f"http://{url}/metrics")).text
            total += sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(FINISHED))
    return total, urls


async def ask(gateway, count):
    """Send requests one by one, and return the number of answers by the pod's address."""
    body = json.dumps({"model": NAME, "prompt": [1] * 16, "max_tokens": 8, "stream": True})
    served = Counter()
    async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
        for _ in range(count):
            answer = await http.post(f"{gateway.url}/v1/completions", content=body)
            assert answer.status_code == httpx.codes.OK
            assert answer.text.rstrip().endswith("data: [DONE]")
            served[answer.headers[SERVED_BY]] += 1
    return served


async def test_a_canary_gets_copies_of_live_requests_and_answers_no_user(world, tmp_path):
    await world.define(ROUTE_CRD)
    fields = await a_users_route(world, NAME, "Service")
    steps = [{"weightPercent": 0, "holdSeconds": 3600}]
    canary = {**fields["canary"], "steps": steps, "warmUpSeconds": 0}
    await world.serving(NAME, 2, canary=canary, accuracy=ACCURACY, drain=DRAIN)
    first = (await world.status(NAME))["stable"]["revision"]
    gateway = NginxGateway(world.cluster, NAMESPACE, NAME, (NAME, f"{NAME}-canary"), tmp_path)
    async with gateway.serving():
        _, stable = await answered(world, first)
        assert set(await ask(gateway, 20)) <= set(stable)
        await world.patch(NAME, {"kvCache": {"dtype": "k4v4"}})

        async def measured():
            return "stepTime" in (await world.status(NAME)).get("canary", {})

        await until(measured, "the traffic step of 0% is in effect", seconds=1500)
        await until(lambda: asyncio.sleep(0, "filters" in gateway.rule), "nginx copies requests")
        second = (await world.status(NAME))["canary"]["revision"]
        [mirror] = [one["requestMirror"] for one in gateway.rule["filters"]]
        assert mirror["percent"] == 50
        before, [copied_to] = await answered(world, second)
        _, stable = await answered(world, first)
        served, wanted = Counter(), 20

        async def copied():
            served.update(await ask(gateway, 10))
            return (await answered(world, second))[0] - before >= wanted

        await until(copied, "the canary has answered copies")
        assert copied_to not in served
        assert set(served) == set(stable)
        # Half of the requests are copied at random, so the chance that all of the first 20 are copied is one in a
        # million.
        assert (await answered(world, second))[0] - before < served.total()
        await world.patch(NAME, {"canary": {"steps": []}})
        await ends(world, NAME, "Promoted", "k4v4")
        await until(lambda: asyncio.sleep(0, "filters" not in gateway.rule), "nginx copies nothing any more")
        _, promoted = await answered(world, second)
        assert set(await ask(gateway, 20)) <= set(promoted)
    await world.delete(NAME)
