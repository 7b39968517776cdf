"""Make the prompts that depend on the engine: texts that fill its context, and lengths around its blocks and chunks.

All seeds are fixed, so engines with the same tokenizer, chat template and context get the same prompts.
"""

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvpilot_probes import agent, images, prose, reasoning
from kvpilot_probes.client import EngineClient
from kvpilot_probes.codec import Baseline
from kvpilot_probes.documents import Document
from kvpilot_probes.errors import EngineRefused, EnginesDiffer, NothingFits
from kvpilot_probes.images import ImageQuestion
from kvpilot_probes.packs import FILLER, Fill, Message, ProbePrompt
from kvpilot_probes.prose import Chapter
from kvpilot_probes.results import Task
from kvpilot_probes.session import Settings

# Largest context to fill, in tokens. Prompts share one document of this length, which an engine with a prefix cache
# computes once.
MAX_CONTEXT = 131_072
# Largest number of prompt tokens that may be sent again when the answer to one prompt is resumed several times.
RESUMED_TOKENS = 262_144
# Divisors of the context's length: long prompts fill 1/8, 1/2 and all of it, with up to five questions each. With fewer
# than five prompts without damage, the sequential test cannot find a bucket sound.
SHARES = (8, 2, 1)
QUESTIONS = 5
# Number of consecutive prompt lengths. Our pages hold 64 tokens, and vLLM's 16 to 128, so use every length modulo 64
# once. Answers are short, because these prompts are many.
RESIDUES = 64
RESIDUE_TOKENS = 8
_SHORTEST = 128
# vLLM's usual sizes of --max-num-batched-tokens, each with the tokens of a prompt that go beyond it. vLLM reads the
# prompt in chunks of that size. If an engine reads chunks of 8,192 tokens, only the first prompts have a second chunk.
CHUNKS = {8192: (1, 65, 129), 2048: (1, 29, 57, 85, 113, 141, 169, 197, 0)}
# Tokens of the text that prompts of the bucket `hit` share. Their answers have room for one fact and little else, so
# that damage to the page with this fact stands out.
SHARED_TOKENS, HIT_TOKENS = 448, 20
# For prompts of these buckets, do not send the first half alone before the whole prompt.
FRESH = ("residue", "chunk")
HIT = "hit"
# Prefix of buckets that test pages which the engine loads through a KV connector. The connector's name follows.
FROM = "from-"
IMAGES = "builtin/images"
# Largest length of the agent's rounds, in tokens. They fill three quarters of the context, up to this length.
AGENT_TOKENS = 65_536
CALLS = 8
_SAMPLE = 'The 3 quick foxes didn\'t jump over 12,345 dogs: naïve façade, Straße, 東京, λ, {"a": [1, 2]}\n\n  x = y_1;'
_CHAPTERS = 64


class Rendered(NamedTuple):
    """Prompt as token ids, the length of its answer in tokens, and its task and its image, or None."""

    prompt: ProbePrompt
    tokens: Sequence[int]
    answer: int
    task: Task | None = None
    image: ImageQuestion | None = None


class Room(NamedTuple):
    """Tokens of the context that a pack may use, tokens of a usual answer, the seed of generated texts, and a list to
    which `_images` adds refused prompts."""

    context: int
    answer: int
    seed: int
    left_out: list[str]


