"""Send prompts with an image, and decode along answers to them.

vLLM takes images only in a chat: /v1/completions has no field for them, and engines refuse /inference/v1/generate
unless started with --enable-scale-out. So the tokens of an answer cannot be sent as token ids. They are sent as the
text of an assistant's message to continue, and the engine reports the token ids that it made of the whole chat. Only if
these are the wanted ones can the answers be compared.
"""

from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from kvpilot_probes import answers
from kvpilot_probes.client import GREEDY, EngineClient
from kvpilot_probes.errors import EnginesDiffer, MalformedAnswer
from kvpilot_probes.images import ImageQuestion


async def decode(
    engine: EngineClient,
    prompt: Sequence[int],
    image: ImageQuestion | None,
    forced: Sequence[int],
    tokens: int,
    top_k: int,
    *,
    past_end: bool = False,
) -> AsyncGenerator[answers.StreamedToken, None]:
    """Yield the continuation of a prompt and of the tokens `forced` after it. `EngineClient.decode` explains the rest.

    With an image, `prompt` has the tokens that the engine makes of the chat. Raise `EnginesDiffer` if it makes others.
    """
    if image is not None:
        steps = _continued(engine, [*prompt, *forced], image, forced, tokens, top_k, past_end)
    else:
        whole = array("I", prompt) + array("I", forced) if forced else prompt
        steps = engine.decode(whole, tokens, top_k, past_end=past_end)
    async with aclosing(steps):
        async for step in steps:
            yield step


async def text(
    engine: EngineClient, prompt: Sequence[int], image: ImageQuestion | None, tokens: int, *, past_end: bool = False
) -> str:
    """Return the text that continues a prompt."""
    async with aclosing(decode(engine, prompt, image, (), tokens, 1, past_end=past_end)) as steps:
        return "".join([step.text async for step in steps])


async def _continued(
    engine: EngineClient,
    expected: Sequence[int],
    image: ImageQuestion,
    forced: Sequence[int],
    tokens: int,
    top_k: int,
    past_end: bool,
) -> AsyncGenerator[answers.StreamedToken, None]:
    body = {**engine.fields(tokens, past_end, GREEDY), "logprobs": True, "top_logprobs": top_k}
    body |= {"messages": image.chat(), "return_token_ids": True}
    if forced:
        begun = {"role": "assistant", "content": await engine.detokenize(forced)}
        body |= {"messages": [*image.chat(), begun], "add_generation_prompt": False, "continue_final_message": True}
    data, told = msgspec.json.encode(body), False

    def read(url: str, line: bytes) -> answers.Chunk:
        nonlocal told
        chunk = answers.read_chat(url, line)
        if chunk.prompt is not None and list(chunk.prompt) != expected:
            raise EnginesDiffer(
                f"{url}: {len(chunk.prompt)} tokens of a prompt with an image, which are not the {len(expected)} "
                "tokens of the baseline: serve the same model, image processor and chat template on both engines"
            )
        told = told or chunk.prompt is not None
        if chunk.tokens and not told:
            raise MalformedAnswer(f"{url}: no prompt_token_ids before the answer; see the engine's version")
        return chunk

    stream = engine.stream("/v1/chat/completions", lambda: iter((data,)), read, tokens, past_end)
    async with aclosing(stream):
        async for step in stream:
            yield step
