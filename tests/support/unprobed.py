"""A constant stream of requests, as from a gateway, and the check that none reaches an unprobed pod."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from kvpilot_operator.api.names import INFERENCE_POOL_API, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Object, Ref
from support.faulty_world import IMAGE, NAMESPACE, FaultyWorld, until
from support.inference_gateway import Sent, ServiceWay, Way, picked
from support.inference_kinds import pool
from support.killer import Killer
from support.ready_pods import ReadyPods

PASSED = ("Shifting", "Promoting")
ACCURACY = {"probeSets": ["builtin/structured"]}
# On a busy machine it may take a while until the picker learns that a pod terminates.
DRAIN = {"preStopSeconds": 5, "timeoutSeconds": 20}
# Seconds between requests: without them two users take a whole core. The stages that must send a canary no request
# last for seconds.
PAUSE_SECONDS = 0.2


class Witness:
    """Reader of the API server. It finds the pod behind an address, and tells which revisions may get requests."""

    def __init__(self, world: FaultyWorld, name: str) -> None:
        self._world, self._name = world, name
        self._passed: set[str] = set()

    async def pod_at(self, endpoint: str) -> Object:
        """Return the pod with this address. If several pods had it, return the newest one."""
        address = endpoint.rpartition(":")[0]
        pages = self._world.cluster.pages("v1", "Pod", NAMESPACE, "", fields=f"status.podIP={address}")
        return max(
            [pod async for pods, _ in pages for pod in pods], key=lambda pod: pod["metadata"]["creationTimestamp"]
        )

    async def may_serve(self, revision: str) -> bool:
        """Return True if the revision serves, or has passed its probes."""
        if revision not in self._passed:
            status = await self._world.status(self._name)
            canary = status.get("canary") or {}
            if canary.get("stage") in PASSED or "step" in canary:
                self._passed.add(canary["revision"])
            self._passed |= {(status.get("stable") or {}).get("revision", "")}
        return revision in self._passed


class InTurns:
    """Several ways to send requests, used in turn."""

    def __init__(self, *ways: Way) -> None:
        self._ways = itertools.cycle(ways)

    async def ask(self, http: httpx.AsyncClient, body: bytes, sent: Sent) -> bool:
        return await next(self._ways).ask(http, body, sent)


class Requests:
    """Results of the requests that `requests` sends."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        """Number of answered requests by revision."""
        self.unprobed: list[str] = []
        """Pods that were picked before their revision had passed its probes."""
        self.failed: list[str] = []
        """Reasons why requests were not answered."""
        self.nobody = 0
        """Requests answered 503, because no pod existed."""


@contextlib.asynccontextmanager
async def requests(world: FaultyWorld, name: str, way: Way, users: int = 2) -> AsyncIterator[Requests]:
    """Send requests to a service until the block ends.

    Args:
        name: the service.
        way: the gateway that the requests take.
        users: number of users. Each sends its next request PAUSE_SECONDS after an answer.
    """
    seen, witness = Requests(), Witness(world, name)
    async with httpx.AsyncClient(
        timeout=300, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    ) as http:

        async def user() -> None:
            while True:
                await _ask(http, name, way, seen, witness)
                await asyncio.sleep(PAUSE_SECONDS)

        tasks = [asyncio.create_task(user()) for _ in range(users)]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def _ask(http: httpx.AsyncClient, name: str, way: Way, seen: Requests, witness: Witness) -> None:
    pod: Object = {}

    async def sent(endpoint: str) -> None:
        pod.update(await witness.pod_at(endpoint))
        # The operator writes the status before it opens the gate. So a status read now is new enough for this request.
        if not await witness.may_serve(pod["metadata"]["labels"][REVISION_LABEL]):
            seen.unprobed.append(pod["metadata"]["name"])

    body = {"model": name, "prompt": [1] * 16, "max_tokens": 8, "stream": True}
    try:
        if await way.ask(http, json.dumps(body).encode(), sent):
            seen.answered[pod["metadata"]["labels"][REVISION_LABEL]] += 1
        else:
            seen.nobody += 1
    except httpx.HTTPError as error:
        seen.failed.append(f"{pod['metadata']['name']}: {error!r}")


async def ends(world: FaultyWorld, name: str, stage: str, dtype: str) -> float:
    """Wait until the trial of `dtype` ends in this stage, and return the seconds."""

    async def ended() -> bool:
        status = await world.status(name)
        last: dict[str, Any] = next(iter(status.get("history", ())), {})
        passed = last.get("verdict") == "Passed"
        return "canary" not in status and (passed, last.get("dtype")) == (stage == "Promoted", dtype)

    return await until(ended, f"the trial of {dtype} ends {stage}", seconds=1500)


async def promoted_and_rolled_back(
    world: FaultyWorld, name: str, worth: Callable[[str], bool], **engine: Any
) -> tuple[Killer, Requests, float]:
    """Promote k4v4 in a service of two replicas, and roll back k8v4, which answers at random.

    The operator is killed after writes that satisfy `worth`. Requests go in turn to the Service, and to an
    InferencePool that selects all pods. None may reach a pod before its revision has passed its probes. `engine` has
    additional fields of spec.engine.

    Returns:
        The killer, the requests, and the seconds that both trials took.
    """
    ill = {"name": "FAULTY_ENGINE", "value": '{"completions": "random", "only_dtype": "k8v4"}'}
    engine = {"image": IMAGE, "env": [ill], **engine}
    everyone = f"all-of-{name}"
    await world.cluster.create(pool(everyone, NAMESPACE, {SERVICE_LABEL: name}))
    await world.serving(name, 2, engine=engine, canary={"steps": []}, accuracy=ACCURACY, drain=DRAIN)
    pool_of_all = ReadyPods(world.cluster, NAMESPACE, everyone)
    endpoints = ReadyPods(world.cluster, NAMESPACE, name, "Service")
    async with pool_of_all.following(), endpoints.following(), picked(pool_of_all) as by_picker:
        await until(
            lambda: asyncio.sleep(0, bool(pool_of_all.endpoints() and endpoints.endpoints())),
            "pool and Service have a pod",
        )
        in_turns = InTurns(by_picker, ServiceWay(endpoints))
        async with requests(world, name, in_turns) as seen, Killer.of(world, name, worth) as killer:
            first = (await world.status(name))["stable"]["revision"]
            await world.patch(name, {"kvCache": {"dtype": "k4v4"}})
            taken = await ends(world, name, "Promoted", "k4v4")
            await world.patch(name, {"kvCache": {"dtype": "k8v4"}})
            taken += await ends(world, name, "RolledBack", "k8v4")
    second = (await world.status(name))["stable"]["revision"]
    assert seen.unprobed == []
    assert seen.failed == []
    assert set(seen.answered) == {first, second}
    await world.cluster.delete(Ref(INFERENCE_POOL_API, "InferencePool", NAMESPACE, everyone))
    return killer, seen, taken
