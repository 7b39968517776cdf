"""A captured baseline, its identity, and its bytes as a ConfigMap's binaryData keeps them.

Bytes: the magic `kvpb`, a version byte, then one zlib stream of (version 2; version 1 has no `control` in its header)
    u32 header length | header (JSON, UTF-8) | prompt token ids u24 | top token ids u24 | top logprobs u16
all little-endian. The header holds names, texts and counts; the arrays follow in the header's order, each position's
greedy token first, then the others by falling logprob. A logprob is kept in steps of 1/2048 nat (16 bits reach -32,
below `stats.MIN_LOGPROB`). Rounding moves the cell of all
other tokens by at most 2.5e-4, which moves a KL by less than 2e-3 nat at the very worst, and the control's like a
candidate's.

The limits are chosen so that even incompressible data stays below MAX_BYTES: 65,536 prompt tokens (3 bytes) and 4,096
positions of 20 tokens (5 bytes) are 606 KB, and the texts of 64 prompts, two of 600 characters each, at most 307 KB.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from kvpilot_operator.probes.errors import BaselineTooLarge, MalformedBaseline
from kvpilot_operator.probes.packs import MAX_PROMPTS, ProbePrompt
from kvpilot_operator.probes.stats import MAX_KL, MICRO, MIN_LOGPROB, Answers, Logprobs, Measurement, impossible

VERSION = 2
_READABLE = (1, 2)
# Part of every identity: a new number makes every baseline be captured anew, so it follows what answers mean, not how
# they are packed.
_MEANING = 1
MAGIC = b"kvpb"
MAX_BYTES = 900 * 1024
MAX_PROMPT_TOKENS = 65_536
MAX_POSITIONS = 4096
MAX_TOKEN_ID = 2**24 - 1
MAX_TEXT = 600
# Tokens with a logprob at one position: vLLM's default --max-logprobs, and the chosen one.
MAX_TOP = 21
# What a stream may unpack to: 0.6 MiB of arrays, and a header of 64 names and twice 64 texts of 4 bytes a character,
# with room to spare; more is not ours.
_MAX_RAW = 2 * 1024 * 1024
_STEPS_PER_NAT = 2048
_Damage = Annotated[int, Meta(ge=0, le=int(MAX_KL * MICRO))]


class _Prompt(msgspec.Struct, frozen=True):
    name: str
    tail: str
    text: str
    tokens: Annotated[int, Meta(ge=0, le=MAX_PROMPT_TOKENS)]
    tops: list[Annotated[int, Meta(ge=1, le=MAX_TOP)]]


class _Control(msgspec.Struct, frozen=True):
    captured: Annotated[int, Meta(ge=0, lt=2**32)]
    """Unix seconds."""
    prompts: Annotated[int, Meta(ge=0, le=MAX_PROMPTS)]
    positions: Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
    mean_kl_micronats: _Damage
    p99_kl_micronats: _Damage
    top1_agreement_permille: Annotated[int, Meta(ge=0, le=1000)]


class _Header(msgspec.Struct, frozen=True):
    identity: str
    model: str
    dtype: str
    prompts: Annotated[list[_Prompt], Meta(max_length=MAX_PROMPTS)]
    left_out: list[str] = msgspec.field(name="leftOut")
    control: _Control | None = None


@dataclass(frozen=True, slots=True)
class BaselinePrompt:
    """One prompt as the 16-bit engine saw and continued it.

    `tokens` are the prompt's token ids, `answer` the positions after it (its greedy tokens, ending early where the
    model ended), `tail` the end of what was asked and `text` what was answered, both for people.
    """

    name: str
    tail: str
    text: str
    tokens: Sequence[int]
    answer: Sequence[Logprobs]


@dataclass(frozen=True, slots=True)
class Control:
    """The 16-bit replica's damage against its own answers, and when (UTC) both were taken."""

    captured: datetime
    prompts: int
    positions: int
    mean_kl_micronats: int
    p99_kl_micronats: int
    top1_agreement_permille: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a 16-bit replica answered; `left_out` names the prompts that did not fit the model's context.

    `control` is None until it was measured, and in what an older kvpilot kept.
    """

    identity: str
    model: str
    dtype: str
    prompts: tuple[BaselinePrompt, ...]
    left_out: tuple[str, ...] = ()
    control: Control | None = None

    @property
    def positions(self) -> int:
        """All positions of all prompts."""
        return sum(len(p.answer) for p in self.prompts)


def with_control(baseline: Baseline, noise: Measurement, captured: datetime) -> Baseline:
    """The baseline with what was measured of its own engine against it."""
    return replace(baseline, control=msgspec.convert({**asdict(noise), "captured": captured}, Control))


def identity(model: str, revision: str, dtype: str, prompts: Sequence[ProbePrompt], tokens: int, top_k: int) -> str:
    """Return 10 hex digits that change when the model, its revision, the dtype, a prompt's content or the depth does.

    The engine image is left out on purpose: an upgrade is judged by what the model answered before it.
    """
    content = [
        [p.pack, p.name, [[m.role, m.content] for m in p.messages], *([p.tools] if p.tools else [])] for p in prompts
    ]
    canonical = json.dumps(
        [_MEANING, model, revision, dtype, content, tokens, top_k], ensure_ascii=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def encode(baseline: Baseline) -> bytes:
    """Return the baseline's bytes, at most MAX_BYTES; raises `BaselineTooLarge`."""
    prompt_tokens = [t for p in baseline.prompts for t in p.tokens]
    positions = [a for p in baseline.prompts for a in p.answer]
    check_limits(len(prompt_tokens), len(positions))
    header = _Header(
        identity=baseline.identity,
        model=baseline.model,
        dtype=baseline.dtype,
        left_out=list(baseline.left_out),
        control=None if baseline.control is None else _kept(baseline.control),
        prompts=[
            _Prompt(p.name, p.tail[-MAX_TEXT:], p.text[:MAX_TEXT], len(p.tokens), [len(a.top) for a in p.answer])
            for p in baseline.prompts
        ],
    )
    tops = [_sorted_top(a) for a in positions]
    head = msgspec.json.encode(header)
    raw = b"".join(
        (
            len(head).to_bytes(4, "little"),
            head,
            b"".join(_id_bytes(t) for t in prompt_tokens),
            b"".join(_id_bytes(t) for top in tops for t, _ in top),
            b"".join(_steps(lp).to_bytes(2, "little") for top in tops for _, lp in top),
        )
    )
    data = MAGIC + bytes([VERSION]) + zlib.compress(raw, 9)
    if len(data) > MAX_BYTES:
        raise BaselineTooLarge(
            f"baseline: {len(data)} bytes of {len(baseline.prompts)} prompts; at most {MAX_BYTES} fit in a ConfigMap: "
            "name fewer or shorter probe packs"
        )
    return data


