"""What people switch on in vLLM, read from the arguments without importing it; what does not go with our dtypes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
SIMPLE_OFFLOAD = "VLLM_USE_SIMPLE_KV_OFFLOAD"
OFFLOAD = "--kv-offloading-size"
SLIDING = "sliding_window"
"""vLLM's word for "the layers that attend to a window only" among the layers that skip the KV-cache dtype."""


@dataclass(frozen=True)
class Switch:
    """Something that our dtypes do not do: vLLM's options for it, and the values with which they leave it off."""

    what: str
    options: tuple[str, ...]
    off: tuple[str, ...] = ()


REFUSED = (
    Switch("KV transfer other than by --kv-offloading-size", ("--kv-transfer-config",)),
    Switch("offloading by another backend than vLLM's own", ("--kv-offloading-backend",), ("native",)),
    Switch("decode context parallelism", ("--decode-context-parallel-size", "-dcp"), ("1",)),
    Switch("prefill context parallelism", ("--prefill-context-parallel-size", "-pcp"), ("1",)),
    Switch("fast prefill of layers that share a cache", ("--kv-sharing-fast-prefill",)),
    Switch("dual batch overlap", ("--enable-dbo",)),
    Switch("dual batch overlap", ("--ubatch-size",), ("0", "1")),
    Switch("pooling", ("--runner",), ("auto", "generate", "draft")),
    Switch("pooling", ("--convert",), ("auto", "none")),
    Switch("pooling", ("--pooler-config",)),
)  # fmt: skip

_SPECULATION = ("--speculative-config", "-sc")
_SPECULATION_PARTS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}

DRAFTERS = ("ngram", "suffix")
"""The methods of speculative decoding that are served: drafts come from the tokens themselves. A model that drafts, be
it one layer, has a KV cache of its own (docs/decisions/0024)."""

SUFFIX_TOKENS = 24
"""Draft tokens of `suffix` where nobody says how many."""

_ANOTHER = frozenset({"-dc"})
"""Options of vLLM that begin like one that is looked for here, and are none."""


def given(arguments: Sequence[str], *options: str) -> Iterator[tuple[str, str | None]]:
    """Which of `options` are among the arguments, each with its value, None for a flag and for `--option.key=value`."""
    for option, key, value in _found(arguments, *options):
        yield option, None if key else value


def _found(arguments: Sequence[str], *options: str) -> Iterator[tuple[str, str, str | None]]:
    """Which of `options` are among the arguments, each with its key and its value.

    As vLLM's parser takes them: by any beginning that is no other option's, with `=` or a word after it, and as
    `--option.key=value`.
    """
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name, _, key = name.partition(".")
        least = 3 if name.startswith("--") else 2
        if not name.startswith("-") or len(name) < least or name in _ANOTHER:
            continue
        for option in options:
            if option == name or (name not in options and option.startswith(name)):
                after = arguments[i + 1] if i + 1 < len(arguments) else "-"
                yield option, key, value if equals else None if after.startswith("-") else after
                break


def refused(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The first option, or variable, that does not go with a dtype of ours, and what it is for; None for none."""
    if (method := speculation(arguments).get("method")) is not None and method not in DRAFTERS:
        return next(given(arguments, *_SPECULATION, *_SPECULATION_PARTS))[0], drafting(method)
    for switch in REFUSED:
        for option, value in given(arguments, *switch.options):
            if value is None or value not in switch.off:
                return option, switch.what
    for variable, what in ((BATCH_INVARIANT, "batch invariance"), (SIMPLE_OFFLOAD, "vLLM's simple offloading")):
        if environment.get(variable, "0").strip() not in ("", "0"):
            return variable, what
    return None


def drafting(method: str) -> str:
    """What a method that is not served is called, with those that are."""
    return f"speculative decoding by {method!r} ({' and '.join(DRAFTERS)} are served)"


def speculation(arguments: Sequence[str]) -> dict[str, str]:
    """What the arguments say of speculative decoding, empty for nothing; `method` is in it whenever there is any.

    Values that cannot be read are left to vLLM, whose parser ends the start.
    """
    found: dict[str, str] = {}
    for option, key, value in _found(arguments, *_SPECULATION, *_SPECULATION_PARTS):
        if option in _SPECULATION_PARTS or key:
            found[_SPECULATION_PARTS.get(option, key.replace("-", "_"))] = str(value)
            continue
        try:
            whole = json.loads(value or "")
        except ValueError:
            continue
        if isinstance(whole, dict):
            found |= {str(name).replace("-", "_"): str(part) for name, part in whole.items() if part is not None}
    if found:  # vLLM finds the method by the model's name, too, and has a second name for one
        method = found.get("method") or {"ngram": "ngram", "[ngram]": "ngram"}.get(found.get("model", ""))
        found["method"] = "ngram" if method == "[ngram]" else method or "draft_model"
    return found


def drafts(arguments: Sequence[str]) -> int:
    """Draft tokens of a sequence in a step, at most; 0 without speculative decoding."""
    found = speculation(arguments)
    tokens = found.get("num_speculative_tokens", "")
    return int(tokens) if tokens.isdecimal() else SUFFIX_TOKENS if found.get("method") == "suffix" else 0


def offloaded_bytes(arguments: Sequence[str]) -> int | None:
    """Host memory that each of the engines takes for offloaded pages; None where nothing is offloaded.

    Raises:
        ValueError: the option's value is no number above 0; the value is its argument.
    """
    last = [value for _, value in given(arguments, OFFLOAD)][-1:]
    if not last:
        return None
    try:
        gib = float(last[0] or "")
    except ValueError:
        gib = 0.0
    if not 0 < gib < math.inf:
        raise ValueError(last[0])
    return int(gib * 2**30)


def count(arguments: Sequence[str], *options: str) -> int:
    """The number that the last of these options has; 1 where there is none, or none that is a number."""
    last = [value for _, value in given(arguments, *options)][-1:]
    return int(last[0]) if last and last[0] is not None and last[0].isdecimal() and int(last[0]) else 1
