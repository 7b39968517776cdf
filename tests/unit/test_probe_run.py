"""What a probe does with an engine that misbehaves: a real HTTP server here speaks each bad answer."""

import asyncio
import json
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.probes import session
from kvpilot_operator.probes.answers import read_streamed, read_tokens
from kvpilot_operator.probes.codec import MAX_TOKEN_ID, Baseline, BaselinePrompt
from kvpilot_operator.probes.errors import (
    BaselineTooLarge,
    EngineRefused,
    EngineUnreachable,
    MalformedAnswer,
    NothingFits,
    ProbeTimeout,
)
from kvpilot_operator.probes.packs import Message, ProbePrompt
from kvpilot_operator.probes.run import Settings, capture, control, measure
from kvpilot_operator.probes.stats import MAX_KL, Logprobs
from support.probe_engine import Body, Handler, Writer, completing, counting, engine, event, respond, stream, tokens_of

PROMPTS = tuple(ProbePrompt("builtin/general", f"p{i}", (Message("user", f"question {i}"),)) for i in range(4))
SETTINGS = Settings(tokens=8, deadline_seconds=20)
KEYS = ["tokens", "max_model_len", "choices", "error", "code", "text", "logprobs", "token_logprobs", "top_logprobs"]


def baseline(positions: int = 8, prompts: int = 2) -> Baseline:
    """What `counting` answers to prompts of three tokens."""
    answer = tuple(Logprobs(3 + i, {3 + i: -0.1, 9999: -3.0}) for i in range(positions))
    return Baseline(
        "i", "m", "auto", tuple(BaselinePrompt(f"p{i}", "tail", "text", (1, 2, 3), answer) for i in range(prompts))
    )


async def test_the_engine_that_was_captured_shows_no_damage_against_itself() -> None:
    async with engine(counting) as url:
        kept = await capture(url, "m", PROMPTS, identity="abc", dtype="auto", settings=SETTINGS)
        again = await control(url, "m", kept, settings=SETTINGS)
    assert (kept.identity, kept.dtype, kept.positions, kept.left_out) == ("abc", "auto", 32, ())
    assert [p.name for p in kept.prompts] == [f"builtin/general/p{i}" for i in range(4)]
    assert (again.mean_kl_micronats, again.p99_kl_micronats, again.top1_agreement_permille) == (0, 0, 1000)
    # Of every prompt the first token comes from a prefill and proves nothing.
    # A half and a whole of each prompt, and one answer to show.
    assert (again.prompts, again.positions, again.unmeasured, again.requests) == (4, 28, 4, 9)


async def test_after_a_different_token_the_candidate_is_put_back_on_the_baselines_path() -> None:
    asked: list[list[int]] = []

    async def parts_at_six(path: str, body: Body, writer: Writer) -> None:
        asked.append(body["prompt"])
        start = len(body["prompt"])
        steps = [7777 if i == 6 else i for i in range(start, start + body["max_tokens"])]
        stream(writer, *(event(f"token_id:{t}", {f"token_id:{t}": -0.1}) for t in steps))

    async with engine(parts_at_six) as url:
        found = await measure(url, "m", baseline(prompts=1), settings=SETTINGS)
    assert asked[:2] == [[1, 2, 3], [1, 2, 3, 3, 4, 5, 6]]
    assert (found.positions, found.unmeasured, found.top1_agreement_permille) == (6, 2, 833)
    assert found.sample is not None and found.sample.canary == "x" * 8


async def test_an_engine_that_always_differs_is_total_damage_within_a_bounded_number_of_requests() -> None:
    garbage = completing(event("token_id:7777", {"token_id:7777": -0.01, "token_id:7778": -9.0}))
    async with engine(garbage) as url:
        found = await measure(url, "m", baseline(64), settings=Settings(tokens=64, max_resumes=12))
    assert found.requests == 2 * 13 + 1
    assert (found.positions, found.top1_agreement_permille) == (26, 0)
    assert found.mean_kl_micronats > 5_000_000


