"""Prompts with images: what engines get, how their answers are judged, and what happens if they take no images."""

import io
import json
from datetime import UTC, datetime
from typing import Any
from zlib import crc32

import pytest
from PIL import Image

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.decide import described, judge
from kvpilot_probes import codec, images, packs, pressure
from kvpilot_probes.answers import read_chat
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import EngineRefused, EnginesDiffer, MalformedAnswer, NothingFits
from kvpilot_probes.reread import chosen
from kvpilot_probes.run import capture, control, measure
from support.probe_engine import SETTINGS, Body, Handler, Writer, engine, reading, respond, stream

IMAGE = [9_000_000] * 40
# Checksums of the images' pixels.
SUMS = [3659276852, 2176874507, 2045470362, 3913194938]
REFUSAL = b'{"error": {"message": "m is not a multimodal model", "code": 400}}'


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a chat: 40 for an image, one for each word, and the numbers in an assistant's message."""
    found: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            return found + [int(number) for number in message["content"].split()]
        for part in message["content"]:
            found += [crc32(word.encode()) % 1000 for word in part["text"].split()] if "text" in part else IMAGE
    return found


def has_images(body: Body) -> bool:
    return "messages" in body and isinstance(body["messages"][0]["content"], list)


def event(token: int, prompt: list[int] | None = None) -> bytes:
    logprobs = [{"token": f"token_id:{token}", "logprob": -0.1, "top_logprobs": [
        {"token": f"token_id:{one}", "logprob": lp} for one, lp in ((token, -0.1), (99_999, -3.0))]}]  # fmt: skip
    choice = {"delta": {"content": f" {token}"}, "logprobs": {"content": logprobs if prompt is None else None}}
    return b"data: " + json.dumps({"choices": [choice], "prompt_token_ids": prompt}).encode() + b"\n\n"


def seeing(asked: list[Body] | None = None, wrong: int = -1, extra: list[int] | None = None) -> Handler:
    """Return an engine that takes images. Its greedy token is the number of tokens before it.

    In each answer, token number `wrong` is incorrect. The engine adds the tokens `extra` to each prompt, and the bodies
    of chats to `asked`.
    """

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and has_images(body):
            respond(writer, json.dumps({"tokens": tokens_of(body["messages"]), "max_model_len": 2048}).encode())
        elif path == "/detokenize":
            respond(writer, json.dumps({"prompt": "".join(f" {token}" for token in body["tokens"])}).encode())
        elif path == "/v1/chat/completions":
            if asked is not None:
                asked.append(body)
            prompt = tokens_of(body["messages"]) + (extra or [])
            steps = range(len(prompt), len(prompt) + body["max_tokens"])
            bad = len(tokens_of(body["messages"][:1])) + wrong if wrong >= 0 else -1
            stream(writer, event(0, prompt), *(event(7777 if i == bad else i) for i in steps))
        else:
            await reading(2048)(path, body, writer)

    return handler


async def refusing(path: str, body: Body, writer: Writer) -> None:
    if has_images(body):
        respond(writer, REFUSAL, "400 Bad Request")
    else:
        await reading(2048)(path, body, writer)


async def captured(handler: Handler, *sets: str) -> Baseline:
    async with engine(handler) as url:
        kept = await capture(url, "m", packs.load(sets), identity="i", dtype="auto", settings=SETTINGS)
    return codec.decode(codec.encode(kept))


async def test_a_healthy_engine_gets_eight_questions_about_images_and_shows_no_damage() -> None:
    kept, asked = await captured(seeing(), "builtin/images"), list[Body]()
    async with engine(seeing(asked)) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert (found.mean_kl_micronats, found.top1_agreement_permille) == (0, 1000)
    assert {seen.bucket for seen in found.seen} == {"images"} and len(found.seen) == 8
    firsts = ["image" in body["messages"][0]["content"][0]["type"] for body in asked]
    assert set(firsts) == {True, False}, "images come before and after texts"
    # Each prompt is sent once before its answer counts, so that the answer reads the image's pages from the cache.
    assert sorted(body["max_tokens"] for body in asked)[:8] == [1] * 8


async def test_the_tokens_of_an_image_are_never_sent_without_the_image() -> None:
    for sets in (["builtin/images"], ["builtin/general", "builtin/long-context", "builtin/images"]):
        kept = await captured(seeing(), *sets)
        assert not {IMAGE[0]} & set(pressure._other_tokens(kept, 100_000))
        assert all(kept.prompts[i].image is None for i in chosen(kept, range(len(kept.prompts)), 2048))


async def test_after_a_different_token_the_answer_about_an_image_continues_from_the_baselines() -> None:
    kept, asked = await captured(seeing(), "builtin/images"), list[Body]()
    async with engine(seeing(asked, wrong=3)) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert found.positions == 8 * 6 and found.top1_agreement_permille == 1000 * 5 // 6
    resumed = [body for body in asked if body["messages"][-1]["role"] == "assistant"]
    assert len(resumed) == 8 and all(body["continue_final_message"] for body in resumed)


async def test_if_the_text_of_an_answer_has_other_tokens_the_probe_resumes_one_token_later() -> None:
    kept = await captured(seeing(), "builtin/images")
    whole = seeing(wrong=3)

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/detokenize" and len(body["tokens"]) == 4:
            body["tokens"].append(5)
        await whole(path, body, writer)

    async with engine(handler) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert found.positions == 8 * 5