def most_resumes(length: int, usual: int) -> int:
    """Return how often an answer to a prompt of `length` tokens may be resumed after a divergence, at most `usual`.

    A longer prompt allows fewer resumes: each time, an engine without a prefix cache computes the whole prompt again.
    """
    return min(usual, max(1, RESUMED_TOKENS // max(length, 1)))


def sent_first(bucket: str, tokens: Sequence[int]) -> Sequence[int]:
    """Return the part of a prompt to send alone first, so that the engine later finds its pages in the cache."""
    if bucket in FRESH:
        return ()
    return tokens if bucket == HIT or bucket.startswith(FROM) else tokens[: len(tokens) // 2]


async def fingerprint(engine: EngineClient) -> tuple[str, int]:
    """Return a hash of the token ids that the engine returns for a fixed text, and its context length in tokens."""
    found = await engine.tokenize_text(_SAMPLE)
    return hashlib.sha256(array("I", found.tokens).tobytes()).hexdigest()[:10], found.max_model_len


async def check_alike(engine: EngineClient, baseline: Baseline) -> int:
    """Return the length of the engine's context in tokens, or 0 if the baseline's tokenizer is not known.

    Raise `EnginesDiffer` if its tokenizer differs from the baseline's, or its context is too short.
    """
    if not baseline.tokenizer:
        return 0
    tokenizer, context = await fingerprint(engine)
    if tokenizer != baseline.tokenizer:
        raise EnginesDiffer(
            f"{engine.base_url}: the tokenizer splits a text into other tokens than the baseline's: serve the same "
            "model and tokenizer on both engines, or delete the baseline"
        )
    longest = max(len(p.tokens) + len(p.answer) for p in baseline.prompts)
    if longest > context:
        raise EnginesDiffer(
            f"{engine.base_url}: a context of {context} tokens, but the baseline has a prompt of {longest} with its "
            "answer: give both engines the same --max-model-len, or fill less context"
        )
    return context


async def rendered(
    engine: EngineClient, prompts: Sequence[ProbePrompt], context: int, settings: Settings, progress: Callable[[], None]
) -> tuple[list[Rendered], tuple[str, ...]]:
    """Return all prompts with their tokens, and the names of built-in prompts and packs that are left out.

    The context cannot hold them, or the engine refuses images. The name then has the refusal's words in parentheses.
    Call `progress` after each prompt or pack. Raise `NothingFits` if the context cannot hold one of the user's own
    prompts, or cannot hold any prompt.
    """
    found: list[Rendered] = []
    left_out: list[str] = []
    answer = settings.tokens
    for prompt in prompts:
        room = Room(min(context, prompt.context or context), answer, settings.seed, left_out)
        name = f"{prompt.pack}/{prompt.name}" if prompt.messages else prompt.pack
        try:
            made = await (_one if prompt.messages else _MAKERS[prompt.bucket])(engine, prompt, room)
        except EngineRefused as refusal:
            if prompt.pack != IMAGES or refusal.status != 400:
                raise
            made, name = [], f"{name} ({refusal.excerpt})"
        progress()
        found += made
        if not made:
            left_out.append(name)
            if not prompt.pack.startswith("builtin/"):
                raise NothingFits(
                    f"spec.accuracy.probeSets: {name} and the {answer} tokens of its answer do not fit the model's "
                    f"context ({context} tokens); shorten this prompt or raise spec.model.maxModelLen"
                )
    if not found:
        raise NothingFits(
            f"spec.accuracy.probeSets: none of {len(prompts)} prompts fits the context ({context} tokens) with "
            f"an answer of {answer} tokens: left out {', '.join(left_out)}; name shorter prompts or other packs"
        )
    return found, tuple(left_out)


async def _one(engine: EngineClient, prompt: ProbePrompt, room: Room) -> list[Rendered]:
    if prompt.fill is not None:
        tokens = await _filled(engine, prompt, prompt.fill, room)
    else:
        tokens = (await engine.tokenize(prompt.messages, prompt.tools)).tokens
    return [Rendered(prompt, tokens, room.answer)] if tokens and len(tokens) + room.answer <= room.context else []


async def _filled(engine: EngineClient, prompt: ProbePrompt, fill: Fill, room: Room) -> Sequence[int] | None:
    """Return the tokens of a prompt whose filler has the length, and the fact's position, that `fill` demands."""

    def chat(chapter: Chapter | None, _question: str) -> Sequence[Message]:
        text = chapter.text if chapter is not None else "~"
        return [Message(m.role, m.content.replace(FILLER, text)) for m in prompt.messages]

    size = min(room.context, MAX_CONTEXT)
    document = Document(engine, chat, prose.chapters(room.seed, max(12, size // _CHAPTERS)), prompt.tools)
    before = size * fill.percent * fill.depth // 10_000
    await document.grow(before)
    document.end_at(before)
    await document.add(Chapter(fill.fact, 0, 0))
    length = min(size * fill.percent // 100, size - room.answer)
    tail = await document.tail("")
    return await document.cut(max(length, len(document.tokens) + len(tail)), tail)


def _diary(chapter: Chapter | None, question: str) -> Sequence[Message]:
    text = chapter.text if chapter is not None else "~"
    return [Message("user", f"Read this diary.\n\n{text}\n\nThat is the end of the diary. {question}")]


async def _long_context(engine: EngineClient, plan: ProbePrompt, room: Room) -> list[Rendered]:
    """Return questions after texts that fill 1/8, 1/2 and all of the context, and questions about one short text.

    Each question asks for a fact that no shorter text has. All long texts begin equally, so an engine with a prefix
    cache computes the longest one only once.
    """
    most = min(room.context - room.answer, MAX_CONTEXT)
    document = Document(engine, _diary, prose.chapters(room.seed, max(12, most // _CHAPTERS)))
    found: list[Rendered] = []
    known = 0
    for share in SHARES:
        length = most // share
        await document.grow(length)
        tail = len(await document.tail(_question(document.read[-1], backwards=False)))
        new = [c for c, end in zip(document.read, document.ends, strict=True) if known < end <= length - tail - 8]
        for chapter, backwards in _spread(new):
            question = _question(chapter, backwards=backwards)
            tokens = await document.cut(length, await document.tail(question))
            if tokens is not None:
                name = f"{length}-{chapter.number}{'-code' * backwards}"
                prompt = ProbePrompt(plan.pack, name, (Message("user", question),), bucket=f"length-{length}")
                found.append(Rendered(prompt, tokens, room.answer))
        known = length
    shared = Document(engine, _diary, prose.chapters(room.seed + 2, 1))
    await shared.grow(SHARED_TOKENS if room.context >= 2 * SHARED_TOKENS else 0)
    for chapter in shared.read:
        question = _question(chapter, backwards=False)
        tokens = shared.tokens + await shared.tail(question)
        if len(tokens) + HIT_TOKENS <= room.context:
            prompt = ProbePrompt(plan.pack, f"{HIT}-{chapter.number}", (Message("user", question),), bucket=HIT)
            found.append(Rendered(prompt, tokens, HIT_TOKENS))
    return found


def _question(chapter: Chapter, *, backwards: bool) -> str:
    if backwards:
        return f"Which locker has the code {chapter.code}? Quote the sentence that says so."
    return f"What is the code of locker {chapter.number}? Quote the sentence that says so."


def _spread(chapters: Sequence[Chapter]) -> list[tuple[Chapter, bool]]:
    """Return up to QUESTIONS chapters, spread evenly, each with a flag.

    If the flag is True, the question gives the code and asks for the locker, otherwise the other way round.
    If there are fewer chapters than QUESTIONS, some chapters get both questions.
    """
    some = min(len(chapters), QUESTIONS)
    both = [(chapters[i * len(chapters) // some], False) for i in range(some)] + [(c, True) for c in chapters]
    return both[:QUESTIONS]


async def _paths(engine: EngineClient, plan: ProbePrompt, room: Room) -> list[Rendered]:
    """Return prompts of every length modulo RESIDUES, and prompts that exceed a chunk."""
    document = Document(engine, _diary, prose.chapters(room.seed + 1, 256))
    question = "Tell in one sentence what happened."
    await document.grow(1)
    tail = await document.tail(question)
    lengths = [("residue", _SHORTEST + more, RESIDUE_TOKENS) for more in range(RESIDUES)]
    lengths += [("chunk", size + more, room.answer) for size, beyond in CHUNKS.items() for more in beyond]
    found = []
    for at, (bucket, length, answer) in enumerate(lengths, 1):
        fits = length + answer <= room.context
        if fits and (tokens := await document.cut(length, tail, skipped=17 * at)) is not None:
            prompt = ProbePrompt(plan.pack, f"{bucket}-{length}", (Message("user", question),), bucket=bucket)
            found.append(Rendered(prompt, tokens, answer))
    return found


async def _agent(engine: EngineClient, plan: ProbePrompt, room: Room) -> list[Rendered]:
    """Return requests for a tool call, each at the end of a chat with whole rounds."""
    length = min((room.context - agent.CALL_TOKENS) * 3 // 4, AGENT_TOKENS, room.context - room.answer)
    document = Document(engine, agent.chat, agent.rounds(room.seed, max(1, length // 16_384)), agent.TOOLS_JSON)
    await document.grow(length)
    found = []
    for index, (request, task) in enumerate(agent.decisive(room.seed + 1, CALLS)):
        tail = await document.tail(request)
        whole = max((end + len(tail) for end in document.ends if end + len(tail) <= length), default=0)
        tokens = await document.cut(whole, tail)
        if tokens is not None:
            prompt = ProbePrompt(plan.pack, f"call-{index}", (Message("user", request),), bucket=plan.bucket)
            found.append(Rendered(prompt, tokens, room.answer, task))
    return found


async def _reasoning(engine: EngineClient, plan: ProbePrompt, room: Room) -> list[Rendered]:
    found = []
    for name, messages, task in reasoning.tasks(room.seed):
        prompt = ProbePrompt(plan.pack, name, messages, bucket=plan.bucket)
        tokens = (await engine.tokenize(prompt.messages)).tokens
        if len(tokens) + max(room.answer, task.tokens) <= room.context:
            found.append(Rendered(prompt, tokens, room.answer, task))
    return found


async def _images(engine: EngineClient, plan: ProbePrompt, room: Room) -> list[Rendered]:
    """Return questions about images, without refused ones. Raise `EngineRefused` if the engine refuses all of them."""
    found: list[Rendered] = []
    refused: list[tuple[str, EngineRefused]] = []
    for index, image in enumerate(images.questions(room.seed)):
        name = f"{image.width}x{image.height}-{index}"
        try:
            tokens = (await engine.tokenize_chat(image.chat())).tokens
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
            refused.append((name, refusal))
            continue
        if len(tokens) + room.answer <= room.context:
            prompt = ProbePrompt(plan.pack, name, (Message("user", image.text),), bucket=plan.bucket)
            found.append(Rendered(prompt, tokens, room.answer, image=image))
    if refused and not found:
        raise refused[0][1]
    room.left_out.extend(f"{plan.pack}/{name} ({refusal.excerpt})" for name, refusal in refused)
    return found


_MAKERS: dict[str, Callable[[EngineClient, ProbePrompt, Room], Awaitable[list[Rendered]]]] = {
    "long-context": _long_context,
    "paths": _paths,
    "agent": _agent,
    "reasoning": _reasoning,
    "images": _images,
}
