"""A probe judges answers over pages that the engine has loaded through its KV connector."""

import asyncio
from dataclasses import replace
from math import nan

import pytest

from kvpilot_probes import loaded, stats
from kvpilot_probes.loaded import SHORT_TOKENS, Connector
from kvpilot_probes.sequential import MIN_PROMPTS, Allowed
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Logprobs
from support.probe_engine import Body, Writer, baseline, counting, engine, event, stream

FOUND = replace(stats.summarise((), planned=["general"]), milliseconds=10_000)
ALLOWED = Allowed(kl=0.02, disagreement=0.03)


@pytest.mark.parametrize(("seconds", "prompts"), [(60.0, MIN_PROMPTS), (5.0, 0)])
async def test_long_prompts_are_loaded_first_and_no_prompt_after_the_time_of_the_run(
    seconds: float, prompts: int
) -> None:
    asked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append(len(body["prompt"]))
        await counting(path, body, writer)

    async def tokens() -> float:
        return float(sum(asked))

    kept = baseline(prompts=20)
    size = SHORT_TOKENS + 1
    answer = tuple(Logprobs(size + i, {size + i: -0.1, 9999: -3.0}) for i in range(8))
    kept = replace(kept, prompts=(*kept.prompts, replace(kept.prompts[0], tokens=range(size), answer=answer)))
    settings = Settings(budget_seconds=seconds, concurrency=1)
    some = Connector("Some", tokens)
    async with engine(handler) as url:
        found = await loaded.extended(url, "m", kept, FOUND, some, allowed=ALLOWED, settings=settings)
    assert found.planned == ("general", "from-Some")
    assert (len(found.seen), found.cut) == (prompts, prompts == 0)
    assert asked[:2] == [size] * min(2, prompts)


@pytest.mark.parametrize(("answered", "prompts"), [(0, 0), (1, 1)], ids=["at once", "after one prompt"])
async def test_a_timeout_keeps_all_finished_answers_and_cuts_the_result(answered: int, prompts: int) -> None:
    asked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append(len(body["prompt"]))
        if len(asked) > answered:
            await asyncio.Event().wait()
        await counting(path, body, writer)

    async def tokens() -> float:
        return float(sum(asked))

    before = stats.summarise([stats.Compared(0, 0.01, agrees=True)], planned=["general"])
    async with engine(handler) as url:
        some, settings = Connector("Some", tokens), Settings(deadline_seconds=5.0 if answered else 0.2)
        found = await loaded.extended(url, "m", baseline(8, 20), before, some, allowed=ALLOWED, settings=settings)
    assert (found.planned, found.seen[:1], found.cut) == (("general", "from-Some"), before.seen, True)
    assert (found.prompts, found.positions, len(found.seen)) == (1, 1, 1 + prompts)


@pytest.mark.parametrize("resumes", [0, 2])
async def test_an_answer_is_resumed_at_most_as_often_as_the_settings_allow(resumes: int) -> None:
    asked: list[int] = []

    async def handler(_path: str, body: Body, writer: Writer) -> None:
        asked.append(len(body["prompt"]))
        wrong = event("token_id:7777", {"token_id:7777": -0.1, "token_id:9999": -3.0})
        stream(writer, *[wrong] * body["max_tokens"])

    async def tokens() -> float:
        return float(sum(asked))

    async with engine(handler) as url:
        some, settings = Connector("Some", tokens), Settings(max_resumes=resumes)
        await loaded.extended(url, "m", baseline(8, 1), FOUND, some, allowed=ALLOWED, settings=settings)
    assert len(asked) == 1 + resumes


async def test_no_answer_counts_if_the_engine_has_loaded_few_of_the_requests_of_a_prompt() -> None:
    asked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append(len(body["prompt"]))
        # Every second token differs, and each difference costs a request.
        steps = (7777 if i % 2 else i for i in range(len(body["prompt"]), len(body["prompt"]) + body["max_tokens"]))
        stream(writer, *(event(f"token_id:{i}", {f"token_id:{i}": -0.1, "token_id:9999": -3.0}) for i in steps))

    async def tokens() -> float:
        return float(asked[0] if asked else 0)  # only one request has loaded its prompt

    async with engine(handler) as url:
        some = Connector("Some", tokens)
        found = await loaded.extended(url, "m", baseline(), FOUND, some, allowed=ALLOWED)
    assert found.planned == ("general", "from-Some")
    assert (found.seen, found.broken) == ((), 0)
    assert len(asked) > 3


@pytest.mark.parametrize("counts", [(nan, 1e6), (1e6, nan), (1e6, 0.0)], ids=["unknown", "lost", "restarted"])
async def test_no_answer_counts_if_the_loaded_tokens_are_unknown_or_counted_from_zero_again(
    counts: tuple[float, float],
) -> None:
    left = list(counts)

    async def tokens() -> float:
        return left.pop(0)

    async with engine(counting) as url:
        some = Connector("Some", tokens)
        found = await loaded.extended(url, "m", baseline(), FOUND, some, allowed=ALLOWED)
    assert (found.planned, found.seen, left) == (("general", "from-Some"), (), [])


async def test_nothing_is_asked_of_an_engine_that_only_loads_pages_of_others() -> None:
    asked: list[str] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append(path)
        await counting(path, body, writer)

    async def tokens() -> float:
        return 1e9 * len(asked)  # requests of users have loaded much

    async with engine(handler) as url:
        found = await loaded.extended(url, "m", baseline(), FOUND, Connector("NixlConnector", tokens), allowed=ALLOWED)
    assert (found.planned, found.seen, asked) == (("general", "from-NixlConnector"), (), [])
