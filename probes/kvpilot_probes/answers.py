"""Decode an engine's JSON into tokens and logprobs, and validate every value. Pure.

If a logprob of a position is missing or not finite, the position gets no logprobs at all, which counts as maximal
damage. Impossible logprobs, and bodies that do not follow the API, raise `MalformedAnswer`.
"""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvpilot_formats.untrusted import shown, whole
from kvpilot_probes.codec import MAX_TOKEN_ID, MAX_TOP
from kvpilot_probes.errors import EngineRefused, MalformedAnswer
from kvpilot_probes.stats import MAX_TEXT, MIN_LOGPROB, Logprobs, impossible

MAX_EXCERPT = 300
# Largest number of bytes that a token id takes in JSON, with its comma and space.
BYTES_A_TOKEN = 10
# Size limit of an answer of /tokenize.
READ_BYTES = 640 * 1024
_TOKEN_PREFIX = "token_id:"  # noqa: S105 - vLLM's spelling of a token id, nothing secret
# Pattern of NaN or Infinity outside of strings. It matches whole strings, even unterminated ones, in linear time.
_NOT_FINITE = re.compile(rb'("(?:[^"\\]++|\\.?)*+"?)|-?(?:NaN|Infinity)', re.DOTALL)

T = TypeVar("T")


class Tokenized(NamedTuple):
    """A prompt's token ids and the engine's context length in tokens."""

    tokens: Sequence[int]
    max_model_len: int


class StreamedToken(NamedTuple):
    """One token of a streamed answer: its logprobs and its text."""

    logprobs: Logprobs
    text: str


class Chunk(NamedTuple):
    """One chunk of a streamed answer.

    Only the last chunk has a `finish_reason`, and only the first one of a chat has the token ids of its `prompt`.
    """

    tokens: Sequence[StreamedToken] = ()
    finish_reason: str | None = None
    prompt: Sequence[int] | None = None


class _Tokenized(msgspec.Struct):
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]], Meta(min_length=1)]
    max_model_len: Annotated[int, Meta(ge=1)]


