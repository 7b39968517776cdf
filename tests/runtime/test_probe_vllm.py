"""Probes of real vLLM with real weights distinguish noise, damage and garbage; `kvpilot probe` does so, too.

Each dtype has its own vLLM on the CPU.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvpilot_cli.probe import command
from kvpilot_localcluster.engines.real import HANGS, Engine
from kvpilot_operator.api.spec import parse
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.decide import allowed, described, judge
from kvpilot_operator.mesh import Identity
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, loaded, packs, pressure
from kvpilot_probes.client import http_client
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import EngineUnreachable, NothingFits
from kvpilot_probes.pressure import FILL_ANSWER_TOKENS, Filled, Pool, fill
from kvpilot_probes.results import baseline_worse, candidate_worse
from kvpilot_probes.run import capture, control, measure
from kvpilot_probes.sequential import Allowed, Answer, decide
from kvpilot_probes.session import GiveWay, Settings
from kvpilot_probes.stats import Measurement
from kvpilot_smallmodels.models import smollm2_135m, tiny_llama
from support.crd import apply_defaults
from support.forked_serve import engine
from support.meshed import Mesh, sidecar
from support.processors import serves_quantized_by_vllm
from support.scrape_loop import ignore, scraping
from support.services import manifest

MODEL = "m"
CONTEXT = 2048
SETTINGS = Settings(deadline_seconds=1200)
GENERAL = ("--probe-set", "builtin/general")
DEFAULTS = parse(apply_defaults(manifest())).accuracy
KV_MEMORY = "--kv-cache-memory-bytes=256M"
# vLLM's CPU backend accepts this dtype, but computes wrong values.
BROKEN = "int4_per_token_head"

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of an engine with a 16-bit cache."""
    with engine(smollm2_135m(), "auto", tmp_path_factory.mktemp("auto"), KV_MEMORY) as running:
        yield running.url


@pytest.fixture(scope="module")
def reference(sixteen: str) -> tuple[Baseline, Measurement]:
    """Return the answers of the 16-bit engine, after encoding and decoding, and its noise (the control)."""
    prompts = packs.load(["builtin/general"])

    async def both(url: str) -> tuple[Baseline, Measurement]:
        captured = await capture(url, MODEL, prompts, identity="test", dtype="auto", settings=SETTINGS)
        kept = codec.decode(codec.encode(captured))
        noise = await control(url, MODEL, kept, settings=SETTINGS)
        return codec.with_control(kept, noise, datetime.now(UTC)), noise

    return asyncio.run(both(sixteen))


def test_a_16_bit_engine_compared_with_itself_in_other_batches_has_little_noise(
    reference: tuple[Baseline, Measurement],
) -> None:
    kept, noise = reference
    assert len(kept.prompts) == 8
    assert noise.prompts == 8
    assert noise.positions > 200
    assert noise.mean_kl_micronats < 5_000
    assert noise.top1_agreement_permille >= 950


