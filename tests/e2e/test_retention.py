"""A bounded cache in a real cluster with real engines: a window that forgets is rolled back, a wider one promoted."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpilot_demo.world import NAMESPACE, World
from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.objects import Ref

HANGS = 1200


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_bound_that_forgets_is_rolled_back_and_one_longer_than_the_probes_is_promoted(tmp_path: Path) -> None:
    async with World.up(tmp_path, lambda _label, _fraction: None) as world:
        await world.cluster.create(service(world))
        await until(world, lambda s: ready(s))

        await bounded_to(world, 32)
        status = await until(world, lambda s: "canary" not in s and "history" in s)
        last, measured = status["history"][0], status["accuracy"]["last"]
        print(last["message"])
        assert (last["verdict"], last["reason"]) == ("Failed", "AccuracyRegressed")
        assert measured["excessKLMicronats"] > 20_000
        # The window, not the dtype, did the damage, and the serving revision has kept every token.
        assert "denied" not in status["kvCache"]
        assert status["accuracy"]["baseline"]["controlTop1AgreementPermille"] > 990

        await bounded_to(world, 960)  # longer than any prompt of the pack with its answer
        status = await until(world, lambda s: "canary" not in s and s["history"][0]["verdict"] == "Passed")
        print(status["history"][0]["message"])
        assert status["accuracy"]["last"]["excessKLMicronats"] < 1_000
        assert {d["reason"] for d in status["decisions"]} >= {"AccuracyRegressed", "BaselineCaptured", "CanaryPassed"}


def service(world: World) -> dict[str, Any]:
    made = copy.deepcopy(world.example)
    made["metadata"]["namespace"] = NAMESPACE
    made["spec"]["model"]["maxModelLen"] = 1024
    made["spec"]["engine"]["extraArgs"] += ["--block-size=32"]
    made["spec"]["kvCache"] = {"mode": "Fixed", "dtype": "auto"}
    made["spec"]["accuracy"] = {"probeSets": ["builtin/multi-turn"]}
    return made


async def bounded_to(world: World, window: int) -> None:
    bound = {"sinkTokens": 4, "windowTokens": window}
    await world.cluster.merge(
        Ref(API_VERSION, KIND, NAMESPACE, world.name), {"spec": {"kvCache": {"retention": bound}}}
    )


def ready(status: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


async def until(world: World, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    status: dict[str, Any] = {}
    try:
        async with asyncio.timeout(HANGS):
            while True:
                status = ((await world.service()) or {}).get("status") or {}
                if seen(status):
                    return status
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(
            f"not seen in {HANGS} s; {status.get('canary')}; {status.get('history')}; {status.get('conditions')}"
        )
