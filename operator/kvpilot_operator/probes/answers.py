"""From an engine's JSON to tokens and logprobs, with nothing taken on trust. Pure.

A missing or non-finite logprob becomes an empty position, which is maximal damage; anything that is not the API is a
`MalformedAnswer` that names the address and shows the start of what came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpilot_operator.probes.codec import MAX_TOKEN_ID
from kvpilot_operator.probes.errors import EngineRefused, MalformedAnswer
from kvpilot_operator.probes.stats import MIN_LOGPROB, Logprobs

MAX_EXCERPT = 300
MAX_TOP = 64
_TOKEN_PREFIX = "token_id:"  # noqa: S105 - vLLM's spelling of a token id, nothing secret


class Tokenized(NamedTuple):
    """A prompt's token ids and the engine's context length in tokens."""

    tokens: tuple[int, ...]
    max_model_len: int


class Step(NamedTuple):
    """One streamed token: its logprobs, its text, and whether the engine ended here by itself."""

    logprobs: Logprobs
    text: str
    stopped: bool


def read_object(url: str, data: bytes) -> Mapping[str, Any]:
    """Return the JSON object in `data`; raises `MalformedAnswer`."""
    try:
        # json reads NaN and Infinity, which an engine with broken logits may send; they become None.
        answer = json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"{url}: not JSON: {printable(data)}") from error
    if not isinstance(answer, dict):
        raise MalformedAnswer(f"{url}: {_excerpt(answer)}; expected an object")
    return answer


def read_tokens(url: str, answer: Mapping[str, Any]) -> Tokenized:
    """Return what /tokenize said; raises `MalformedAnswer`."""
    tokens, length = answer.get("tokens"), answer.get("max_model_len")
    if not isinstance(tokens, list) or not tokens or not all(_is_token(t) for t in tokens):
        raise MalformedAnswer(f"{url}: tokens is {_excerpt(tokens)}; expected a list of token ids")
    if not isinstance(length, int) or length < 1:
        raise MalformedAnswer(f"{url}: max_model_len is {_excerpt(length)}; expected a length")
    return Tokenized(tuple(tokens), length)


def read_steps(url: str, chunk: Mapping[str, Any]) -> list[Step]:
    """Return a streamed chunk's tokens; an engine that fails in the middle of a stream says so in `error`."""
    if "error" in chunk:
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        raise EngineRefused(url, code if isinstance(code, int) else 500, _excerpt(error))
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) > 1 or (choices and not isinstance(choices[0], dict)):
        raise MalformedAnswer(f"{url}: choices is {_excerpt(choices)}; expected one choice")
    if not choices or choices[0].get("logprobs") is None:
        return []
    choice, logprobs = choices[0], choices[0]["logprobs"]
    text = choice.get("text")
    lists = [
        logprobs.get(key) if isinstance(logprobs, dict) else None
        for key in ("tokens", "token_logprobs", "top_logprobs")
    ]
    if (
        not isinstance(text, str)
        or not all(isinstance(x, list) for x in lists)
        or len({len(x or []) for x in lists}) != 1
    ):
        raise MalformedAnswer(
            f"{url}: logprobs is {_excerpt(logprobs)}; expected tokens, token_logprobs and top_logprobs"
        )
    tokens, chosen, tops = (x or [] for x in lists)
    stopped = choice.get("finish_reason") == "stop"
    steps = []
    for i, (token, logprob, top) in enumerate(zip(tokens, chosen, tops, strict=True)):
        ident = _token(url, token)
        last = i == len(tokens) - 1
        steps.append(Step(Logprobs(ident, _top(url, ident, logprob, top)), text if last else "", stopped and last))
    return steps


def _top(url: str, token: int, logprob: object, top: object) -> dict[int, float]:
    """Return the position's finite logprobs, or nothing at all when one of them is no number."""
    if top is None or logprob is None:
        return {}
    if not isinstance(top, dict) or len(top) > MAX_TOP:
        raise MalformedAnswer(f"{url}: top_logprobs is {_excerpt(top)}; expected at most {MAX_TOP} tokens")
    values = {token: logprob, **{_token(url, key): value for key, value in top.items()}}
    bounded: dict[int, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return {}
        bounded[key] = float(min(max(value, MIN_LOGPROB), 0.0))
    return bounded


def _token(url: str, name: object) -> int:
    digits = name.removeprefix(_TOKEN_PREFIX) if isinstance(name, str) and name.startswith(_TOKEN_PREFIX) else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 8 and int(digits) <= MAX_TOKEN_ID):
        raise MalformedAnswer(
            f"{url}: token {_excerpt(name)}; expected {_TOKEN_PREFIX} and a number up to {MAX_TOKEN_ID}"
        )
    return int(digits)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def printable(data: bytes) -> str:
    """Return the start of a body on one line, for a message."""
    return " ".join(data.decode("utf-8", "replace").split())[:MAX_EXCERPT]


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_EXCERPT else f"{text[: MAX_EXCERPT - 3]}..."
