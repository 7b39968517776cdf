"""One run of a probe against an engine: its requests, its end, and its conclusions from the answers."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.decide import described, judge
from kvpilot_probes import codec, run, session, stats
from kvpilot_probes.codec import Baseline, BaselinePrompt
from kvpilot_probes.errors import (
    BaselineTooLarge,
    EngineUnreachable,
    MalformedAnswer,
    NothingFits,
    ProbeTimeout,
)
from kvpilot_probes.in_flight import bounded
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.results import Done, Task
from kvpilot_probes.run import capture, control, measure
from kvpilot_probes.sequential import Allowed, Answer, decide
from kvpilot_probes.session import CONCURRENCY, TOKENS_IN_FLIGHT, Settings
from kvpilot_probes.stats import Logprobs
from support.probe_engine import (
    PROMPTS,
    SETTINGS,
    Body,
    Writer,
    baseline,
    completing,
    counting,
    engine,
    event,
    respond,
    stream,
)
from support.services import NOW

ALLOWED = Allowed(kl=0.02, disagreement=0.03)


async def test_the_captured_engine_shows_no_damage() -> None:
    async with engine(counting) as url:
        kept = await capture(url, "m", PROMPTS, identity="abc", dtype="auto", settings=SETTINGS)
        again = await control(url, "m", kept, settings=SETTINGS)
    assert (kept.identity, kept.dtype, kept.positions, kept.left_out) == ("abc", "auto", 32, ())
    assert [p.name for p in kept.prompts] == [f"builtin/general/p{i}" for i in range(4)]
    assert (again.mean_kl_micronats, again.p99_kl_micronats, again.top1_agreement_permille) == (0, 0, 1000)
    # The first token of each prompt comes from prefill and proves nothing. The probe sends half and then all of
    # each prompt, and one more request for an answer to show.
    assert (again.prompts, again.positions, again.requests) == (4, 28, 9)


async def test_every_position_of_an_answer_has_its_prompts_bucket() -> None:
    prompts = [ProbePrompt("p", f"{i}", (Message("user", f"q{i}"),), bucket=f"length-{i}") for i in range(2)]
    async with engine(counting) as url:
        captured = await capture(url, "m", prompts, identity="i", dtype="auto", settings=SETTINGS)
    kept = codec.decode(codec.encode(captured))
    assert [p.bucket for p in kept.prompts] == ["length-0", "length-1"]
    one = kept.prompts[1]
    assert stats.compare(1, one.answer[0], one.answer[0], one.bucket).bucket == "length-1"


async def test_after_a_different_token_the_candidate_continues_from_the_baselines() -> None:
    asked: list[list[int]] = []

    async def parts_at_six(path: str, body: Body, writer: Writer) -> None:
        asked.append(body["prompt"])
        start = len(body["prompt"])
        steps = [7777 if i == 6 else i for i in range(start, start + body["max_tokens"])]
        stream(writer, *(event(f"token_id:{t}", {f"token_id:{t}": -0.1}) for t in steps))

    async with engine(parts_at_six) as url:
        found = await measure(url, "m", baseline(prompts=1), settings=SETTINGS)
    assert asked[:2] == [[1, 2, 3], [1, 2, 3, 3, 4, 5, 6]]
    assert (found.positions, found.top1_agreement_permille) == (6, 833)
    assert found.sample is not None and found.sample.canary == "x" * 8


async def test_an_engine_that_always_differs_has_total_damage_after_few_requests() -> None:
    garbage = completing(event("token_id:7777", {"token_id:7777": -0.01, "token_id:7778": -9.0}))
    async with engine(garbage) as url:
        found = await measure(url, "m", baseline(64), settings=Settings(tokens=64, max_resumes=12))
    assert found.requests == 2 * 13 + 1
    assert (found.positions, found.top1_agreement_permille) == (26, 0)
    assert found.mean_kl_micronats > 5_000_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "NaN"])
async def test_one_nan_logprob_fails_a_candidate(value: object) -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        start = len(body["prompt"])
        steps = range(start, start + body["max_tokens"])
        stream(
            writer,
            *(event(f"token_id:{i}", {f"token_id:{i}": -0.1, "token_id:9999": value if i == 6 else -3}) for i in steps),
        )

    async with engine(handler) as url:
        two = replace(SETTINGS, concurrency=2)
        found = await measure(url, "m", baseline(prompts=8), allowed=ALLOWED, settings=two)
    outcome = decide(found.seen, found.planned, ALLOWED, ended=True)
    assert outcome.answer == Answer.FAILED
    # The run ends with the first answer that suffices for the verdict.
    assert found.prompts <= 2
    # An engine whose logprobs are not numbers fails even with the loosest limits.
    control = described(codec.with_control(baseline(), replace(found, mean_kl_micronats=0), NOW))
    judged = judge(found, control, Accuracy(max_excess_kl_millinats=100_000, min_top1_agreement_percent=0))
    assert (judged.verdict, judged.reason) == ("Failed", "AccuracyRegressed")
    assert "logprobs that are not numbers" in judged.message


async def test_another_order_of_logprobs_is_not_damage() -> None:
    async def handler(_path: str, body: Body, writer: Writer) -> None:
        start = len(body["prompt"])
        steps = range(start, start + body["max_tokens"])
        stream(writer, *(event(f"token_id:{i}", {"token_id:9999": -3.0, f"token_id:{i}": -0.1}) for i in steps))

    async with engine(handler) as url:
        found = await measure(url, "m", baseline(prompts=8), allowed=ALLOWED, settings=SETTINGS)
    assert (found.mean_kl_micronats, found.prompts) == (0, 8)
    assert decide(found.seen, found.planned, ALLOWED).answer == Answer.PASSED


@pytest.mark.parametrize("answered", [0, 3])
async def test_an_answer_whose_stream_breaks_gives_no_verdict(answered: int) -> None:
    async def handler(_path: str, body: Body, writer: Writer) -> None:
        start = len(body["prompt"])
        steps = range(start, start + answered)
        respond(writer, b"".join(event(f"token_id:{i}", {f"token_id:{i}": -0.1}) for i in steps) + b'data: {"choi')

    async with engine(handler) as url:
        with pytest.raises((MalformedAnswer, EngineUnreachable)):
            await measure(url, "m", baseline(), allowed=ALLOWED, settings=SETTINGS)


async def test_a_run_out_of_time_is_judged_by_the_compared_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def slow(path: str, body: Body, writer: Writer) -> None:
        nonlocal now
        now += 10.0 if path == "/v1/completions" else 0.0
        await counting(path, body, writer)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    task = Task("text", '"4711"', 8)
    prompts = tuple(
        replace(p, bucket="ab"[i % 2], task=task, done=Done(2, 2)) for i, p in enumerate(baseline(prompts=8).prompts)
    )
    kept = replace(baseline(), prompts=prompts)
    settings = replace(SETTINGS, concurrency=1)
    async with engine(slow) as url:
        found = await measure(url, "m", kept, allowed=ALLOWED, settings=replace(settings, budget_seconds=45.0))
        now = 0.0
        whole = await measure(url, "m", kept, allowed=ALLOWED, settings=settings)
    assert (found.prompts, found.cut, found.tasks) == (5, True, ())
    control = described(codec.with_control(kept, found, NOW))
    judged = judge(found, control, Accuracy())
    assert judged.verdict == "Passed"
    assert judged.covered.startswith("nothing; not: a, b, tasks; ")
    assert judged.covered.endswith(" s, when its time was over")
    assert (whole.prompts, whole.cut, len(whole.tasks)) == (8, False, 2)


async def test_a_probe_run_without_time_gives_no_verdict() -> None:
    async with engine(counting) as url:
        found = await measure(url, "m", baseline(), settings=replace(SETTINGS, budget_seconds=0.0))
    assert (found.prompts, found.cut) == (0, True)
    control = described(codec.with_control(baseline(), replace(found, positions=8), NOW))
    assert judge(found, control, Accuracy()).verdict == "Inconclusive"


async def test_a_periodic_run_skips_sound_buckets_and_starts_at_other_prompts_each_time() -> None:
    kept = replace(baseline(prompts=12), prompts=tuple(
        replace(p, bucket=("a", "b")[i % 2], tokens=(i, 2, 3)) for i, p in enumerate(baseline(prompts=12).prompts)
    ))  # fmt: skip
    asked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if len(body["prompt"]) == 3:
            asked.append(body["prompt"][0])
        await counting(path, body, writer)

    async with engine(handler) as url:
        for turn, first in ((0, [0, 1, 2, 3]), (4, [8, 9, 10, 11])):
            asked.clear()
            settings = Settings(tokens=8, concurrency=1, brief=True, turn=turn)
            found = await measure(url, "m", kept, allowed=ALLOWED, settings=settings)
            assert (found.prompts, found.planned, asked[:4]) == (10, ("a", "b"), first)


async def test_a_model_without_a_chat_template_is_asked_in_plain_text() -> None:
    plain: list[str] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and "messages" in body:
            respond(writer, b'{"error": "no chat template"}', "400 Bad Request")
            return
        if path == "/tokenize":
            plain.append(body["prompt"])
        await counting(path, body, writer)

    async with engine(handler) as url:
        kept = await capture(url, "m", PROMPTS[:1], identity="i", dtype="auto", settings=SETTINGS)
    assert plain[-1] == "user: question 0\nassistant:"
    assert kept.positions == 8


async def test_a_probe_of_a_hanging_engine_ends_at_the_deadline() -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, event("token_id:3", {"token_id:3": -0.1}))
        await writer.drain()
        await asyncio.sleep(60)

    async with engine(handler) as url:
        with pytest.raises(ProbeTimeout, match="within 1 s"):
            await measure(url, "m", baseline(), settings=Settings(tokens=8, deadline_seconds=1))


@pytest.mark.slow
async def test_the_deadline_of_a_run_grows_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "START_SECONDS", 1.0)
    monkeypatch.setattr(session, "DECODE_TOKENS_PER_SECOND", 8)

    async def handler(_path: str, _body: Body, _writer: Writer) -> None:
        await asyncio.sleep(60)

    async with engine(handler) as url:
        for prompts, seconds in ((1, 2), (2, 3)):
            with pytest.raises(ProbeTimeout, match=f"within {seconds} s"):
                await measure(url, "m", baseline(8, prompts=prompts), settings=Settings(tokens=8))
        with pytest.raises(ProbeTimeout, match="within 1 s"):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=Settings(tokens=8))


async def test_no_more_requests_are_in_flight_than_allowed() -> None:
    flying = most = 0

    async def handler(path: str, body: Body, writer: Writer) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        flying -= 1
        await counting(path, body, writer)

    async with engine(handler) as url:
        await measure(url, "m", baseline(prompts=9), settings=Settings(tokens=8, concurrency=3))
    assert most == 3


@given(
    sizes=st.lists(st.one_of(st.integers(1, 600), st.integers(1, 200_000)), max_size=60), concurrency=st.integers(1, 64)
)
def test_two_long_prompts_or_many_short_ones_run_at_once(sizes: list[int], concurrency: int) -> None:
    in_flight: list[int] = []
    started: list[int] = []
    half = TOKENS_IN_FLIGHT // 2

    async def work(index: int) -> int:
        in_flight.append(min(sizes[index], half))
        started.append(index)
        assert len(in_flight) <= concurrency
        assert sum(in_flight) <= TOKENS_IN_FLIGHT
        for _ in range(sizes[index] % 5):
            await asyncio.sleep(0)
        in_flight.remove(min(sizes[index], half))
        return index

    assert asyncio.run(bounded(range(len(sizes)), work, concurrency, sizes.__getitem__)) == [*range(len(sizes))]
    assert sorted(started) == [*range(len(sizes))]
    if concurrency <= 2:
        assert started == [*range(len(sizes))]


@pytest.mark.parametrize(("size", "at_once"), [(100, 24), (500, 24), (4000, 3), (6000, 2), (200_000, 2)])
async def test_the_number_of_prompts_in_flight_follows_from_their_size(size: int, at_once: int) -> None:
    flying = most = 0

    async def work(_: int) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0)
        flying -= 1

    await bounded(range(60), work, CONCURRENCY, lambda _: size)
    assert most == at_once


async def test_an_answer_is_closed_once_further_tokens_are_not_needed() -> None:
    """The prober disconnects after the first difference, so that the engine aborts the rest."""
    written: list[int] = []

    async def handler(_path: str, body: Body, writer: Writer) -> None:
        respond(writer, b"")
        count = 0
        written.append(0)
        mine = len(written) - 1
        while count < body["max_tokens"]:
            writer.write(event("token_id:7777", {"token_id:7777": -0.1}))
            await writer.drain()
            count += 1
            written[mine] = count
            await asyncio.sleep(0.05)

    async with engine(handler) as url:
        await measure(url, "m", baseline(30, prompts=1), settings=Settings(tokens=30, max_resumes=0))
    assert written[0] < 30


async def test_prompts_that_do_not_fit_the_context_are_left_out_and_listed() -> None:
    long = ProbePrompt("builtin/structured", "long", (Message("user", "x" * 2040),))
    async with engine(counting) as url:
        kept = await capture(url, "m", [*PROMPTS, long], identity="i", dtype="auto", settings=SETTINGS)
        assert kept.left_out == ("builtin/structured/long",)
        assert len(kept.prompts) == 4
        with pytest.raises(NothingFits, match="2048 tokens"):
            await capture(url, "m", [long], identity="i", dtype="auto", settings=SETTINGS)


async def test_a_baseline_too_large_to_store_is_refused_before_decoding() -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        assert path == "/tokenize"
        count = json.dumps(body).count("x") if "messages" in body else 1
        respond(writer, json.dumps({"tokens": [count] * max(count, 1), "max_model_len": 131_072}).encode())

    long = [ProbePrompt("p", f"{i}", (Message("user", "x" * (60_000 + i)),)) for i in range(5)]
    async with engine(handler) as url:
        with pytest.raises(BaselineTooLarge, match="300010 prompt tokens"):
            await capture(url, "m", long, identity="i", dtype="auto", settings=SETTINGS)


@pytest.mark.parametrize("wrong", [{"tokens": 4}, {"tokens": 1000}, {"concurrency": 0}, {"max_resumes": -1}])
def test_the_error_names_a_setting_out_of_bounds_and_its_value(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: {value}; give"):
        Settings(**wrong)


async def test_unprintable_text_of_samples_is_made_readable() -> None:
    nasty = b'data: {"choices": [{"text": "a\\u001b[31m\\u0000b", "logprobs": {"tokens": ["token_id:3"], '
    nasty += b'"token_logprobs": [-0.1], "top_logprobs": [{"token_id:3": -0.1}]}}]}\n\n'
    async with engine(completing(nasty)) as url:
        kept = await capture(url, "m", PROMPTS[:1], identity="i", dtype="auto", settings=SETTINGS)
    assert kept.prompts[0].text == 8 * "a [31m b"


async def test_a_prompts_second_half_is_prefilled_onto_cached_pages() -> None:
    asked: list[tuple[int, int]] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append((len(body["prompt"]), body["max_tokens"]))
        await counting(path, body, writer)

    answer = tuple(Logprobs(40 + i, {40 + i: -0.1, 9999: -3.0}) for i in range(8))
    kept = Baseline("i", "m", "auto", (BaselinePrompt("p", "tail", "text", tuple(range(40)), answer),))
    async with engine(handler) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert asked[:2] == [(20, 1), (40, 8)]
    assert (found.positions, found.mean_kl_micronats) == (7, 0)


async def test_a_probe_run_counts_the_tokens_of_all_its_requests() -> None:
    async with engine(counting) as url:
        found = await measure(url, "m", baseline(prompts=5), settings=SETTINGS)
    # Each prompt costs 3 + 8 tokens, and so does the answer to show.
    assert (found.tokens, found.requests) == (66, 6)


async def test_a_probe_sends_a_priority_only_if_one_is_given() -> None:
    seen: list[object] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        seen.append(body.get("priority", "none"))
        await counting(path, body, writer)

    async with engine(handler) as url:
        await measure(url, "m", baseline(prompts=1), settings=SETTINGS)
        assert set(seen) == {"none"}
        seen.clear()
        await measure(url, "m", baseline(prompts=1), settings=Settings(tokens=8, priority=7))
        assert set(seen) == {7}