def decode(data: bytes) -> Baseline:
    """Return the baseline that `encode` made `data` of; raises `MalformedBaseline` for anything else."""
    if data[:4] != MAGIC or len(data) < 6:
        raise MalformedBaseline(
            f"baseline: {len(data)} bytes without the magic {MAGIC!r}; delete the ConfigMap to re-capture"
        )
    if data[4] not in _READABLE:
        raise MalformedBaseline(
            f"baseline: version {data[4]}, this kvpilot reads up to {VERSION}; delete it to re-capture"
        )
    try:
        unpack = zlib.decompressobj()
        raw = unpack.decompress(data[5:], _MAX_RAW)
        if not unpack.eof:
            raise ValueError(f"the stream is cut or unpacks to more than {_MAX_RAW} bytes")
        return _read(raw)
    except (zlib.error, ValueError, RecursionError, BaselineTooLarge) as error:
        raise MalformedBaseline(
            f"baseline: {type(error).__name__}: {error}; delete the ConfigMap to re-capture"
        ) from error


def _read(raw: bytes) -> Baseline:
    length = int.from_bytes(raw[:4], "little")
    header = msgspec.json.decode(raw[4 : 4 + length], type=_Header)
    n_tokens = sum(p.tokens for p in header.prompts)
    n_top = sum(sum(p.tops) for p in header.prompts)
    check_limits(n_tokens, sum(len(p.tops) for p in header.prompts))
    ids = raw[4 + length :]
    if len(ids) != 3 * n_tokens + 5 * n_top:
        raise ValueError(f"{len(ids)} bytes of arrays, {3 * n_tokens + 5 * n_top} announced")
    tokens = iter(_ids(ids[: 3 * n_tokens]))
    top_ids = iter(_ids(ids[3 * n_tokens : 3 * (n_tokens + n_top)]))
    steps = ids[3 * (n_tokens + n_top) :]
    logprobs = iter(-int.from_bytes(steps[i : i + 2], "little") / _STEPS_PER_NAT for i in range(0, len(steps), 2))
    prompts = []
    for kept in header.prompts:
        prompt = array("I", islice(tokens, kept.tokens))
        answer = Answers(_position(zip(islice(top_ids, n), islice(logprobs, n), strict=True)) for n in kept.tops)
        prompts.append(BaselinePrompt(kept.name, kept.tail, kept.text, prompt, answer))
    return Baseline(
        identity=header.identity,
        model=header.model,
        dtype=header.dtype,
        prompts=tuple(prompts),
        left_out=tuple(header.left_out),
        control=None if header.control is None else _measured(header.control),
    )


def _position(top: Iterable[tuple[int, float]]) -> Logprobs:
    found = dict(top)
    chosen = next(iter(found))
    fault = impossible(found, chosen)
    if fault is not None:
        raise ValueError(fault)
    return Logprobs(chosen, found)


def _measured(kept: _Control) -> Control:
    return Control(**{**msgspec.structs.asdict(kept), "captured": datetime.fromtimestamp(kept.captured, UTC)})


def _kept(control: Control) -> _Control:
    return _Control(**{**asdict(control), "captured": int(control.captured.timestamp())})


def check_limits(prompt_tokens: int, positions: int) -> None:
    """Raise `BaselineTooLarge` when this much would not fit, before anybody spends an engine's time on it."""
    for what, value, limit in (
        ("prompt tokens", prompt_tokens, MAX_PROMPT_TOKENS),
        ("positions", positions, MAX_POSITIONS),
    ):
        if value > limit:
            raise BaselineTooLarge(f"baseline: {value} {what}; at most {limit}: name fewer or shorter probe packs")


def _sorted_top(answer: Logprobs) -> list[tuple[int, float]]:
    """The greedy token first, so that it can be told after reading even among equals; then by falling kept logprob."""
    return sorted(answer.top.items(), key=lambda item: (item[0] != answer.token, _steps(item[1]), item[0]))


def _id_bytes(token: int) -> bytes:
    if not 0 <= token <= MAX_TOKEN_ID:
        raise BaselineTooLarge(f"baseline: token id {token}; ids up to {MAX_TOKEN_ID} can be kept")
    return token.to_bytes(3, "little")


def _ids(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 3], "little") for i in range(0, len(data), 3)]


def _steps(logprob: float) -> int:
    return round(-min(max(logprob, MIN_LOGPROB), 0.0) * _STEPS_PER_NAT)
