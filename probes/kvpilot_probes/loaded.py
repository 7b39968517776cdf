"""Judge answers over KV pages that the engine has loaded through its KV connector.

The pages come from host memory, from a disk, or from another engine. All other probes use pages that the GPU has. Here,
each prompt is sent twice by requests that ignore these pages. The engine stores the first prompt through its connector,
and loads it for the second. The engine's metrics tell how many tokens it has loaded.
"""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from kvpilot_probes import run
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import ProbeTimeout
from kvpilot_probes.generated import FROM
from kvpilot_probes.in_flight import bounded
from kvpilot_probes.run import follow, in_turns
from kvpilot_probes.sequential import Allowed, Answer, decide
from kvpilot_probes.session import USUAL, Settings, allow, probing
from kvpilot_probes.stats import Compared, Measurement, by_bucket

MOST_PROMPTS = 16
# Longer prompts come first: LMCache stores only whole chunks, which have 256 tokens by default.
SHORT_TOKENS = 256
# Smallest share of the prompts' tokens that the engine must load, over all requests with an answer to compare. A prompt
# of 511 tokens may have one chunk of 256.
LOADED = 0.5
# Connectors by which an engine never loads pages that it stored itself, so that no request here would load any.
FROM_OTHERS = ("NixlConnector",)


class Connector(NamedTuple):
    """KV connector of an engine: vLLM's name of it (empty: the engine has none), and a function that returns the number
    of tokens loaded so far."""

    name: str
    loaded: Callable[[], Awaitable[float]]


async def measure(
    base_url: str,
    model: str,
    baseline: Baseline,
    connector: Connector,
    passes: Callable[[Measurement], bool],
    *,
    allowed: Allowed,
    settings: Settings = USUAL,
) -> Measurement:
    """Return the damage of the engine at `base_url`. If it `passes`, judge its prompts through `connector`, too."""
    found = await run.measure(base_url, model, baseline, allowed=allowed, settings=settings)
    if not connector.name or not passes(found):
        return found
    return await extended(base_url, model, baseline, found, connector, allowed=allowed, settings=settings)


async def extended(
    base_url: str,
    model: str,
    baseline: Baseline,
    found: Measurement,
    connector: Connector,
    *,
    allowed: Allowed,
    settings: Settings = USUAL,
) -> Measurement:
    """Return the measurement `found` of the same engine, with one more bucket: prompts loaded through `connector`.

    The run stops at the bucket's verdict. If the time or the deadline of `settings` is over first, the result is `cut`.
    The run ignores answers before which the engine has loaded too few tokens. It sends the first prompt alone, and no
    further one if that was not loaded. With a connector of FROM_OTHERS it sends none, and the bucket stays without
    answers.
    """
    if connector.name in FROM_OTHERS:
        return found.extended(FROM + connector.name, (), 0, 0)
    began, bucket, compared = time.monotonic(), FROM + connector.name, list[Compared]()
    over = began + settings.budget_seconds - found.milliseconds / 1000
    sizes = [len(prompt.tokens) for prompt in baseline.prompts]
    order = sorted(in_turns(baseline, settings.turn), key=lambda index: sizes[index] <= SHORT_TOKENS)[:MOST_PROMPTS]
    before, asked, kept, cut = math.nan, 0, 0, False

    async def keep_if_loaded() -> bool:
        """Return True if enough tokens were loaded. If not, drop the answers since `kept`."""
        enough = await connector.loaded() - before >= LOADED * asked
        if not enough:
            del compared[kept:]
        return enough

    try:
        async with probing(base_url, model, settings) as (engine, throttle, deadline):
            loading = replace(engine, from_connector=True)
            answers = sum(len(baseline.prompts[i].answer) for i in order)
            allow(deadline, settings, 2 * sum(sizes[i] for i in order), answers)

            async def ask(index: int) -> None:
                nonlocal asked, cut
                if decide(by_bucket(compared), (bucket,), allowed).answer != Answer.GO_ON:
                    return
                if time.monotonic() >= over:
                    cut = True
                    return
                prompt = replace(baseline.prompts[index], bucket=bucket)
                judged, sent = await throttle.beside_users(
                    loading, lambda one: follow(one, throttle, index, prompt, settings.max_resumes)
                )
                asked += (sent - 1) * sizes[index]  # the first request may have nothing to load
                compared.extend(judged)

            for some in (order[:1], order[1:]):
                before, asked, kept = await connector.loaded(), 0, len(compared)
                await bounded(some, ask, settings.concurrency, sizes.__getitem__)
                if not await keep_if_loaded():
                    break
    except ProbeTimeout:
        # Do not lose `found`: all other buckets are complete.
        cut = True
        await keep_if_loaded()
    return found.extended(bucket, compared, throttle.spent, round((time.monotonic() - began) * 1000), cut=cut)
