"""The prober captures baselines, finds stored ones again, and uses no baseline of another owner."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from probing_bench import IDENTITY, NAME, SPEC, Bench, capture, captured, opened, sound

from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.decision import Captured, Find, Measure, NothingKept, ProbeFailed, ProbeResult
from kvpilot_probes import codec
from support.probe_engine import counting, engine, noisy
from support.services import KEY, manifest, spec_of


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as one:
        yield one


async def test_a_captured_baseline_has_its_control_run(bench: Bench) -> None:
    baseline = await captured(bench)
    assert baseline.control is not None
    assert (baseline.control.prompts, baseline.control.top1_agreement_permille) == (8, 1000)
    assert codec.decode(codec.encode(baseline)).control == baseline.control


async def test_a_kept_baseline_is_adopted_without_asking_any_engine(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    async with sound() as (url, asked):
        again = await bench.ask(replace(capture(url), identity="capture/x/1"))
        alone = await bench.ask(Find("find/x", IDENTITY, NAME))
    assert asked == []
    for found in (again, alone):
        assert isinstance(found.outcome, Captured)
        assert found.outcome.adopted
        assert found.outcome.baseline.control is not None


async def test_a_baseline_of_a_noisy_engine_is_not_stored(bench: Bench) -> None:
    async with engine(noisy) as url:
        found = await bench.ask(capture(url))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineUnfit"
    assert found.outcome.message.startswith("pod p: the 16-bit engine differs from its own answers by a mean KL of ")


async def test_a_baseline_of_an_engine_that_answers_nonsense_is_not_stored(bench: Bench) -> None:
    async with engine(counting) as url:
        found = await bench.ask(capture(url), spec_of(manifest(accuracy={"probeSets": ["builtin/reasoning"]})))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineUnfit"
    assert "copied 0 of 8 facts" in found.outcome.message


async def test_a_kept_baseline_whose_control_is_beyond_the_limits_is_captured_again(bench: Bench) -> None:
    """Ignore a noisy baseline that an older version of kvpilot has stored."""
    good = await captured(bench)
    assert good.control is not None
    loud = replace(good.control, mean_kl_micronats=4_800_000, top1_agreement_permille=0)
    bench.cluster.keep(NAME, codec.encode(replace(good, control=loud)))
    async with sound() as (url, asked):
        alone = await bench.ask(Find("find/x", IDENTITY, NAME))
        assert asked == []
        again = await bench.ask(replace(capture(url), identity="capture/x/1"))
    assert isinstance(alone.outcome, NothingKept)
    assert isinstance(again.outcome, Captured)
    assert not again.outcome.adopted


@pytest.mark.parametrize(
    "why", ["missing", "damaged", "another's", "without control", "not base64", "no data", "not ours"]
)
async def test_an_unusable_kept_baseline_is_captured_again(bench: Bench, why: str) -> None:
    good = await captured(bench)
    ours = baseline_config_map(KEY, "u-1", IDENTITY, codec.encode(good))
    if why == "damaged":
        bench.cluster.keep(NAME, codec.encode(good)[:-7])
    elif why == "another's":
        bench.cluster.keep(NAME, codec.encode(replace(good, identity=IDENTITY[:8] + "ff")))
    elif why == "without control":
        bench.cluster.keep(NAME, codec.encode(replace(good, control=None)))
    elif why == "not base64":
        bench.cluster.maps[NAME] = {**ours, "binaryData": {"baseline": "%%%"}}
    elif why == "no data":
        bench.cluster.maps[NAME] = {**ours, "binaryData": None}
    elif why == "not ours":
        bench.cluster.maps[NAME] = {**ours, "metadata": {"name": NAME, "labels": ours["metadata"]["labels"]}}
    assert isinstance((await bench.ask(Find("find/x", IDENTITY, NAME))).outcome, NothingKept)
    async with sound() as (url, asked):
        found = await bench.ask(replace(capture(url), identity="capture/x/1"))
    assert "/v1/completions" in asked
    assert isinstance(found.outcome, Captured)
    assert not found.outcome.adopted


async def test_a_baseline_written_by_another_owner_is_never_used(bench: Bench) -> None:
    content = codec.encode(await captured(bench))
    bench.cluster.maps[NAME] = baseline_config_map(KEY, "u-2", IDENTITY, content)
    async with sound() as (url, asked):
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineLost"
    assert f"ConfigMap {NAME} is not the service's own: delete it" in found.outcome.message
    assert asked == []


async def test_a_lost_baseline_is_reported_and_not_counted_against_the_engine(bench: Bench) -> None:
    found = await bench.ask(Measure("check/x", "p", "http://127.0.0.1:9", "m", "fp8", NAME, serving=True))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "BaselineLost"
    assert NAME in found.outcome.message


async def test_a_running_probe_has_a_result_without_an_outcome(bench: Bench) -> None:
    request = Find("find/x", IDENTITY, NAME)
    bench.of(KEY).ensure(SPEC, request)
    assert bench.of(KEY).result == ProbeResult(request, None)
    bench.of(KEY).ensure(SPEC, None)
    assert bench.of(KEY).result is None
