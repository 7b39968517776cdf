"""Define a captured baseline and its identity, and encode it for a ConfigMap as msgpack in a zlib stream.

- Token ids have 32 bits.
- Logprobs have 16 bits, in steps of 1/2048 nat. This rounding changes a KL divergence by less than 2e-3 nat.
- A position's greedy token is stored first, so that a reader knows it even if logprobs are equal.
- A long prefix that a prompt shares with an earlier one is stored once.

`encode` refuses a baseline that has more than MAX_BYTES after compression.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from kvpilot_probes import stats
from kvpilot_probes.errors import BaselineTooLarge, MalformedBaseline
from kvpilot_probes.images import ImageQuestion
from kvpilot_probes.joined import Joined, Prefix, prefixes
from kvpilot_probes.packs import ProbePrompt
from kvpilot_probes.results import Done, Task

# Version of the meaning of answers. It is part of every identity, so a new number invalidates all baselines. Change it
# if the meaning of answers changes, but not if only their encoding does.
_MEANING = 2
MAX_BYTES = 900 * 1024
MAX_PROMPTS = 256
# Largest number of tokens of all prompts together. A shared prefix counts once. Prompts with images do not count: the
# tokens of an image are equal, so they take no room after compression.
MAX_PROMPT_TOKENS = 262_144
MAX_POSITIONS = 8192
MAX_TOKEN_ID = 2**24 - 1
# Largest number of tokens with a logprob at one position: vLLM's default --max-logprobs, plus the chosen token.
MAX_TOP = 21
# Largest number of bytes after decompression. A valid baseline has at most 2 MiB of arrays, and short texts.
_MAX_RAW = 3 * 1024 * 1024
_STEPS_PER_NAT = 2048
_Damage = Annotated[int, Meta(ge=0, le=int(stats.MAX_KL * stats.MICRO))]


@dataclass(frozen=True, slots=True)
class BaselinePrompt:
    """Prompt with the answer of the 16-bit engine.

    - `tail`, `text`: the end of the prompt and the answer, for people to read.
    - `tokens`: the prompt's token ids.
    - `answer`: one `Logprobs` for each answered token.
    - `bucket`: the bucket of every position of the answer.
    - `done`: the engine's own result of the prompt's `task`.
    - `image`: the image in the prompt and the question about it, or None. `tokens` then includes those that stand for
      the image.
    """

    name: str
    tail: str
    text: str
    tokens: Sequence[int]
    answer: Sequence[stats.Logprobs]
    bucket: str = "general"
    task: Task | None = None
    done: Done | None = None
    image: ImageQuestion | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """Noise of the 16-bit replica: how far the answers of a second run diverge from its own baseline.

    `captured` is the time (UTC) at which both runs were done.
    """

    captured: Annotated[datetime, Meta(tz=True)]
    prompts: Annotated[int, Meta(ge=0, le=MAX_PROMPTS)]
    positions: Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
    mean_kl_micronats: _Damage
    p99_kl_micronats: _Damage
    top1_agreement_permille: Annotated[int, Meta(ge=0, le=1000)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Answers of a 16-bit replica.

    `left_out` names the prompts that did not fit the model's context, and images that the replica refused.
    `tokenizer` is a hash of the tokens into which the replica's tokenizer splits a fixed text.
    """

    identity: str
    model: str
    dtype: str
    prompts: tuple[BaselinePrompt, ...]
    left_out: tuple[str, ...] = ()
    control: Control | None = None
    tokenizer: str = ""

    @property
    def positions(self) -> int:
        """Number of answered tokens of all prompts."""
        return sum(len(p.answer) for p in self.prompts)


class _Prompt(msgspec.Struct, frozen=True):
    name: str
    bucket: str
    tail: str
    text: str
    document: Annotated[int, Meta(ge=-1)]
    """Index of the earlier prompt that shares the longest prefix, or -1."""
    prefix: Annotated[int, Meta(ge=0)]
    """Number of tokens of that shared prefix."""
    tokens: bytes
    tops: list[Annotated[int, Meta(ge=1, le=MAX_TOP)]]
    """Number of tokens with a logprob, for each position."""
    top_ids: bytes
    steps: bytes
    task: Task | None
    done: Done | None
    image: ImageQuestion | None = None


class _Stored(msgspec.Struct, frozen=True):
    identity: str
    model: str
    dtype: str
    prompts: Annotated[list[_Prompt], Meta(max_length=MAX_PROMPTS)]
    left_out: tuple[str, ...]
    control: Control | None
    tokenizer: str


def with_control(baseline: Baseline, noise: stats.Measurement, captured: datetime) -> Baseline:
    """Return the baseline with its control run: the divergence (`noise`) of a second run of the same engine."""
    return replace(baseline, control=msgspec.convert({**asdict(noise), "captured": captured}, Control))


