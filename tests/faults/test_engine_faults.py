"""Engines with broken metrics or probes delay no other service and change no decision, and are read again later."""

import asyncio
import time

import pytest

from kvpilot_localcluster.engines.faulty import BLOCK_TOKENS, BLOCKS, CONTEXT
from kvpilot_probes.pressure import FILL_ANSWER_TOKENS
from support.faulty_record import record
from support.faulty_world import HUNGRY_IMAGE, IMAGE, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE = BLOCKS * BLOCK_TOKENS
FAULTS = {
    "garbage": "not Prometheus text",
    "huge": "bytes",
    "endless": "lines",
    "hang": "no whole page within",
    "drip": "no whole page within",
    "bomb": "encoded",
    "error": "HTTP 500",
}
WORDS = {
    "garbage": "that are garbage",
    "huge": "of 10 MB",
    "endless": "without an end",
    "hang": "that hang",
    "drip": "that come a byte a second",
    "bomb": "that unpack to 200 MB",
    "error": "answered 500",
}


def capacity(world, name, tokens):
    async def seen() -> bool:
        return await world.figure(name, "kvpilot_kv_capacity_tokens") == tokens

    return seen


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_with_broken_metrics_is_left_out_until_they_are_repaired(world, fault):
    await until(capacity(world, "steady", 2 * ONE), "both engines are read")
    sick = (await world.pods("steady"))[0]
    logged, memory = len(world.operator_log()), world.operator_memory_mib()
    decided = (await world.status("steady")).get("decisions")
    async with world.load("steady") as load:
        await world.make_ill(sick, metrics=fault)
        await until(capacity(world, "steady", ONE), "only the other engine is counted")
        await world.dial()
        await asyncio.sleep(2)
        await world.make_ill(sick, metrics="")
        taken = await until(capacity(world, "steady", 2 * ONE), "both engines are read again")
    said = [line for line in world.operator_log()[logged:].splitlines() if sick["metadata"]["name"] in line]
    assert any(FAULTS[fault] in line for line in said), said[:3]
    assert max(map(len, said)) < 1000, "what a broken engine sends must not fill the log"
    assert world.operator_memory_mib() < memory + 100
    assert await world.condition("steady", "MetricsAvailable") == ("True", "Scraped")
    assert (await world.status("steady")).get("decisions") == decided
    assert load.stats.failed == 0, load.stats.failures
    record(f"metrics {WORDS[fault]}", taken, what="the engine's metrics count again", answered=load.stats.ok)


@pytest.mark.long
async def test_a_canary_whose_probe_hangs_is_rolled_back_while_users_are_served(world):
    ill = '{"completions": "hang", "only_dtype": "k4v4"}'
    await world.serving(
        "trial",
        1,
        engine={"image": IMAGE, "env": [{"name": "FAULTY_ENGINE", "value": ill}]},
        canary={"progressDeadlineSeconds": 30},
        accuracy={"probeSets": ["builtin/general"]},
    )
    async with world.load("trial") as load:
        await world.patch("trial", {"kvCache": {"dtype": "k4v4"}})

        async def probing() -> bool:
            return ((await world.status("trial")).get("canary") or {}).get("stage") == "Probing"

        await until(probing, "the canary is probed")
        began = time.monotonic()
        await world.dial()
        assert await probing(), "the operator handles other services only after the trial"

        async def ended() -> bool:
            status = await world.status("trial")
            return "canary" not in status and bool(status.get("history"))

        await until(ended, "the canary is rolled back", seconds=600)
        taken = time.monotonic() - began
    status = await world.status("trial")
    assert status["kvCache"]["activeDtype"] == "auto"
    assert load.stats.failed == 0, load.stats.failures
    record(
        "canary whose probe hangs (progressDeadlineSeconds: 30)",
        taken,
        what="the canary is rolled back; the stable revision served all the time",
        answered=load.stats.ok,
    )
    await world.delete("trial")


async def test_a_canary_without_memory_for_a_full_context_is_rolled_back_before_any_request(world, tmp_path):
    said = tmp_path / "last-words"
    env = {"HUNGRY_LIMIT_MIB": "200", "HUNGRY_LAST_WORDS": str(said)}
    engine = {"image": HUNGRY_IMAGE, "env": [{"name": name, "value": value} for name, value in env.items()]}
    await world.serving("hungry", 1, engine=engine, accuracy={"probeSets": ["builtin/structured"]})
    [stable] = await world.pods("hungry")
    async with world.load("hungry") as load:
        await world.patch("hungry", {"kvCache": {"dtype": "k4v4"}})

        async def ended() -> bool:
            status = await world.status("hungry")
            return "canary" not in status and bool(status.get("history"))

        await until(ended, "the canary is rolled back", seconds=600)
    status = await world.status("hungry")
    tokens = CONTEXT - FILL_ANSWER_TOKENS
    # Earlier probes and all users sent shorter prompts.
    assert said.read_text() == f"no memory for {tokens} tokens"
    last = status["history"][0]
    assert (last["dtype"], last["reason"], last["verdict"]) == ("k4v4", "EngineCrashed", "Error")
    assert f"the engine failed at a prompt of {tokens} tokens in its context of {CONTEXT}" in last["message"]
    assert status["kvCache"]["activeDtype"] == "auto"
    assert load.stats.ok
    assert load.stats.failed == 0, load.stats.failures
    [left] = [pod for pod in await world.pods("hungry") if pod["metadata"]["uid"] == stable["metadata"]["uid"]]
    assert not any(one["restartCount"] for one in left["status"]["containerStatuses"])
    await world.delete("hungry")


@pytest.mark.parametrize(
    ("fault", "ill", "reason", "word"),
    [
        (
            "canary that reports 16 bits",
            '{"reports": "auto", "only_dtype": "k4v4"}',
            "DtypeMismatch",
            "they report auto",
        ),
        (
            "16-bit engine that reports fp8",
            '{"reports": "fp8_e4m3", "only_dtype": "auto"}',
            "BaselineUnfit",
            "they report fp8_e4m3",
        ),
        (
            "16-bit engine that answers at random",
            '{"completions": "random", "only_dtype": "auto"}',
            "BaselineUnfit",
            "differs from its own answers",
        ),
    ],
)
async def test_a_canary_that_cannot_be_judged_gets_no_traffic_and_no_denial(world, fault, ill, reason, word):
    await world.serving(
        "odd",
        1,
        engine={"image": IMAGE, "env": [{"name": "FAULTY_ENGINE", "value": ill}]},
        accuracy={"probeSets": ["builtin/general"], "consecutiveErrorLimit": 1},
    )
    began = time.monotonic()
    await world.patch("odd", {"kvCache": {"dtype": "k4v4"}})

    async def told() -> bool:
        status = await world.status("odd")
        last = next(iter(status.get("history", ())), {})
        held = (await world.condition("odd", "Stalled"))[1] == reason
        return "canary" not in status and (held or last.get("reason") == reason)

    await until(told, f"the change ends with {reason}")
    taken = time.monotonic() - began
    status = await world.status("odd")
    assert any(word in entry["message"] for entry in status["decisions"] if entry["reason"] == reason)
    assert status["kvCache"]["activeDtype"] == "auto"
    assert "denied" not in status["kvCache"]
    assert not any(entry["action"] == "Promote" for entry in status["decisions"])
    record(fault, taken, what=f"the change to k4v4 ends as {reason}, and nothing is denied")
    await world.delete("odd")
