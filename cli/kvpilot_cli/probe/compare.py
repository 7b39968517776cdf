"""Compare two engines by the operator's own code: capture the baseline, measure noise and KL divergence, and judge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.decide import Judgement, allowed, described, judge
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, loaded, run
from kvpilot_probes.client import Progress, http_client, served_models
from kvpilot_probes.errors import ProbeError
from kvpilot_probes.loaded import Connector
from kvpilot_probes.packs import ProbePrompt
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Measurement

Tell = Callable[[str], Progress]
"""Function that gets the name of a stage, and returns a callback for each answer in that stage."""


class UnknownModel(ProbeError):
    """Error for an endpoint that serves no model, or serves several while the options name none."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the two engines.

    Attributes:
        option: command-line option that named it, for messages.
        url: address without /v1.
        model: served model name, or None for the only one.
        api_key: bearer token to send, or None.
        connector: vLLM's name of its KV connector; empty if it has none.
    """

    option: str
    url: str
    model: str | None = None
    api_key: str | None = None
    connector: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result: the baseline's noise (`control`), the candidate's KL divergence (`measured`), and the verdict."""

    models: tuple[str, str]
    prompts: int
    positions: int
    left_out: tuple[str, ...]
    control: Measurement
    measured: Measurement
    judgement: Judgement


async def compare(
    baseline: Endpoint,
    candidate: Endpoint,
    prompts: Sequence[ProbePrompt],
    limits: Accuracy,
    settings: Settings,
    tell: Tell,
) -> Comparison:
    """Compare `candidate` with `baseline`, and judge it as the operator judges a canary."""
    models = await _model(baseline), await _model(candidate)

    def of(side: Endpoint, stage: str) -> Settings:
        return replace(settings, api_key=side.api_key, progress=tell(stage))

    asked = of(baseline, "baseline")
    kept = await run.capture(baseline.url, models[0], prompts, identity="", dtype="", settings=asked)
    noise = await run.control(baseline.url, models[0], kept, settings=of(baseline, "control"))
    kept = codec.with_control(kept, noise, datetime.now(UTC))
    known = described(kept)
    scraper = Scraper()
    try:
        found = await loaded.measure(
            candidate.url,
            models[1],
            kept,
            Connector(candidate.connector, partial(scraper.loaded, ServiceKey("", candidate.option), candidate.url)),
            lambda one: judge(one, known, limits).verdict == Verdict.PASSED,
            allowed=allowed(known, limits),
            settings=of(candidate, "candidate"),
        )
    finally:
        await scraper.close()
    return Comparison(
        models=models,
        prompts=len(kept.prompts),
        positions=kept.positions,
        left_out=kept.left_out,
        control=noise,
        measured=found,
        judgement=judge(found, known, limits),
    )


async def _model(side: Endpoint) -> str:
    if side.model is not None:
        return side.model
    async with http_client(side.api_key) as http:
        served = await served_models(side.url, http)
    if len(served) == 1:
        return served[0]
    found = ", ".join(served[:8]) or "no model"
    raise UnknownModel(f"{side.option} {side.url} serves {found}: name one with {side.option}-model")
