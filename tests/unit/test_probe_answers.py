"""Each answer of an engine is parsed or raises a typed error. A real HTTP server sends each bad answer."""

import asyncio
import json
import math
import re
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_probes.answers import read_streamed, read_tokens
from kvpilot_probes.codec import MAX_TOKEN_ID
from kvpilot_probes.errors import (
    EngineRefused,
    EngineUnreachable,
    MalformedAnswer,
)
from kvpilot_probes.run import capture, measure
from kvpilot_probes.stats import MAX_KL, MAX_MASS
from support.probe_engine import (
    PROMPTS,
    SETTINGS,
    Body,
    Writer,
    baseline,
    completing,
    counting,
    ending,
    engine,
    event,
    respond,
)

KEYS = ["tokens", "max_model_len", "choices", "error", "code", "text", "logprobs", "token_logprobs", "top_logprobs"]


@pytest.mark.parametrize(
    ("top", "logprob"),
    [
        (None, None),
        ({"token_id:3": None}, -0.1),
        ({"token_id:3": "low"}, -0.1),
        ({"token_id:3": float("nan")}, float("nan")),
    ],
)
async def test_nan_logprobs_of_a_candidate_are_maximal_damage(top: object, logprob: object) -> None:
    async with engine(completing(event("token_id:7777", top, logprob))) as url:
        found = await measure(url, "m", baseline(), settings=SETTINGS)
    assert found.mean_kl_micronats == round(MAX_KL * 1_000_000)


async def test_nan_logprobs_never_make_a_baseline() -> None:
    async with engine(completing(event("token_id:3", None, None))) as url:
        with pytest.raises(MalformedAnswer, match="not numbers"):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)


async def test_the_damage_of_impossible_tokens_is_bounded() -> None:
    top = {"token_id:3": -0.1, "token_id:4": -1e300, "token_id:5": -9999.0}
    async with engine(completing(event("token_id:3", top))) as url:
        found = await measure(url, "m", baseline(1), settings=SETTINGS)
    assert found.mean_kl_micronats <= MAX_KL * 1_000_000


IMPOSSIBLE = [
    ({"token_id:3": 5.0}, 5.0, "a logprob of 5, which cannot be above 0"),
    ({"token_id:3": -0.1, "token_id:4": 1e308}, -0.1, "a logprob of 1e+308, which cannot be above 0"),
    ({"token_id:3": -0.1, "token_id:4": -0.2, "token_id:5": -0.3}, -0.1, "probabilities that add up to 2.46"),
    ({"token_id:3": -9999.0, "token_id:4": -0.1}, -9999.0, "a logprob of -9999 for the token that was chosen"),
]


@pytest.mark.parametrize(("top", "logprob", "said"), IMPOSSIBLE)
async def test_impossible_logprobs_make_neither_a_baseline_nor_a_measurement(
    top: object, logprob: object, said: str
) -> None:
    async with engine(completing(event("token_id:3", top, logprob))) as url:
        with pytest.raises(MalformedAnswer, match=re.escape(said)):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)
        with pytest.raises(MalformedAnswer, match=re.escape(said)):
            await measure(url, "m", baseline(), settings=SETTINGS)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf"), None])
async def test_a_chosen_token_without_a_finite_logprob_makes_no_baseline(logprob: object) -> None:
    async with engine(completing(event("token_id:3", {"token_id:3": logprob}, logprob))) as url:
        with pytest.raises(MalformedAnswer, match="not numbers"):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)


@pytest.mark.parametrize(("after", "finish"), [(1, None), (1, "length"), (7, "length"), (7, "abort"), (0, "length")])
async def test_an_answer_that_is_cut_short_makes_no_baseline(after: int, finish: str | None) -> None:
    """One token per prompt comes from prefill alone, so agreement covers 0 positions."""
    async with engine(ending(after, finish)) as url:
        with pytest.raises(MalformedAnswer, match=f"{after} of 8 tokens, finish_reason '{finish or ''}'"):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)


async def test_an_answer_that_the_model_ends_early_can_be_a_baseline() -> None:
    async with engine(ending(5, "stop")) as url:
        kept = await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)
    assert kept.positions == 5 * len(PROMPTS)


@pytest.mark.parametrize("finish", [None, "length", "stop"])
async def test_a_candidate_that_ends_before_the_baseline_does_is_not_measured(finish: str | None) -> None:
    """A matching first token proves nothing. With only such answers, no position is left to judge."""
    async with engine(ending(1, finish)) as url:
        with pytest.raises(MalformedAnswer, match="1 of 8 tokens"):
            await measure(url, "m", baseline(), settings=SETTINGS)


any_logprob = st.floats(-1e4, 1e4) | st.floats(-3, 0) | st.sampled_from([1e308, -1e308, -9999.0, 0.0])


@given(st.dictionaries(st.integers(0, 30), any_logprob, min_size=1, max_size=20), st.data())
def test_accepted_logprobs_belong_to_a_distribution(top: dict[int, float], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(sorted(top)))
    named: dict[str, object] = {f"token_id:{token}": logprob for token, logprob in top.items()}
    with suppress(MalformedAnswer):
        (step,) = read_streamed("url", event(f"token_id:{chosen}", named, top[chosen])[6:]).tokens
        assert math.fsum(map(math.exp, step.logprobs.top.values())) <= MAX_MASS + 1e-9
        assert step.logprobs.top == {token: min(max(logprob, -30.0), 0.0) for token, logprob in top.items()}
        assert top[chosen] >= -30 and max(top.values()) < 0.01


