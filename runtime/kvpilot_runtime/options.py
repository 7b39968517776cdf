"""What people switch on in vLLM, read from the arguments without importing it; what does not go with our dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


@dataclass(frozen=True)
class Switch:
    """Something that our dtypes do not do: vLLM's options for it, and the values with which they leave it off."""

    what: str
    options: tuple[str, ...]
    off: tuple[str, ...] = ()


REFUSED = (
    Switch(
        "speculative decoding", ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
    ),
    Switch("KV transfer", ("--kv-transfer-config", "--kv-offloading-size")),
    Switch("decode context parallelism", ("--decode-context-parallel-size", "-dcp"), ("1",)),
    Switch("prefill context parallelism", ("--prefill-context-parallel-size", "-pcp"), ("1",)),
    Switch("dual batch overlap", ("--enable-dbo",)),
    Switch("dual batch overlap", ("--ubatch-size",), ("0", "1")),
    Switch("pooling", ("--runner",), ("auto", "generate", "draft")),
    Switch("pooling", ("--convert",), ("auto", "none")),
    Switch("pooling", ("--pooler-config",)),
)  # fmt: skip

_ANOTHER = frozenset({"-dc"})
"""Options of vLLM that begin like one that is looked for here, and are none."""


def given(arguments: Sequence[str], *options: str) -> Iterator[tuple[str, str | None]]:
    """Which of `options` are among the arguments, each with its value, None for a flag.

    As vLLM's parser takes them: by any beginning that is no other option's, with `=` or a word after it, and as
    `--option.key=value`, whose value is not told.
    """
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name, dot, _ = name.partition(".")
        least = 3 if name.startswith("--") else 2
        if not name.startswith("-") or len(name) < least or name in _ANOTHER:
            continue
        for option in options:
            if option == name or (name not in options and option.startswith(name)):
                after = arguments[i + 1] if i + 1 < len(arguments) else "-"
                yield option, value if equals and not dot else None if dot or after.startswith("-") else after
                break


def refused(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The first option, or variable, that does not go with a dtype of ours, and what it is for; None for none."""
    for switch in REFUSED:
        for option, value in given(arguments, *switch.options):
            if value is None or value not in switch.off:
                return option, switch.what
    if environment.get(BATCH_INVARIANT, "0").strip() not in ("", "0"):
        return BATCH_INVARIANT, "batch invariance"
    return None


def count(arguments: Sequence[str], *options: str) -> int:
    """The number that the last of these options has; 1 where there is none, or none that is a number."""
    last = [value for _, value in given(arguments, *options)][-1:]
    return int(last[0]) if last and last[0] is not None and last[0].isdecimal() and int(last[0]) else 1
