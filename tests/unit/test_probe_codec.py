"""A stored baseline decodes unchanged, and no other data passes as a baseline."""

import math
import random
import zlib
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_probes.codec import (
    MAX_BYTES,
    MAX_POSITIONS,
    MAX_PROMPT_TOKENS,
    MAX_TOKEN_ID,
    Baseline,
    BaselinePrompt,
    Control,
    decode,
    encode,
    identity,
)
from kvpilot_probes.errors import BaselineTooLarge, MalformedBaseline
from kvpilot_probes.images import SIZES, ImageQuestion
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.stats import MAX_TEXT, Logprobs, kl_nats

ids = st.integers(0, MAX_TOKEN_ID)


def _possible(top: dict[int, float]) -> dict[int, float]:
    """Lower the logprobs so far that the probabilities add up to at most 1, and return them."""
    over = math.log(max(1.0, math.fsum(map(math.exp, top.values()))))
    return {token: max(-30.0, lp - over) for token, lp in top.items()}


tops = st.dictionaries(ids, st.floats(-30, 0), min_size=1, max_size=20).map(_possible)
answers = tops.flatmap(lambda t: st.sampled_from(sorted(t)).map(lambda token: Logprobs(token, t)))
texts = st.text(max_size=50).map(lambda t: t.encode("utf-8", "replace").decode())
images = st.builds(
    lambda seed, size, *words: ImageQuestion(seed, *size, *words), ids, st.sampled_from(SIZES), texts, texts
)
baselines = st.builds(
    Baseline,
    identity=texts,
    model=texts,
    dtype=texts,
    prompts=st.lists(
        st.builds(
            BaselinePrompt,
            name=texts,
            tail=texts,
            text=texts,
            tokens=st.lists(ids, min_size=1, max_size=20).map(tuple),
            answer=st.lists(answers, max_size=5).map(tuple),
            image=st.none() | images,
        ),
        max_size=4,
    ).map(tuple),
    left_out=st.lists(texts, max_size=2).map(tuple),
    control=st.none()
    | st.builds(
        Control,
        captured=st.integers(0, 2**32 - 1).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
        prompts=st.integers(0, 64),
        positions=st.integers(0, 4096),
        mean_kl_micronats=st.integers(0, 30_000_000),
        p99_kl_micronats=st.integers(0, 30_000_000),
        top1_agreement_permille=st.integers(0, 1000),
    ),
)


@given(baselines)
def test_a_stored_baseline_equals_the_original_up_to_rounding(baseline: Baseline) -> None:
    kept = decode(encode(baseline))
    assert encode(kept) == encode(baseline)
    assert (kept.identity, kept.model, kept.dtype, kept.left_out, kept.control) == (
        baseline.identity,
        baseline.model,
        baseline.dtype,
        baseline.left_out,
        baseline.control,
    )
    for before, after in zip(baseline.prompts, kept.prompts, strict=True):
        assert (before.name, before.tail, before.text) == (after.name, after.tail, after.text)
        assert before.image == after.image
        assert list(before.tokens) == list(after.tokens)
        for a, b in zip(before.answer, after.answer, strict=True):
            assert a.token == b.token
            assert b.top == pytest.approx(a.top, abs=0.5 / 2048)
            assert kl_nats(b.top, a.top) < 2e-3


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_baseline_are_a_typed_error(data: bytes) -> None:
    for given_bytes in (data, zlib.compress(data)):
        with pytest.raises(MalformedBaseline, match="re-capture"):
            decode(given_bytes)


@settings(max_examples=50)
@given(baselines, st.data())
def test_a_damaged_or_truncated_baseline_is_either_refused_or_read(baseline: Baseline, data: st.DataObject) -> None:
    good = encode(baseline)
    raw = bytearray(zlib.decompress(good))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[: data.draw(st.integers(0, len(good) - 1))], zlib.compress(bytes(raw))):
        with suppress(MalformedBaseline):
            decode(bad)


def test_a_decompression_bomb_is_refused_early() -> None:
    with pytest.raises(MalformedBaseline, match="unpacks to more"):
        decode(zlib.compress(bytes(200 * 1024 * 1024), 9))


