"""Arguments of kvpilot-serve that matter for our dtypes, by the rules of `kvpilot_formats.arguments`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvpilot_formats import arguments as vllm
from kvpilot_formats.arguments import drafts as drafting
from kvpilot_formats.arguments import rules
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, unsupported_drafts
from kvpilot_formats.arguments.rules import OFFLOAD, SIMPLE_OFFLOAD, TRANSFER
from kvpilot_runtime.config import connectors

__all__ = ["DRAFT_MODELS", "OFFLOAD", "SIMPLE_OFFLOAD", "TRANSFER", "unsupported_drafts"]

DISK_PATH, DISK_SIZE = "--kv-offloading-disk-path", "--kv-offloading-disk-size"
"""Options of `kvpilot-serve` that vLLM does not have."""
SERVE = "KVPILOT_SERVE"
"""Environment variable that `kvpilot-serve` sets for its engine, with every dtype.

The engine then accepts requests for offloaded pages (`offload.FROM_HOST`). It finishes waiting requests when it drains.
"""
WORKSPACE_SHARE = 200
"""Divisor of an engine's GPU memory. The result is the size of the workspace into which prefill reads context."""
SLIDING = "sliding_window"
"""Value of `--kv-cache-dtype-skip-layers` for all layers with a sliding window."""


def given(arguments: Sequence[str], *options: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options that are set, by their main names, each with its value (None for a flag)."""
    found = vllm.read(arguments)
    return ((option, found.value(option)) for option in options if found.on(option))


def refused(arguments: Sequence[str], environment: Mapping[str, str], device: str) -> tuple[str, str] | None:
    """Return the first option or variable that our dtypes do not support, and its name in words; None for none.

    Args:
        device: `cuda` or `cpu`.
    """
    found = vllm.read(arguments)
    if (what := rules.beside_ours(found, environment)) is not None:
        return what
    if (moves := rules.transfer(found)) and (unfit := connectors.unsupported(moves, device)) is not None:
        return TRANSFER, unfit
    if moves and (apart := connectors.misplaced(str(moves["kv_connector"]), environment.get(connectors.LAYOUT))):
        return connectors.LAYOUT, apart
    return None


def transfer(arguments: Sequence[str]) -> dict[str, object]:
    """Return the fields of vLLM's KVTransferConfig; empty without one, or if it cannot be read."""
    return rules.transfer(vllm.read(arguments))


def speculation(arguments: Sequence[str]) -> dict[str, str]:
    """Return the fields of vLLM's SpeculativeConfig; empty without speculative decoding."""
    return drafting.speculation(vllm.read(arguments))


def drafts(arguments: Sequence[str]) -> int:
    """Return the largest number of draft tokens of a sequence in a step; 0 without speculative decoding."""
    return drafting.drafts(vllm.read(arguments))


def offloaded_bytes(arguments: Sequence[str]) -> int | None:
    """Return the host memory that each engine takes for offloaded pages; None without offloading.

    Raises:
        ValueError: the option's value is not a number above 0; the value is its argument.
    """
    value = vllm.read(arguments).value(OFFLOAD)
    if value is None:
        return None
    try:
        gib = float(value)
    except ValueError:
        gib = 0.0
    if not 0 < gib < math.inf:
        raise ValueError(value)
    return int(gib * 2**30)


def count(arguments: Sequence[str], option: str, *_: str) -> int:
    """Return the number that an option has; 1 if it is not set or not above 0."""
    return vllm.read(arguments).count(option)
