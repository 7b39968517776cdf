"""Prefill and decode in engines of their own (vLLM's `NixlConnector`): what one may be told of the other's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def short(params: Mapping[str, Any], prompt: int, wanted: Sequence[int]) -> str | None:
    """How another engine's word on its blocks is not that of a prompt; None where it is.

    vLLM takes the last blocks of what it is told of, however many these are.

    Args:
        params: a request's `kv_transfer_params`. prompt: its tokens. wanted: its blocks in each group of layers.
    """
    if (tokens := params.get("remote_num_tokens") or 0) < prompt:
        return f"{tokens} of {prompt} tokens (remote_num_tokens)"
    found = [len(blocks) for blocks in params.get("remote_block_ids") or []]
    if found != list(wanted):
        return f"{found} blocks in its groups of layers and not {list(wanted)} (remote_block_ids)"
    if params.get("remote_blocks_expiry_time") is None:
        return "no time until which blocks are kept (remote_blocks_expiry_time)"
    return None