@pytest.mark.parametrize(
    "bad",
    [
        b"data: not json\n\n",
        b"data: [1]\n\n",
        b'data: {"choices": "none"}\n\n',
        b'data: {"choices": [{"text": "x", "logprobs": {"tokens": ["token_id:1"]}}]}\n\n',
        event("hello", {}),
        event("token_id:-1", {}),
        event("token_id:99999999999999", {}),
        event("token_id:1", {"hello": -1.0}),
        event("token_id:1", [1, 2]),
        event("token_id:1", {f"token_id:{i}": -1.0 for i in range(1000)}),
        event("token_id:1", {"token_id:1": 10**400}),
        event("token_id:1", {"token_id:1": True}),
        event("token_id:1", {}).replace(b'"text": "x"', b'"text": "\\ud800"'),
        event("token_id:1", {}).replace(b'"text": "x"', b'"text": "' + b'\\"' * 60_000),
        b'data: {"choices": [' + b"{}," * 60_000 + b"{}]}\n\n",
        b"data: " + b"x" * 400_000,
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"",
        b": a comment\n\nunknown: line\n\n",
        b"".join(event(f"token_id:{3 + i}", {f"token_id:{3 + i}": -0.1}) for i in range(9)),
    ],
)
async def test_a_stream_that_is_not_the_api_is_a_typed_error_with_a_short_message(bad: bytes) -> None:
    async with engine(completing(bad)) as url:
        with pytest.raises(MalformedAnswer) as caught:
            await measure(url, "m", baseline(), settings=SETTINGS)
    assert url in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"tokens": [], "max_model_len": 8}',
        b'{"tokens": ["a"], "max_model_len": 8}',
        b'{"tokens": [1]}',
    ],
)
async def test_a_tokenizer_answer_without_tokens_or_length_is_a_typed_error(answer: bytes) -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, answer)

    async with engine(handler) as url:
        with pytest.raises(MalformedAnswer):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)


async def test_a_refusal_has_the_status_and_the_start_of_the_engines_message() -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, b'{"error": "The model does not exist."}' + b" " * 100 + b"y" * 100_000, "404 Not Found")

    async with engine(handler) as url:
        with pytest.raises(EngineRefused, match="model does not exist") as caught:
            await measure(url, "m", baseline(), settings=SETTINGS)
    assert caught.value.status == 404
    assert len(caught.value.excerpt) <= 300


async def test_an_engine_that_fails_in_the_middle_of_a_stream_has_refused() -> None:
    failed = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    async with engine(completing(event("token_id:3", {"token_id:3": -0.1}), failed)) as url:
        with pytest.raises(EngineRefused, match="EngineCore died"):
            await measure(url, "m", baseline(), settings=SETTINGS)


async def test_a_broken_connection_is_retried_once() -> None:
    broken: set[str] = set()

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path not in broken:
            broken.add(path)
            writer.transport.abort()
            return
        await counting(path, body, writer)

    async with engine(handler) as url:
        kept = await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)
    assert broken == {"/tokenize", "/v1/completions"}
    assert kept.positions == 32


async def test_a_missing_engine_is_reported_as_unreachable_with_its_address() -> None:
    async with engine(counting) as url:
        pass
    with pytest.raises(EngineUnreachable, match=url):
        await measure(url, "m", baseline(), settings=SETTINGS)


async def test_a_stream_that_breaks_after_its_first_token_is_not_silently_retried() -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        first = event("token_id:3", {"token_id:3": -0.1})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + first)
        await writer.drain()
        await asyncio.sleep(0.1)

    async with engine(handler) as url:
        with pytest.raises(EngineUnreachable):
            await measure(url, "m", baseline(), settings=SETTINGS)


async def test_more_tokens_than_a_prompt_can_have_are_not_read() -> None:
    """A 16 MiB answer of {} as tokens once took 474 MiB to parse."""

    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, b'{"tokens": [')
        for _ in range(256):
            writer.write(b"{}," * 21_845)
            await writer.drain()

    async with engine(handler) as url:
        tracemalloc.start()
        try:
            with pytest.raises(MalformedAnswer, match="more than 66926 bytes"):
                await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)
            assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
        finally:
            tracemalloc.stop()


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats()
        | st.integers()
        | st.sampled_from(["token_id:1", "token_id:", "x", "NaN"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
            | inner.map(lambda one: {"choices": [one]})
            | inner.map(lambda one: {"text": "x", "logprobs": one})
            | inner.map(
                lambda one: {"tokens": ["token_id:1"], "token_logprobs": [one], "top_logprobs": [{"token_id:1": one}]}
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=60)
)
def test_any_answer_of_an_engine_is_either_read_or_a_typed_error(data: bytes) -> None:
    with suppress(MalformedAnswer, EngineRefused):
        for step in read_streamed("url", data).tokens:
            assert all(-30 <= value <= 0 for value in step.logprobs.top.values())
    with suppress(MalformedAnswer):
        assert all(0 <= token <= MAX_TOKEN_ID for token in read_tokens("url", data).tokens)


def test_endless_quotes_and_signs_are_a_typed_error() -> None:
    for data in (b'"\\' * 40_000, b"-" * 80_000, b'"' * 80_000, b"-Infinit" * 10_000):
        with pytest.raises(MalformedAnswer):
            read_streamed("url", data)
