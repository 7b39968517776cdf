"""What people switch on in vLLM, read from the arguments without importing it; what does not go with our dtypes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpilot_runtime.config import carriers

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
SIMPLE_OFFLOAD = "VLLM_USE_SIMPLE_KV_OFFLOAD"
OFFLOAD = "--kv-offloading-size"
DISK_PATH, DISK_SIZE = "--kv-offloading-disk-path", "--kv-offloading-disk-size"
"""Of `kvpilot-serve` alone."""
TRANSFER = "--kv-transfer-config"
SERVE = "KVPILOT_SERVE"
"""Environment variable that `kvpilot-serve` sets for its engine, whatever the dtype: it answers requests for
offloaded pages (`offload.FROM_HOST`), and requests that wait when it is told to end."""
WORKSPACE_SHARE = 200
"""One part in so many of the memory that an engine may use of a GPU holds the keys and values of context that prefill
reads back at a time."""
SLIDING = "sliding_window"
"""vLLM's word for "the layers that attend to a window only" among the layers that skip the KV-cache dtype."""


@dataclass(frozen=True)
class Switch:
    """Something that our dtypes do not do: vLLM's options for it, and the values with which they leave it off."""

    what: str
    options: tuple[str, ...]
    off: tuple[str, ...] = ()


DUAL_BATCH = (Switch("dual batch overlap", ("--enable-dbo",)),
              Switch("dual batch overlap", ("--ubatch-size",), ("0", "1")))  # fmt: skip
"""Two halves of a batch at once. Nobody has tried it, and both halves would use one workspace and one plan."""

REFUSED = (
    Switch("offloading by another backend than vLLM's own", ("--kv-offloading-backend",), ("native",)),
    Switch("decode context parallelism", ("--decode-context-parallel-size", "-dcp"), ("1",)),
    Switch("prefill context parallelism", ("--prefill-context-parallel-size", "-pcp"), ("1",)),
    Switch("fast prefill of layers that share a cache", ("--kv-sharing-fast-prefill",)),
    *DUAL_BATCH,
    Switch("pooling", ("--runner",), ("auto", "generate", "draft")),
    Switch("pooling", ("--convert",), ("auto", "none")),
    Switch("pooling", ("--pooler-config",)),
)  # fmt: skip

_BESIDE_DRAFT_MODELS = (
    Switch("a model that drafts, beside tensor parallelism,", ("--tensor-parallel-size", "-tp"), ("1",)),
    Switch("a model that drafts, beside pipeline parallelism,", ("--pipeline-parallel-size", "-pp"), ("1",)),
    Switch("a model that drafts, beside adapters,", ("--enable-lora",)),
    Switch("a model that drafts, beside offloading,", ("--kv-offloading-size",)),
)
"""What nobody has seen right beside drafts of a model; the backend knows it in `kvpilot_runtime.speculation`, too."""

_BESIDE_CARRIERS = (
    Switch("pipeline parallelism", ("--pipeline-parallel-size", "-pp"), ("1",)),
    Switch("data parallelism", ("--data-parallel-size", "-dp"), ("1",)),
    Switch("speculative decoding", ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")),
    Switch("adapters", ("--enable-lora",)),
    Switch("offloading", (OFFLOAD,)),
)
"""What nobody has seen right beside these connectors; the backend knows it in `carriers`, too."""

_SPECULATION = ("--speculative-config", "-sc")
_SPECULATION_PARTS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}

DRAFTERS = ("ngram", "suffix")
"""The methods of speculative decoding whose drafts come from the tokens themselves."""

DRAFT_MODELS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods with a model that drafts, be it one layer, and has a KV cache of its own."""

_OF_DRAFTS = {"kv_cache_dtype": "a KV-cache dtype of the draft's own", "parallel_drafting": "parallel drafting",
              "use_heterogeneous_vocab": "a draft of another vocabulary"}  # fmt: skip
"""What a draft model can be asked for and is not served with."""

_EXTRA = "kv_connector_extra_config"

_OFF = (None, False, "False", "false")

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


def refused(arguments: Sequence[str], environment: Mapping[str, str], device: str) -> tuple[str, str] | None:
    """The first option, or variable, that does not go with a dtype of ours, and what it is for; None for none.

    Args:
        device: `cuda` or `cpu`.
    """
    asked = speculation(arguments)
    if (what := unsupported_drafts(asked.get("method"), asked)) is not None:
        return next(given(arguments, *_SPECULATION, *_SPECULATION_PARTS))[0], what
    beside = _BESIDE_DRAFT_MODELS if asked.get("method") in DRAFT_MODELS else ()
    if (found := _first_on(arguments, (*REFUSED, *beside))) is not None:
        return found
    if any(given(arguments, TRANSFER)):
        moves = transfer(arguments)
        if moves.get("kv_connector") not in carriers.SERVED:
            return TRANSFER, f"KV transfer other than by {', '.join((OFFLOAD, *carriers.SERVED))}"
        if (what := carriers.unsupported(moves, device)) is not None:
            return TRANSFER, what
        if (found := _first_on(arguments, _BESIDE_CARRIERS)) is not None:
            return found[0], f"{moves['kv_connector']} beside {found[1]}"
        if what := carriers.misplaced(str(moves["kv_connector"]), environment.get(carriers.LAYOUT)):
            return carriers.LAYOUT, what
    for variable, what in ((BATCH_INVARIANT, "batch invariance"), (SIMPLE_OFFLOAD, "vLLM's simple offloading")):
        if environment.get(variable, "0").strip() not in ("", "0"):
            return variable, what
    return None


def _first_on(arguments: Sequence[str], switches: Iterable[Switch]) -> tuple[str, str] | None:
    for switch in switches:
        for option, value in given(arguments, *switch.options):
            if value is None or value not in switch.off:
                return option, switch.what
    return None


def transfer(arguments: Sequence[str]) -> dict[str, object]:
    """What the arguments say of KV transfer, as fields of vLLM's KVTransferConfig; what cannot be read is left out."""
    found: dict[str, object] = {}
    for _, key, value in _found(arguments, TRANSFER):
        try:
            part = json.loads(value or "")
        except ValueError:
            part = value
        for name in reversed(key.split(".") if key else ()):
            part = {name.replace("-", "_"): part}
        if isinstance(part, dict):
            extra = {**_mapping(found.get(_EXTRA)), **_mapping(part.get(_EXTRA))}
            found |= part | ({_EXTRA: extra} if extra else {})
    return found


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def unsupported_drafts(method: str | None, asked: Mapping[str, object]) -> str | None:
    """What of speculative decoding is not served; None for nothing.

    Args:
        method: as vLLM calls it, None for no speculation. asked: fields of vLLM's SpeculativeConfig.
    """
    served = DRAFTERS + DRAFT_MODELS
    if method is not None and method not in served:
        return f"speculative decoding by {method!r} ({', '.join(served[:-1])} and {served[-1]} are served)"
    if method not in DRAFT_MODELS:
        return None
    return next((f"{_OF_DRAFTS[name]} ({name})" for name in _OF_DRAFTS if asked.get(name) not in _OFF), None)


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
    if found:  # vLLM finds the method by the model's name, too, and has more names for some
        method = found.get("method") or {"ngram": "ngram", "[ngram]": "ngram"}.get(found.get("model", ""))
        method = "mtp" if (method or "").endswith("_mtp") else method
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