def test_k4v4_stays_within_the_default_limits_from_its_pages_and_from_host_memory(
    reference: tuple[Baseline, Measurement], tmp_path: Path
) -> None:
    kept, _ = reference
    with engine(smollm2_135m(), "k4v4", tmp_path, KV_MEMORY, "--kv-offloading-size=0.25", "--block-size=16") as running:
        looks = []

        async def look() -> float:
            looks.append(running.metric("vllm:external_prefix_cache_hits_total"))
            return looks[-1]

        async def story() -> Measurement:
            own = await measure(running.url, MODEL, kept, settings=SETTINGS)
            host = loaded.Connector("host", look)
            limits = allowed(described(kept), DEFAULTS)
            return await loaded.extended(running.url, MODEL, kept, own, host, allowed=limits, settings=SETTINGS)

        found = asyncio.run(story())
    print(*looks, *found.seen, sep="\n")
    judgement = judge(found, described(kept), DEFAULTS)
    assert judgement.verdict == Verdict.PASSED, judgement.message
    returned = [one for one in found.seen if one.bucket == "from-host"]
    assert sum(one.kl for one in returned) <= len(returned) * 0.02
    # Prefixes come from the GPU's cache, unless a probe asks for others. Then every whole block is loaded.
    assert looks[0] == 0
    smallest = sorted((len(prompt.tokens) - 1) // 16 * 16 for prompt in kept.prompts)[: len(returned)]
    assert looks[-1] >= 2 * sum(smallest) > 200


def test_a_model_of_text_alone_is_never_said_to_have_passed_prompts_with_images(sixteen: str) -> None:
    with pytest.raises(NothingFits, match=r"builtin/images \(.*not a multimodal model"):
        asyncio.run(
            capture(sixteen, MODEL, packs.load(["builtin/images"]), identity="i", dtype="auto", settings=SETTINGS)
        )


def gated(baseline: str, candidate: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and output of `kvpilot probe`."""
    common = ("--baseline", baseline, "--candidate", candidate, "--json", "--deadline-seconds", "1200")
    with redirect_stdout(StringIO()) as said:
        code = command.main([*common, *arguments])
    found: dict[str, Any] = json.loads(said.getvalue())
    print(found["message"])
    return code, found


@pytest.mark.long
def test_the_gate_lets_a_sixteen_bit_engine_pass_against_itself_by_the_default_limits(sixteen: str) -> None:
    code, found = gated(sixteen, sixteen, *GENERAL)
    assert code == 0, found["message"]
    assert found["baseline"]["model"] == MODEL
    assert found["measured"]["positions"] > 200


@pytest.mark.long
def test_the_gate_lets_k4v4_pass_by_the_default_limits_on_the_default_packs(sixteen: str, tmp_path: Path) -> None:
    with engine(smollm2_135m(), "k4v4", tmp_path, KV_MEMORY) as running:
        code, found = gated(sixteen, running.url)
    assert code == 0, found["message"]
    assert found["measured"]["positions"] > 600


@pytest.mark.long
def test_generated_packs_find_no_damage_in_the_captured_engine(sixteen: str) -> None:
    settings = replace(SETTINGS, concurrency=4)

    async def story() -> tuple[Baseline, Measurement]:
        sets = [f"builtin/{name}" for name in packs.GENERATED]
        kept = await capture(sixteen, MODEL, packs.load(sets), identity="i", dtype="auto", settings=settings)
        kept = codec.decode(codec.encode(kept))
        return kept, await measure(sixteen, MODEL, kept, settings=settings)

    kept, found = asyncio.run(story())
    print(found.milliseconds, found.requests, found.tokens, found.tasks, *found.seen, sep="\n")
    lengths = {p.bucket: len(p.tokens) for p in kept.prompts}
    assert [lengths[f"length-{(CONTEXT - 32) // share}"] for share in (8, 2, 1)] == [252, 1008, 2016]
    assert kept.left_out == ()
    assert found.mean_kl_micronats < 5_000
    assert found.top1_agreement_permille >= 950
    # This small model solves some tasks of each kind, and the same engine solves about as many in a second run.
    assert {tasks.bucket for tasks in found.tasks} == {"agent", "reasoning"}
    assert all(tasks.baseline_solved > 0 for tasks in found.tasks)
    assert not any(candidate_worse(tasks) or baseline_worse(tasks) for tasks in found.tasks)


@serves_quantized_by_vllm
@pytest.mark.long
def test_fp8_fails_the_default_limits_with_this_model_but_is_far_from_garbage(sixteen: str, tmp_path: Path) -> None:
    with engine(smollm2_135m(), "fp8", tmp_path, KV_MEMORY) as running:
        code, found = gated(sixteen, running.url)
    assert code == 1, found["message"]
    assert found["reason"] == "AccuracyRegressed"
    assert 5_000 < found["excess_kl_micronats"] < 100_000
    assert found["measured"]["top1_agreement_permille"] > 850
    assert found["measured"]["positions"] > 600


@pytest.fixture(scope="module")
def garbage(sixteen: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Return the gate's verdict on an engine that answers garbage, with the requests of the operator's own probes."""
    with engine(smollm2_135m(), BROKEN, tmp_path_factory.mktemp("broken"), KV_MEMORY) as running:
        return gated(sixteen, running.url, *GENERAL)


@serves_quantized_by_vllm
def test_a_garbage_dtype_has_very_large_damage_at_a_bounded_cost(
    garbage: tuple[int, dict[str, Any]],
) -> None:
    _, found = garbage
    measured, noise = found["measured"], found["control"]
    assert measured["mean_kl_micronats"] - noise["mean_kl_micronats"] > 500_000
    assert measured["top1_agreement_permille"] < 700
    # The engine gets half of each prompt, the whole prompt, its continuations, and one answer to show.
    assert found["baseline"]["prompts"] == 8
    assert measured["requests"] <= 8 * (SETTINGS.max_resumes + 2) + 1
    assert measured["sample"]["canary"] != measured["sample"]["stable"]


@serves_quantized_by_vllm
def test_the_gate_fails_a_dtype_that_answers_garbage(garbage: tuple[int, dict[str, Any]]) -> None:
    code, found = garbage
    assert code == 1, found["message"]
    assert found["excess_kl_micronats"] > 500_000


async def test_an_engine_behind_mutual_tls_is_scraped_and_probed_like_any_other(sixteen: str, tmp_path: Path) -> None:
    mesh, prompts = Mesh(tmp_path / "mesh"), packs.load(["builtin/structured"])[:3]
    identity = Identity(mesh.issue("kvpilot-system", "kvpilot-operator", tmp_path / "ours"))
    async with (
        sidecar(sixteen, mesh.issue("models", "default", tmp_path / "theirs")) as meshed,
        scraping(identity) as scraper,
    ):
        for url in (sixteen, meshed.url):
            assert (await scraper.scrape(ServiceKey("models", "chat"), url, ignore)).capacity_tokens > 0
        kept = await capture(sixteen, MODEL, prompts, identity="test", dtype="auto", settings=SETTINGS)
        within = replace(SETTINGS, tls=identity.tls())
        found = await measure(meshed.url, MODEL, kept, settings=within)
        assert found.mean_kl_micronats < 5_000
        assert found.top1_agreement_permille >= 950
        with pytest.raises(EngineUnreachable):
            await measure(meshed.url, MODEL, kept, settings=SETTINGS)


def test_a_canary_is_judged_while_prompts_fill_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only this test's machine may be slow: the run ends as soon as the bucket has a verdict.
    monkeypatch.setattr(pressure, "PRESSURE_SECONDS", 0.9 * pressure.FILL_SECONDS)
    prompts = packs.load(["builtin/structured"])
    usage = []

    async def story(running: Engine) -> Filled:
        kept = await capture(running.url, MODEL, prompts, identity="test", dtype="k4v4", settings=SETTINGS)

        async with scraping() as scraper:

            async def look() -> Pool:
                page = await scraper.scrape(ServiceKey("default", "chat"), running.url, lambda _: None)
                usage.append(page.usage)
                return Pool(page.capacity_tokens, page.usage)

            limits = Allowed(kl=0.5, disagreement=0.5)
            return await fill(running.url, MODEL, kept, look=look, allowed=limits, settings=SETTINGS)

    # Fillers' prompts and answers grow with the context, and their number with the pool.
    small = ("--max-model-len=1024", "--kv-cache-memory-bytes=2M", "--max-num-seqs=64")
    with engine(tiny_llama(), "k4v4", tmp_path, *small) as running:
        filled = asyncio.run(story(running))
    assert filled.context == 1024 - FILL_ANSWER_TOKENS
    assert max(usage) >= 0.9
    assert filled.seen and {seen.bucket for seen in filled.seen} == {"pressure"}
    assert decide(filled.seen, ["pressure"], Allowed(kl=0.5, disagreement=0.5)).answer != Answer.FAILED


def test_a_probe_yields_to_queued_users_and_still_finishes(tmp_path: Path) -> None:
    """Run one request at a time. With three busy users, two requests wait nearly all the time."""
    prompts = packs.load(["builtin/structured"])[:3]
    body = {"model": MODEL, "prompt": [7] * 16, "max_tokens": 200, "ignore_eos": True, "temperature": 0}

    async def story(url: str) -> tuple[float, Measurement]:
        async with http_client() as http, scraping() as scraper:
            load = partial(scraper.load, ServiceKey("default", "chat"), url)
            beside_users = Settings(concurrency=1, give_way=GiveWay(load, 0.5), priority=1_000_000)
            kept = await capture(url, MODEL, prompts, identity="test", dtype="auto", settings=beside_users)

            refused = asyncio.Event()

            async def user() -> set[int]:
                statuses = set()
                while not refused.is_set():
                    async with http.post(f"{url}/v1/completions", json=body) as answer:
                        await answer.read()
                        statuses.add(answer.status)
                return statuses

            users = [asyncio.create_task(user()) for _ in range(3)]
            async with asyncio.timeout(HANGS):
                while (queued := (await load())[0]) < 2:
                    await asyncio.sleep(0.05)
            found = await measure(url, MODEL, kept, settings=beside_users)
            assert (await load())[0] > 0
            refused.set()
            assert await asyncio.gather(*users) == [{200}] * 3
            return queued, found

    arguments = ("--max-num-seqs=1", "--scheduling-policy=priority", "--kv-cache-memory-bytes=64M")
    with engine(tiny_llama(), "auto", tmp_path, *arguments) as running:
        queued, after = asyncio.run(story(running.url))
    assert queued == 2
    assert after.mean_kl_micronats < 5_000
    assert after.top1_agreement_permille >= 950
    assert after.tokens > 3 * 32