async def test_an_engine_that_makes_other_tokens_of_an_image_is_an_error_and_not_damage() -> None:
    kept = await captured(seeing(), "builtin/images")
    async with engine(seeing(extra=[1])) as url:
        with pytest.raises(EnginesDiffer, match="image processor"):
            await measure(url, "m", kept, settings=SETTINGS)


async def test_a_model_that_takes_no_images_is_probed_without_the_pack_of_images() -> None:
    kept = await captured(refusing, "builtin/general", "builtin/images")
    assert len(kept.left_out) == 1
    assert kept.left_out[0].startswith("builtin/images (") and "not a multimodal model" in kept.left_out[0]
    async with engine(refusing) as url:
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert set(found.planned) - {seen.bucket for seen in found.seen} == {"images"}
    with pytest.raises(NothingFits, match="not a multimodal model"):
        await captured(refusing, "builtin/images")


async def test_a_refusal_of_some_images_leaves_out_only_these_and_the_result_says_so() -> None:
    async def choosy(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and "child" in json.dumps(body) and "largest" in json.dumps(body):
            respond(writer, b'{"error": {"message": "too many tiles", "code": 400}}', "400 Bad Request")
        else:
            await seeing()(path, body, writer)

    kept = await captured(choosy, "builtin/images")
    names = [prompt.name.removeprefix("builtin/images/") for prompt in kept.prompts]
    assert names == ["224x224-0", "224x224-1", "448x448-2", "640x360-4", "640x360-5", "300x600-6"]
    assert [name.partition(" (")[0] for name in kept.left_out] == [
        "builtin/images/448x448-3",
        "builtin/images/300x600-7",
    ]
    assert all("too many tiles" in name for name in kept.left_out)
    async with engine(seeing()) as url:
        noise = await control(url, "m", kept, settings=SETTINGS)
        found = await measure(url, "m", kept, settings=SETTINGS)
    assert (found.planned, len(found.seen)) == (("images",), 6)
    judged = judge(found, described(codec.with_control(kept, noise, datetime.now(UTC))), Accuracy())
    assert (judged.verdict, judged.covered.split("; ")[:2]) == (
        "Passed",
        ["images", "not: 2 refused prompts with images"],
    )


async def test_an_engine_that_fails_at_one_image_is_an_error_and_no_refusal() -> None:
    async def failing(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and has_images(body) and "child" in json.dumps(body):
            respond(writer, b"{}", "500 Internal Server Error")
        else:
            await seeing()(path, body, writer)

    with pytest.raises(EngineRefused, match="HTTP 500"):
        await captured(failing, "builtin/general", "builtin/images")


async def test_a_canary_that_alone_refuses_images_is_an_error_with_the_cause() -> None:
    kept = await captured(seeing(), "builtin/general", "builtin/images")

    async def handler(path: str, body: Body, writer: Writer) -> None:
        await (respond_refusal if path == "/v1/chat/completions" else seeing())(path, body, writer)

    async def respond_refusal(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, REFUSAL, "400 Bad Request")

    async with engine(handler) as url:
        with pytest.raises(EngineRefused, match=r"HTTP 400: .*not a multimodal model"):
            await measure(url, "m", kept, settings=SETTINGS)


async def test_an_engine_that_does_not_report_its_prompts_tokens_is_an_error() -> None:
    async def silent(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/chat/completions":
            stream(writer, *(event(i) for i in range(body["max_tokens"])))
        else:
            await seeing()(path, body, writer)

    with pytest.raises(MalformedAnswer, match="no prompt_token_ids"):
        await captured(silent, "builtin/images")


@pytest.mark.parametrize("data", [
    b"{}", b"[]", b'{"choices": [{}]}', b'{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "x"}]}}]}',
    b'{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "x", "logprob": 0, "top_logprobs": []}]}}]}',
    b'{"choices": [], "prompt_token_ids": ["a"]}',
])  # fmt: skip
def test_malformed_chunks_of_a_chat_are_typed_errors(data: bytes) -> None:
    with pytest.raises(MalformedAnswer, match="http://e"):
        read_chat("http://e", data)


def test_a_logprob_of_a_chat_that_is_not_a_number_counts_as_missing() -> None:
    chunk = read_chat("http://e", event(5).removeprefix(b"data: ").replace(b"-3.0", b"NaN"))
    assert [step.logprobs for step in chunk.tokens] == [(5, {})]


def test_images_are_png_files_of_their_size_that_differ_and_never_change() -> None:
    found = {(one.seed, one.width, one.height) for one in images.questions(20)}
    assert [(width, height) for _, width, height in sorted(found)] == list(images.SIZES)
    sums = []
    for seed, width, height in sorted(found):
        image = Image.open(io.BytesIO(images.png(seed, width, height)))
        assert (image.size, image.mode) == ((width, height), "RGB")
        colours = {image.getpixel((x, y)) for x in range(0, width, 4) for y in range(0, height, 4)}
        assert len(colours & set(images._COLOURS.values())) == 3, "each image shows three shapes"
        sums.append(crc32(image.tobytes()))
    assert sums == SUMS, "other images need another EDITION of the generated packs"
