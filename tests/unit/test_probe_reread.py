"""An engine that reads its own long answers as prompts agrees with them, unless its decoding is damaged."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.decide import control_fault, described, judge
from kvpilot_probes import codec
from kvpilot_probes.packs import ProbePrompt
from kvpilot_probes.reread import ADAPTERS, ANSWERS, GENERATION, SPOTS, chosen
from kvpilot_probes.run import capture, control, measure
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Measurement
from support.probe_engine import (
    PROMPTS,
    Body,
    Handler,
    Writer,
    baseline,
    counting,
    engine,
    event,
    reading,
    stream,
)
from support.services import NOW

SETTINGS = Settings(tokens=8)
CONTEXT = 16_384
LENGTH = CONTEXT // 8
PROMPTS_ENOUGH = tuple(replace(prompt, pack="builtin/long-context") for prompt in (*PROMPTS, *PROMPTS))


def damaged_after(generated: int) -> Handler:
    """Return an engine whose distribution is wrong in each answer after this many tokens."""

    async def handler(_path: str, body: Body, writer: Writer) -> None:
        start = len(body["prompt"])

        def top(i: int) -> dict[str, float]:
            near, far = (-0.1, -3.0) if i < generated else (-3.0, -0.1)
            return {f"token_id:{start + i}": near, "token_id:9999": far}

        stream(writer, *(event(f"token_id:{start + i}", top(i), top(i)[f"token_id:{start + i}"])
                         for i in range(body["max_tokens"])))  # fmt: skip

    return reading(CONTEXT, handler)


async def found(handler: Handler, kept: codec.Baseline, settings: Settings = SETTINGS) -> Measurement:
    async with engine(handler) as url:
        return await measure(url, "m", kept, settings=settings)


async def captured(handler: Handler, prompts: Sequence[ProbePrompt] = PROMPTS_ENOUGH) -> codec.Baseline:
    async with engine(handler) as url:
        kept = await capture(url, "m", prompts, identity="i", dtype="auto", settings=SETTINGS)
        return codec.with_control(kept, await control(url, "m", kept, settings=SETTINGS), NOW)


async def test_damage_that_begins_late_in_an_answer_fails_only_the_bucket_of_long_answers() -> None:
    kept = await captured(reading(CONTEXT))
    sound, late = await found(reading(CONTEXT), kept), await found(damaged_after(LENGTH // 2), kept)
    assert judge(sound, described(kept), Accuracy()).verdict == "Passed"
    assert {one.kl for one in sound.seen} == {0.0}
    judged = judge(late, described(kept), Accuracy())
    assert (judged.verdict, judged.message.partition(":")[0]) == ("Failed", GENERATION)
    assert {one.bucket for one in late.seen if one.kl > 0} == {GENERATION}
    # Long answers cost most of the decoded tokens, so a periodic probe leaves them out.
    assert GENERATION not in (await found(damaged_after(64), kept, Settings(tokens=8, brief=True))).planned


async def test_a_long_answer_cut_off_by_the_time_budget_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = await captured(reading(CONTEXT)), [0.0]
    monkeypatch.setattr("kvpilot_probes.run.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def slow(path: str, body: Body, writer: Writer) -> None:
        now[0] += 60.0 if body["max_tokens"] == LENGTH else 0.0
        await counting(path, body, writer)

    cut = await found(reading(CONTEXT, slow), kept, Settings(tokens=8, concurrency=1, budget_seconds=90.0))
    assert cut.cut and GENERATION in cut.planned
    assert sum(one.bucket == GENERATION for one in cut.seen) == 1


async def test_engines_write_long_answers_only_with_the_pack_of_long_contexts() -> None:
    kept = await captured(reading(CONTEXT), [*PROMPTS, *PROMPTS])
    assert GENERATION not in (await found(damaged_after(64), kept)).planned


async def test_damage_to_the_answers_of_one_adapter_fails_the_bucket_of_adapters() -> None:
    kept, writers = await captured(reading(CONTEXT)), list[str]()

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if body["max_tokens"] == LENGTH:
            writers.append(body["model"])
        await (damaged_after(64) if body["model"] == "sql" else counting)(path, body, writer)

    found_ = await found(reading(CONTEXT, handler), kept, Settings(tokens=8, adapters=("chat", "sql")))
    judged = judge(found_, described(kept), Accuracy())
    assert (judged.verdict, judged.message.partition(":")[0]) == ("Failed", ADAPTERS)
    assert {one.bucket for one in found_.seen if one.kl > 0} == {ADAPTERS}
    # Long answers without an adapter come first, because a step with and without adapters may change them
    # (docs/lora.md).
    half = ANSWERS // 2
    assert (writers[:ANSWERS], sorted(writers[ANSWERS:])) == (["m"] * ANSWERS, ["chat"] * half + ["sql"] * half)


async def test_a_16_bit_engine_with_damaged_long_answers_gives_no_baseline() -> None:
    fault = control_fault(described(await captured(damaged_after(64))), Accuracy())
    assert fault is not None and fault.reason == "BaselineUnfit"
    assert control_fault(described(await captured(reading(CONTEXT))), Accuracy()) is None


async def test_a_rereading_uses_no_page_that_decoding_has_stored() -> None:
    bodies: list[Body] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        bodies.append(body)
        await counting(path, body, writer)

    kept = await captured(reading(CONTEXT))
    await found(reading(CONTEXT, handler), kept)
    long = [body for body in bodies if body["max_tokens"] == LENGTH]
    again = [body for body in bodies if "cache_salt" in body]
    assert (len(long), len(again)) == (ANSWERS, ANSWERS * SPOTS)
    assert len({body["cache_salt"] for body in again}) == ANSWERS
    last = max(again, key=lambda body: len(body["prompt"]))
    assert len(last["prompt"]) == max(len(body["prompt"]) for body in long) + LENGTH - 1


async def test_nan_logprobs_of_a_late_token_fail_a_candidate() -> None:
    async def broken(_path: str, body: Body, writer: Writer) -> None:
        start = len(body["prompt"])
        stream(writer, *(event(f"token_id:{start + i}", {f"token_id:{start + i}": None if i > 300 else -0.1})
                         for i in range(body["max_tokens"])))  # fmt: skip

    kept = await captured(reading(CONTEXT))
    assert judge(await found(reading(CONTEXT, broken), kept), described(kept), Accuracy()).verdict == "Failed"


@given(st.integers(1, 20), st.integers(-4096, 4096))
def test_only_prompts_with_room_for_the_answer_are_continued(prompts: int, room: int) -> None:
    kept = baseline(prompts=prompts)
    kept = replace(kept, prompts=tuple(replace(one, name=f"builtin/long-context/{one.name}") for one in kept.prompts))
    some = chosen(kept, range(prompts), room)
    assert len(some) == (min(prompts, ANSWERS) if room >= 3 else 0)