def identity(model: str, revision: str, dtype: str, prompts: Sequence[ProbePrompt], tokens: int, top_k: int) -> str:
    """Return a hash (10 hex digits) of everything that the answers depend on, except the engine's image.

    The image is left out, so that a baseline stays valid after an upgrade of the engine.
    """
    content = [
        [p.pack, p.name, [[m.role, m.content] for m in p.messages], p.tools, p.fill and astuple(p.fill), p.context]
        for p in prompts
    ]
    canonical = json.dumps(
        [_MEANING, model, revision, dtype, content, tokens, top_k], ensure_ascii=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def encode(baseline: Baseline) -> bytes:
    """Return the baseline as bytes. Raise `BaselineTooLarge` if they exceed a limit."""
    check_limits([p.tokens for p in baseline.prompts if p.image is None], baseline.positions)
    known = prefixes([p.tokens for p in baseline.prompts])
    prompts = [_packed(p, prefix) for p, prefix in zip(baseline.prompts, known, strict=True)]
    b = baseline
    stored = _Stored(b.identity, b.model, b.dtype, prompts, b.left_out, b.control, b.tokenizer)
    data = zlib.compress(msgspec.msgpack.encode(stored), 9)
    if len(data) > MAX_BYTES:
        raise BaselineTooLarge(
            f"baseline: {len(data)} bytes of {len(baseline.prompts)} prompts; at most {MAX_BYTES} fit in a ConfigMap: "
            "name fewer or shorter probe packs"
        )
    return data


def decode(data: bytes) -> Baseline:
    """Return the baseline from which `encode` made `data`. Raise `MalformedBaseline` for other data."""
    try:
        unpack = zlib.decompressobj()
        raw = unpack.decompress(data, _MAX_RAW)
        if not unpack.eof:
            raise ValueError(f"the stream is cut or unpacks to more than {_MAX_RAW} bytes")
        stored = msgspec.msgpack.decode(raw, type=_Stored)
        _check(
            sum(len(p.tokens) // 4 for p in stored.prompts if p.image is None), sum(len(p.tops) for p in stored.prompts)
        )
        prompts: list[BaselinePrompt] = []
        for one in stored.prompts:
            prompts.append(_unpacked(one, prompts))
    except (zlib.error, ValueError, RecursionError, BaselineTooLarge) as error:
        raise MalformedBaseline(
            f"baseline: {type(error).__name__}: {error}; delete the ConfigMap to re-capture"
        ) from error
    return Baseline(
        stored.identity, stored.model, stored.dtype, tuple(prompts), stored.left_out, stored.control, stored.tokenizer
    )


def check_limits(prompts: Sequence[Sequence[int]], positions: int) -> None:
    """Raise `BaselineTooLarge` if a baseline of this size would not fit in a ConfigMap. Call it before a capture."""
    _check(sum(map(len, prompts)) - sum(prefix.size for prefix in prefixes(prompts)), positions)


def _check(prompt_tokens: int, positions: int) -> None:
    for what, value, limit in (
        ("prompt tokens", prompt_tokens, MAX_PROMPT_TOKENS),
        ("positions", positions, MAX_POSITIONS),
    ):
        if value > limit:
            raise BaselineTooLarge(f"baseline: {value} {what}; at most {limit}: name fewer or shorter probe packs")


def _packed(p: BaselinePrompt, prefix: Prefix) -> _Prompt:
    tops = [_sorted_top(position) for position in p.answer]
    return _Prompt(
        name=p.name,
        bucket=p.bucket,
        tail=p.tail[-stats.MAX_TEXT :],
        text=p.text[: stats.MAX_TEXT],
        document=prefix.document,
        prefix=prefix.size,
        tokens=array("I", p.tokens[prefix.size :]).tobytes(),
        tops=[len(top) for top in tops],
        top_ids=array("I", [token for top in tops for token, _ in top]).tobytes(),
        steps=array("H", [_steps(logprob) for top in tops for _, logprob in top]).tobytes(),
        task=p.task,
        done=p.done,
        image=p.image,
    )


def _unpacked(p: _Prompt, before: Sequence[BaselinePrompt]) -> BaselinePrompt:
    rest, ids, steps = array("I", p.tokens), array("I", p.top_ids), array("H", p.steps)
    tokens: Sequence[int] = rest
    if p.document >= 0:
        if p.document >= len(before) or p.prefix > len(before[p.document].tokens):
            raise ValueError(f"a prefix of {p.prefix} tokens of prompt {p.document}, which has fewer or comes later")
        tokens = Joined(before[p.document].tokens, p.prefix, rest)
    if not len(ids) == len(steps) == sum(p.tops):
        raise ValueError(f"{len(ids)} token ids and {len(steps)} logprobs, {sum(p.tops)} announced")
    positions, at = [], 0
    for many in p.tops:
        found = {ids[i]: -steps[i] / _STEPS_PER_NAT for i in range(at, at + many)}
        if fault := stats.impossible(found, ids[at]):
            raise ValueError(fault)
        positions.append(stats.Logprobs(ids[at], found))
        at += many
    answer = stats.Answers(positions)
    return BaselinePrompt(p.name, p.tail, p.text, tokens, answer, p.bucket, p.task, p.done, p.image)


def _sorted_top(answer: stats.Logprobs) -> list[tuple[int, float]]:
    """Return the tokens with their stored logprobs: first the greedy token, then the others by decreasing logprob."""
    return sorted(answer.top.items(), key=lambda item: (item[0] != answer.token, _steps(item[1]), item[0]))


def _steps(logprob: float) -> int:
    return round(-min(max(logprob, stats.MIN_LOGPROB), 0.0) * _STEPS_PER_NAT)