@pytest.mark.parametrize("part", [4, 1])
def test_an_incompressible_baseline_fits_up_to_a_quarter_of_the_largest_size(part: int) -> None:
    rng = random.Random(1)
    prompts = 64
    per_prompt = MAX_POSITIONS // prompts // part

    def position() -> Logprobs:
        top = {rng.randrange(MAX_TOKEN_ID): -30 * rng.random() for _ in range(20)}
        return Logprobs(next(iter(top)), top)

    def text() -> str:
        return "".join(chr(rng.randrange(0x10000, 0x10FFFF)) for _ in range(2 * MAX_TEXT))

    largest = Baseline(
        "identity",
        "model",
        "auto",
        tuple(
            BaselinePrompt(
                f"configmap/prompts/{i}",
                text(),
                text(),
                tuple(rng.randrange(MAX_TOKEN_ID) for _ in range(MAX_PROMPT_TOKENS // prompts // part)),
                tuple(position() for _ in range(per_prompt)),
            )
            for i in range(prompts)
        ),
    )
    if part > 1:
        assert len(encode(largest)) <= MAX_BYTES
        return
    with pytest.raises(BaselineTooLarge, match="fit in a ConfigMap"):
        encode(largest)


@pytest.mark.parametrize(("tokens", "positions"), [(MAX_PROMPT_TOKENS + 1, 1), (1, MAX_POSITIONS + 1)])
def test_a_baseline_above_the_largest_size_is_refused_with_the_numbers(tokens: int, positions: int) -> None:
    answer = (Logprobs(1, {1: -0.1}),) * positions
    with pytest.raises(BaselineTooLarge, match=r"at most \d+"):
        encode(Baseline("i", "m", "auto", (BaselinePrompt("p", "", "", (1,) * tokens, answer),)))


def test_the_identity_changes_with_everything_that_a_capture_depends_on() -> None:
    prompt = ProbePrompt("builtin/general", "a", (Message("user", "hello"),))
    one = identity("m", "r", "auto", [prompt], 32, 20)
    others = [
        identity("m", "r", "float16", [prompt], 32, 20),
        identity("m", "r", "auto", [ProbePrompt("builtin/general", "a", (Message("user", "hello"),), "[]")], 32, 20),
        identity("m2", "r", "auto", [prompt], 32, 20),
        identity("m", "r2", "auto", [prompt], 32, 20),
        identity("m", "r", "auto", [prompt], 33, 20),
        identity("m", "r", "auto", [prompt], 32, 19),
        identity("m", "r", "auto", [prompt, prompt], 32, 20),
        identity("m", "r", "auto", [ProbePrompt("builtin/general", "a", (Message("user", "hello!"),))], 32, 20),
        identity("m", "r", "auto", [ProbePrompt("builtin/general", "a", (Message("system", "hello"),))], 32, 20),
    ]
    assert one == identity("m", "r", "auto", [prompt], 32, 20)
    assert len({one, *others}) == 10
    assert all(c in "0123456789abcdef" for c in one) and len(one) == 10


def test_a_stored_baseline_with_impossible_logprobs_is_refused() -> None:
    """Logits above 0 were once kept as probabilities of 1."""
    answer = (Logprobs(4, {4: 0.0, 5: 0.0, 6: -3.0}),)
    kept = encode(Baseline("i", "m", "auto", (BaselinePrompt("p", "", "", (1, 2), answer),)))
    with pytest.raises(MalformedBaseline, match=r"add up to 2\.05.*re-capture"):
        decode(kept)


FIGURES = ("captured", "prompts", "positions", "mean_kl_micronats", "p99_kl_micronats", "top1_agreement_permille")


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("figure", [-1, 2**32, True, "7", None, 1.5])
def test_an_invalid_control_run_is_refused(figure: object, name: str) -> None:
    good = encode(Baseline("i", "m", "auto", (), control=Control(datetime.now(UTC), 1, 2, 3, 4, 5)))
    stored = msgspec.msgpack.decode(zlib.decompress(good))
    stored["control"][name] = figure
    with pytest.raises(MalformedBaseline, match="control"):
        decode(zlib.compress(msgspec.msgpack.encode(stored)))


NOT_LENGTHS = {
    "half a token": {"tokens": b"123"},
    "fewer ids than announced": {"top_ids": b""},
    "fewer logprobs than announced": {"steps": b""},
    "an empty position": {"tops": [0]},
    "more tokens at a position than an engine gives": {"tops": [22]},
    "a prefix of a prompt that comes later": {"document": 0, "prefix": 1},
    "more prompt tokens than are kept": {"tokens": bytes(4 * (MAX_PROMPT_TOKENS + 1))},
    "more positions than are kept": {"tops": [1] * (MAX_POSITIONS + 1)},
}


@pytest.mark.parametrize("wrong", NOT_LENGTHS.values(), ids=NOT_LENGTHS)
def test_arrays_of_another_length_than_declared_are_refused(wrong: dict[str, object]) -> None:
    answer = (Logprobs(4, {4: -0.5, 5: -2.0}),)
    good = encode(Baseline("i", "m", "auto", (BaselinePrompt("p", "", "", (1, 2), answer),)))
    stored = msgspec.msgpack.decode(zlib.decompress(good))
    stored["prompts"][0] |= wrong
    with pytest.raises(MalformedBaseline, match="re-capture"):
        decode(zlib.compress(msgspec.msgpack.encode(stored)))


def test_an_image_of_another_size_than_the_packs_is_refused_before_it_takes_memory() -> None:
    answer = (Logprobs(4, {4: -0.5, 5: -2.0}),)
    image = ImageQuestion(1, *SIZES[0], "", "Which shape is the largest?")
    good = encode(Baseline("i", "m", "auto", (BaselinePrompt("p", "", "", (1, 2), answer, image=image),)))
    stored = msgspec.msgpack.decode(zlib.decompress(good))
    stored["prompts"][0]["image"]["width"] = 10**9
    with pytest.raises(MalformedBaseline, match=r"1000000000 x 224 pixels.*re-capture"):
        decode(zlib.compress(msgspec.msgpack.encode(stored)))
