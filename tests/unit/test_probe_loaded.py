"""A probe judges answers over pages that the engine has loaded through its KV connector."""

from dataclasses import replace

import pytest

from kvpilot_probes import loaded, stats
from kvpilot_probes.loaded import SHORT_TOKENS, Connector
from kvpilot_probes.sequential import MIN_PROMPTS, Allowed
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Logprobs
from support.probe_engine import Body, Writer, baseline, counting, engine

FOUND = replace(stats.summarise((), planned=["general"]), milliseconds=10_000)
ALLOWED = Allowed(kl=0.02, disagreement=0.03)


@pytest.mark.parametrize(("seconds", "prompts"), [(60.0, MIN_PROMPTS), (5.0, 0)])
async def test_long_prompts_are_loaded_first_and_none_after_the_time_of_the_run(seconds: float, prompts: int) -> None:
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
    assert len(found.seen) == prompts
    assert asked[:2] == [size] * min(2, prompts)
