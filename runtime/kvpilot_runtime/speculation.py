"""Speculative decoding: which drafts go with our dtypes, and what a step with draft tokens is to a backend.

A sequence that decodes has 1 + k tokens in a step where k were drafted for it. The model's answer says how many of them
stay; the others are computed again from the first wrong one on, in the places of those that were wrong. So each token
is a query of its own, which sees what is stored up to itself, and none ever sees a token behind its own.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpilot_runtime import options
from kvpilot_runtime.errors import UnsupportedModelError


def drafts(vllm_config: Any) -> int:
    """Tokens that may be drafted for a sequence in a step; 0 without speculative decoding."""
    found = getattr(vllm_config, "speculative_config", None)
    return 0 if found is None else int(found.num_speculative_tokens)


def refuse_other_drafters(vllm_config: Any, dtype: str) -> None:
    """Refuse drafts that come from elsewhere than the tokens themselves.

    Raises:
        UnsupportedModelError: another method than those of `options.DRAFTERS`.
    """
    found = getattr(vllm_config, "speculative_config", None)
    if found is not None and found.method not in options.DRAFTERS:
        raise UnsupportedModelError(
            f"{options.drafting(found.method)} is not supported with kv-cache dtype {dtype!r}; use one of these, or "
            "--kv-cache-dtype auto"
        )


def owners(starts: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a batch its sequence, and its token's place there from 1 on: how many tokens it sees.

    Nothing is copied from a GPU to its host.

    Args:
        starts: int [sequences + 1], first rows. seq_lens: int [sequences], tokens stored after this step; at least one
            sequence. tokens: rows to tell of; those after the last sequence's are padding.

    Returns:
        int64 [tokens], any sequence for padding; and seq_lens' type [tokens], 0 for padding.
    """
    row = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    ends = starts[1:]
    owner = torch.searchsorted(ends, row, right=True)
    real = owner < len(ends)
    owner = owner.clamp(max=len(ends) - 1)
    seen = seq_lens[owner] - (ends[owner] - row).to(seq_lens.dtype) + 1
    return owner, torch.where(real, seen, 0).clamp(min=0)