class Model(msgspec.Struct):
    """The name of a model that an engine serves."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]


class _Models(msgspec.Struct):
    data: list[Model]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | str | None]
    top_logprobs: list[dict[str, float | str | None] | None]


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(max_length=1)] | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Likely(msgspec.Struct):
    token: str
    logprob: float | str | None


class _Written(_Likely):
    top_logprobs: list[_Likely]


class _Content(msgspec.Struct):
    content: list[_Written] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _ChatChoice(msgspec.Struct):
    delta: _Delta
    logprobs: _Content | None = None
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    choices: Annotated[list[_ChatChoice], Meta(max_length=1)] | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None = None


C = TypeVar("C", _Chunk, _ChatChunk)


class _Text(msgspec.Struct):
    prompt: str


class _Error(msgspec.Struct):
    code: Annotated[int, Meta(ge=100, le=599)] = 500


def read_tokens(url: str, data: bytes) -> Tokenized:
    """Parse the answer of /tokenize. Raise `MalformedAnswer` if it is invalid."""
    answer = _decoded(url, data, _Tokenized)
    return Tokenized(array("I", answer.tokens), answer.max_model_len)


def read_models(url: str, data: bytes) -> tuple[Model, ...]:
    """Parse the list of models that /v1/models returns. Raise `MalformedAnswer` if the answer is invalid."""
    return tuple(_decoded(url, data, _Models).data)


def read_text(url: str, data: bytes) -> str:
    """Parse the answer of /detokenize. Raise `MalformedAnswer` if it is invalid."""
    return _decoded(url, data, _Text).prompt


def read_streamed(url: str, data: bytes) -> Chunk:
    """Parse a streamed chunk. Raise `EngineRefused` if it contains an `error`, because the engine has failed."""
    choices = _choices(url, data, _Chunk).choices
    if not choices:
        return Chunk()
    choice, logprobs = choices[0], choices[0].logprobs
    if logprobs is None:
        return Chunk(finish_reason=choice.finish_reason)
    if not len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs):
        raise MalformedAnswer(f"{url}: tokens, token_logprobs and top_logprobs differ in length: {excerpt(data)}")
    found = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return Chunk(_steps(url, found, choice.text), choice.finish_reason)


def read_chat(url: str, data: bytes) -> Chunk:
    """Parse a streamed chunk of a chat. Raise `EngineRefused` if it contains an `error`."""
    chunk = _choices(url, data, _ChatChunk)
    if not chunk.choices:
        return Chunk(prompt=chunk.prompt_token_ids)
    choice = chunk.choices[0]
    written = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    found = ((one.token, one.logprob, {top.token: top.logprob for top in one.top_logprobs}) for one in written)
    text = choice.delta.content or choice.delta.reasoning or ""
    return Chunk(_steps(url, found, text), choice.finish_reason, chunk.prompt_token_ids)


def _steps(
    url: str, found: Iterable[tuple[str, float | str | None, Mapping[str, float | str | None] | None]], text: str
) -> Sequence[StreamedToken]:
    steps = []
    for token, logprob, top in found:
        ident = _token(url, token)
        steps.append(StreamedToken(Logprobs(ident, _top(url, ident, logprob, top)), ""))
    if steps:
        # Keep at most MAX_TEXT characters, because the text is only for people.
        steps[-1] = steps[-1]._replace(text=text[:MAX_TEXT])
    return steps


def _choices(url: str, data: bytes, kind: type[C]) -> C:
    """Parse a streamed chunk, which has choices. Raise `EngineRefused` if it contains an `error`."""
    try:
        chunk = _decoded(url, data, kind)
    except MalformedAnswer:
        # An engine with broken logits may send NaN and Infinity, which JSON does not allow. Count them as null.
        finite = _NOT_FINITE.sub(lambda found: found[1] or b"null", data)
        if finite == data:
            raise
        chunk = _decoded(url, finite, kind)
    if chunk.error is not msgspec.UNSET:
        raise EngineRefused(url, _code(chunk.error), excerpt(bytes(chunk.error)))
    if chunk.choices is msgspec.UNSET:
        raise MalformedAnswer(f"{url}: no choices in {excerpt(data)}")
    return chunk


def _decoded(url: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedAnswer(f"{url}: {str(error)[:MAX_EXCERPT]}, in {excerpt(data) or 'nothing'}") from error


def _code(error: msgspec.Raw) -> int:
    try:
        return msgspec.json.decode(error, type=_Error).code
    except (msgspec.DecodeError, RecursionError):
        return 500


def _top(
    url: str, token: int, logprob: float | str | None, top: Mapping[str, float | str | None] | None
) -> dict[int, float]:
    """Return the logprobs of one position, or an empty mapping if one of them is not a number."""
    if top is None or logprob is None:
        return {}
    values = {token: logprob, **{_token(url, key): value for key, value in top.items()}}
    if len(values) > MAX_TOP:
        raise MalformedAnswer(f"{url}: top_logprobs of {len(values)} tokens; expected at most {MAX_TOP}")
    numbers = {key: value for key, value in values.items() if isinstance(value, float)}
    if len(numbers) < len(values):
        return {}
    fault = impossible(numbers, token)
    if fault is not None:
        raise MalformedAnswer(
            f"{url}: {fault}: these are not logprobs. Start the engine without --logprobs-mode, or see its log"
        )
    return {key: min(max(value, MIN_LOGPROB), 0.0) for key, value in numbers.items()}


def _token(url: str, name: str) -> int:
    ident = whole(name.removeprefix(_TOKEN_PREFIX), MAX_TOKEN_ID) if name.startswith(_TOKEN_PREFIX) else None
    if ident is None:
        raise MalformedAnswer(f"{url}: token {name[:60]!r}; expected {_TOKEN_PREFIX} and a number up to {MAX_TOKEN_ID}")
    return ident


def excerpt(data: bytes) -> str:
    """Return the start of a body on one line, for a message."""
    return " ".join(shown(data[: 4 * MAX_EXCERPT].decode("utf-8", "replace")).split())[:MAX_EXCERPT]