@pytest.mark.parametrize(
    ("top", "logprob"),
    [
        (None, None),
        ({"token_id:3": None}, -0.1),
        ({"token_id:3": "low"}, -0.1),
        ({"token_id:3": float("nan")}, float("nan")),
    ],
)
async def test_logprobs_that_are_no_numbers_are_maximal_damage_in_a_candidate(top: object, logprob: object) -> None:
    async with engine(completing(event("token_id:7777", top, logprob))) as url:
        found = await measure(url, "m", baseline(), settings=SETTINGS)
    assert found.mean_kl_micronats == round(MAX_KL * 1_000_000)


async def test_a_baseline_is_never_made_of_logprobs_that_are_no_numbers() -> None:
    async with engine(completing(event("token_id:3", None, None))) as url:
        with pytest.raises(MalformedAnswer, match="no numbers"):
            await capture(url, "m", PROMPTS, identity="i", dtype="auto", settings=SETTINGS)


async def test_infinite_and_absurd_logprobs_are_bounded() -> None:
    top = {"token_id:3": 1e300, "token_id:4": -1e300, "token_id:5": -9999.0}
    async with engine(completing(event("token_id:3", top))) as url:
        found = await measure(url, "m", baseline(1), settings=SETTINGS)
    assert found.mean_kl_micronats <= MAX_KL * 1_000_000


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


async def test_a_refusal_carries_its_status_and_the_start_of_what_the_engine_said() -> None:
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
    assert plain == ["user: question 0\nassistant:"]
    assert kept.positions == 8


async def test_a_connection_that_breaks_once_is_tried_once_more() -> None:
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


async def test_an_engine_that_is_not_there_is_unreachable_by_its_address() -> None:
    async with engine(counting) as url:
        pass
    with pytest.raises(EngineUnreachable, match=url):
        await measure(url, "m", baseline(), settings=SETTINGS)


async def test_a_stream_that_breaks_after_its_first_token_is_unreachable_and_not_tried_in_silence() -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        first = event("token_id:3", {"token_id:3": -0.1})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + first)
        await writer.drain()
        await asyncio.sleep(0.1)

    async with engine(handler) as url:
        with pytest.raises(EngineUnreachable):
            await measure(url, "m", baseline(), settings=SETTINGS)


async def test_an_engine_that_hangs_ends_at_the_deadline() -> None:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, event("token_id:3", {"token_id:3": -0.1}))
        await writer.drain()
        await asyncio.sleep(60)

    async with engine(handler) as url:
        with pytest.raises(ProbeTimeout, match="within 1 s"):
            await measure(url, "m", baseline(), settings=Settings(tokens=8, deadline_seconds=1))


async def test_a_run_has_as_long_as_its_tokens_need_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_what_the_engine_no_longer_needs_to_decode_is_cut_off() -> None:
    """After the first difference the connection is closed, so that the engine aborts the rest."""
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


async def test_prompts_that_do_not_fit_the_context_are_left_out_by_name() -> None:
    long = ProbePrompt("configmap/mine", "long", (Message("user", "x" * 2040),))
    async with engine(counting) as url:
        kept = await capture(url, "m", [*PROMPTS, long], identity="i", dtype="auto", settings=SETTINGS)
        assert kept.left_out == ("configmap/mine/long",)
        assert len(kept.prompts) == 4
        with pytest.raises(NothingFits, match="2048 tokens"):
            await capture(url, "m", [long], identity="i", dtype="auto", settings=SETTINGS)


async def test_a_baseline_that_could_not_be_kept_is_refused_before_anything_is_decoded() -> None:
    async def handler(path: str, _body: Body, writer: Writer) -> None:
        assert path == "/tokenize"
        respond(writer, json.dumps({"tokens": [1] * 30_000, "max_model_len": 131_072}).encode())

    long = [ProbePrompt("p", f"{i}", (Message("user", "x" * 30_000),)) for i in range(4)]
    async with engine(handler) as url:
        with pytest.raises(BaselineTooLarge, match="90000 prompt tokens"):
            await capture(url, "m", long, identity="i", dtype="auto", settings=SETTINGS)


