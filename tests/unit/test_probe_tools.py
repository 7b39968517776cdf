"""Tools of a prompt reach the model: through a chat template that knows them, otherwise in words."""

import json

from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.run import capture
from support.probe_engine import SETTINGS, Body, Handler, Writer, counting, engine, respond, tokens_of

TOOLS = '[{"name":"add","description":"Add.","parameters":{"type":"object"}}]'
CALL = ProbePrompt("builtin/structured", "call", (Message("user", "2 + 2?"),), TOOLS)


async def _rendered(handler: Handler) -> str:
    async with engine(handler) as url:
        kept = await capture(url, "m", [CALL], identity="i", dtype="auto", settings=SETTINGS)
    return bytes(list(kept.prompts[0].tokens)).decode()


async def test_tools_use_a_chat_template_that_supports_them() -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, tokens_of({"messages": [body.get("tools"), body.get("messages")]}))
            return
        await counting(path, body, writer)

    text = await _rendered(handler)
    assert json.loads(text)[0] == [{"type": "function", "function": json.loads(TOOLS)[0]}]
    assert "call one" not in text


async def test_tools_are_described_in_text_if_the_template_ignores_them() -> None:
    text = await _rendered(counting)
    (message,) = json.loads(text)
    assert TOOLS in message["content"]
    assert message["content"].endswith("2 + 2?")


async def test_tools_are_described_in_text_if_the_template_refuses_them() -> None:
    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize" and "tools" in body:
            respond(writer, b'{"error": "no tools"}', "400 Bad Request")
            return
        await counting(path, body, writer)

    assert "You can call these tools" in await _rendered(handler)
