"""One comparison: capture the baseline, measure its noise, measure the candidate, judge. The operator's own parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kvpilot_operator.api.spec import Accuracy
from kvpilot_operator.decide.accuracy.verdict import Judgement, judge
from kvpilot_operator.probes import codec, run
from kvpilot_operator.probes.client import Progress, http_client, served_models
from kvpilot_operator.probes.errors import ProbeError
from kvpilot_operator.probes.packs import ProbePrompt
from kvpilot_operator.probes.session import Settings
from kvpilot_operator.probes.stats import Measurement
from kvpilot_operator.state.status import Baseline

Tell = Callable[[str], Progress]
"""Given what begins now, in words; what it returns is called at each answer of an engine."""


class UnknownModel(ProbeError):
    """An endpoint serves no model, or several, and none was named."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One side: its option on the command line, its address without /v1, the model's served name (None: its only one),
    and the key that it wants, if any."""

    option: str
    url: str
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found: the baseline's noise against itself, the candidate's damage, and the verdict."""

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
    """Judge `candidate` as the operator judges a canary; raises a `ProbeError` where it cannot."""
    models = await _model(baseline), await _model(candidate)
    ours, theirs = (replace(settings, api_key=side.api_key) for side in (baseline, candidate))
    kept = await run.capture(
        baseline.url, models[0], prompts, identity="", dtype="", settings=ours, progress=tell("baseline")
    )
    noise = await run.control(baseline.url, models[0], kept, settings=ours, progress=tell("control"))
    found = await run.measure(candidate.url, models[1], kept, settings=theirs, progress=tell("candidate"))
    return Comparison(
        models=models,
        prompts=len(kept.prompts),
        positions=kept.positions,
        left_out=kept.left_out,
        control=noise,
        measured=found,
        judgement=judge(found, _control(kept, noise), limits),
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


def _control(kept: codec.Baseline, noise: Measurement) -> Baseline:
    """The noise as a verdict wants it."""
    return Baseline(
        config_map="",
        identity=kept.identity,
        dtype=kept.dtype,
        captured_time=datetime.now(UTC),
        prompts=noise.prompts,
        positions=noise.positions,
        control_mean_kl_micronats=noise.mean_kl_micronats,
        control_p99_kl_micronats=noise.p99_kl_micronats,
        control_top1_agreement_permille=noise.top1_agreement_permille,
    )