async def test_more_tokens_than_a_prompt_can_have_are_not_read() -> None:
    """16 MiB of {} for tokens took 474 MiB."""

    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, b'{"tokens": [')
        for _ in range(256):
            writer.write(b"{}," * 21_845)
            await writer.drain()

    async with engine(handler) as url:
        tracemalloc.start()
        try:
            with pytest.raises(MalformedAnswer, match="more than 66186 bytes"):
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
def test_whatever_an_engine_answers_is_read_or_a_typed_error(data: bytes) -> None:
    with suppress(MalformedAnswer, EngineRefused):
        for step in read_streamed("url", data):
            assert all(-30 <= value <= 0 for value in step.logprobs.top.values())
    with suppress(MalformedAnswer):
        assert all(0 <= token <= MAX_TOKEN_ID for token in read_tokens("url", data).tokens)


def test_quotes_and_signs_without_an_end_are_a_typed_error() -> None:
    for data in (b'"\\' * 40_000, b"-" * 80_000, b'"' * 80_000, b"-Infinit" * 10_000):
        with pytest.raises(MalformedAnswer):
            read_streamed("url", data)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 4}, {"tokens": 1000}, {"top_k": 0}, {"concurrency": 0}, {"max_resumes": -1}]
)
def test_settings_out_of_bounds_are_refused_by_name_and_value(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: {value}; give"):
        Settings(**wrong)


async def test_text_that_a_terminal_or_an_object_would_choke_on_is_made_readable() -> None:
    nasty = b'data: {"choices": [{"text": "a\\u001b[31m\\u0000b", "logprobs": {"tokens": ["token_id:3"], '
    nasty += b'"token_logprobs": [-0.1], "top_logprobs": [{"token_id:3": -0.1}]}}]}\n\n'
    async with engine(completing(nasty)) as url:
        kept = await capture(url, "m", PROMPTS[:1], identity="i", dtype="auto", settings=SETTINGS)
    assert kept.prompts[0].text == "a [31m b"


async def test_a_prompt_is_prefilled_onto_cached_pages_as_the_next_turn_of_a_chat_is() -> None:
    asked: list[tuple[int, int]] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        asked.append((len(body["prompt"]), body["max_tokens"]))
        await counting(path, body, writer)

    answer = tuple(Logprobs(40 + i, {40 + i: -0.1, 9999: -3.0}) for i in range(8))
    kept = Baseline("i", "m", "auto", (BaselinePrompt("p", "tail", "text", tuple(range(40)), answer),))
    async with engine(handler) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert asked[:2] == [(20, 1), (40, 8)]
    assert (found.positions, found.unmeasured, found.mean_kl_micronats) == (7, 1, 0)


async def test_a_run_stops_at_its_token_budget_and_says_what_it_did_not_measure() -> None:
    async with engine(counting) as url:
        # Each prompt costs 3 + 8 tokens: three of the five fit, and the answer to show does not.
        found = await measure(url, "m", baseline(prompts=5), settings=Settings(tokens=8, token_budget=40))
    assert (found.prompts, found.positions, found.unmeasured) == (3, 21, 19)
    assert (found.tokens, found.requests, found.sample) == (33, 3, None)


async def test_a_priority_is_sent_only_where_one_is_given() -> None:
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


TOOLS = '[{"name":"add","description":"Add.","parameters":{"type":"object"}}]'
CALL = ProbePrompt("builtin/structured", "call", (Message("user", "2 + 2?"),), TOOLS)


async def _rendered(handler: Handler) -> str:
    async with engine(handler) as url:
        kept = await capture(url, "m", [CALL], identity="i", dtype="auto", settings=SETTINGS)
    return bytes(list(kept.prompts[0].tokens)).decode()


async def test_tools_go_through_the_chat_template_that_knows_them() -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, tokens_of({"messages": [body.get("tools"), body["messages"]]}))
            return
        await counting(path, body, writer)

    text = await _rendered(handler)
    assert json.loads(text)[0] == [{"type": "function", "function": json.loads(TOOLS)[0]}]
    assert "call one" not in text


async def test_tools_are_told_in_words_where_the_template_ignores_them() -> None:
    text = await _rendered(counting)
    (message,) = json.loads(text)
    assert TOOLS in message["content"]
    assert message["content"].endswith("2 + 2?")


async def test_tools_are_told_in_words_where_the_template_refuses_them() -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and "tools" in body:
            respond(writer, b'{"error": "no tools"}', "400 Bad Request")
            return
        await counting(path, body, writer)

    assert "You can call these tools" in await _rendered(handler)
