"""A canary is judged while its KV pool is full, before it gets a user's request."""

import asyncio

import pytest

from kvpilot_probes import pressure
from kvpilot_probes.errors import ContextNotHeld
from kvpilot_probes.pressure import FILL_ANSWER_TOKENS, PRESSURE, Filled, Pool, fill
from kvpilot_probes.sequential import Allowed, Answer, decide
from kvpilot_probes.session import USUAL, Settings
from support.probe_engine import Body, Handler, Writer, baseline, counting, engine, event, respond, stream, tokens_of

CONTEXT = 2048
ALLOWED = Allowed(kl=0.02, disagreement=0.03)


class Engine:
    """An engine that is full once two long prompts are in flight. Then `full` answers the short prompts."""

    def __init__(self, full: Handler = counting, room: int = 2 * CONTEXT) -> None:
        self.full, self.room = full, room
        self.long: list[list[int]] = []
        self.short = 0
        self.pressed = asyncio.Event()

    async def look(self) -> Pool:
        return Pool(self.room, float(self.pressed.is_set()))

    async def handler(self, path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, tokens_of(body))
        elif len(body["prompt"]) < 1000:
            self.short += 1
            await (self.full if self.pressed.is_set() else counting)(path, body, writer)
        else:
            self.long.append(body["prompt"])
            if len(self.long) == 3:
                self.pressed.set()
            if len(self.long) > 1:
                await self.pressed.wait()
                await asyncio.sleep(0.05)
            await counting(path, body, writer)

    async def fill(self, settings: Settings = USUAL) -> Filled:
        async with engine(self.handler) as url:
            return await fill(url, "m", baseline(prompts=20), look=self.look, allowed=ALLOWED, settings=settings)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "LOOK_SECONDS", 0.01)


async def test_prompts_are_judged_while_long_ones_fill_the_kv_cache() -> None:
    one = Engine()
    filled = await one.fill()
    assert filled.context == len(one.long[0]) == CONTEXT - FILL_ANSWER_TOKENS
    # Three such prompts take 95% of the KV pool.
    assert {len(prompt) for prompt in one.long[1:]} == {1297}
    # Other first tokens keep the prefix cache from sharing their pages.
    assert len({tuple(prompt[:3]) for prompt in one.long[1:4]}) == 3
    assert {seen.bucket for seen in filled.seen} == {PRESSURE}
    # The probe sends no more prompts than its verdict needs, plus those in flight at that time.
    assert 5 <= len(filled.seen) <= 4 + pressure.JUDGED_AT_ONCE
    assert decide(filled.seen, [PRESSURE], ALLOWED).answer == Answer.PASSED


async def test_damage_that_only_a_full_cache_shows_fails_the_bucket_pressure() -> None:
    async def garbage(_path: str, body: Body, writer: Writer) -> None:
        stream(writer, *[event("token_id:7777", {"token_id:7777": -0.01, "token_id:7778": -9.0})] * body["max_tokens"])

    filled = await Engine(garbage).fill()
    outcome = decide(filled.seen, ["general", PRESSURE], ALLOWED, ended=True)
    assert (outcome.answer, outcome.failed) == (Answer.FAILED, PRESSURE)


async def test_under_pressure_an_answer_is_resumed_at_most_as_often_as_the_settings_allow() -> None:
    async def wrong(_path: str, body: Body, writer: Writer) -> None:
        stream(writer, *[event("token_id:7777", {"token_id:7777": -0.1, "token_id:9999": -3.0})] * body["max_tokens"])

    one = Engine(wrong)
    filled = await one.fill(Settings(max_resumes=0))
    assert one.short == len(filled.seen) > 0


async def test_nan_logprobs_are_counted_under_pressure_too() -> None:
    async def broken(_path: str, body: Body, writer: Writer) -> None:
        steps = range(len(body["prompt"]), len(body["prompt"]) + body["max_tokens"])
        stream(writer, *(event(f"token_id:{i}", {f"token_id:{i}": None}) for i in steps))

    filled = await Engine(broken).fill()
    assert filled.compared and all(position.broken for position in filled.compared)


@pytest.mark.parametrize("room", [0, pressure.MAX_POOL_TOKENS + 1])
async def test_a_cache_of_unknown_or_very_large_size_is_not_filled(room: int) -> None:
    one = Engine(room=room)
    assert (await one.fill()).seen == ()
    assert len(one.long) == 1


async def test_a_cache_that_does_not_get_full_ends_the_test_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "FULL", 2.0)
    one = Engine()
    assert (await one.fill()).seen == ()
    assert one.short == 0
    assert len(one.long) <= 1 + 3 * pressure.MAX_TURNS


async def test_a_cache_that_fills_too_slowly_ends_the_test_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Engine):
        async def look(self) -> Pool:
            return Pool(self.room, 1e-6)

        async def handler(self, path: str, body: Body, writer: Writer) -> None:
            if self.long:  # the first prompt filled the context
                await asyncio.sleep(600)
            await super().handler(path, body, writer)

    monkeypatch.setattr(pressure, "TREND_SECONDS", 0.1)
    assert (await asyncio.wait_for(Slow().fill(), pressure.PRESSURE_SECONDS / 2)).seen == ()


async def test_the_test_of_a_full_cache_ends_in_time_even_if_the_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "PRESSURE_SECONDS", 0.5)

    async def silent(_path: str, _body: Body, _writer: Writer) -> None:
        await asyncio.sleep(600)

    assert (await Engine(silent).fill()).seen == ()


async def test_an_engine_that_dies_with_a_full_cache_fails() -> None:
    async def dies(_path: str, _body: Body, writer: Writer) -> None:
        writer.transport.abort()

    with pytest.raises(ContextNotHeld, match="while such prompts filled its KV cache"):
        await Engine(dies).fill()
