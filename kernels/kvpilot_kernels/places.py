"""Sequences of a batch's rows, and slots of tokens of several sequences."""

from __future__ import annotations

import torch


def owners(starts: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each row of a batch, and the position of the row's token there, counted from 1.

    The position is also the number of tokens that the row sees. Nothing is copied from a GPU to its host.

    Args:
        starts: int [sequences + 1], first rows. seq_lens: int [sequences], tokens stored after this step; at least one
            sequence. tokens: number of rows; those after the last sequence's are padding.

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


def stored_slots(
    block_table: torch.Tensor, rows: torch.Tensor, begins: torch.Tensor, tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of tokens [begin, begin + length) of each sequence, sequence after sequence.

    They are computed once for all layers and heads. A launch over the longest sequence times their number would have
    mostly idle programs, because lengths differ.

    Args:
        block_table: int32 [sequences, blocks]. rows: int32 [sequences + 1], where each sequence's tokens start in the
            results; their differences are the lengths, and the last is `tokens`. begins: int32 [sequences].

    Returns:
        Slots, int64 [tokens], block * block_size + offset; and ordinals, int32 [tokens], positions from 1 on.
    """
    owner, ordinals = owners(rows, begins + rows.diff(), tokens)
    return _slots(block_table, owner, ordinals, block_size), ordinals


def joined_slots(
    block_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of all tokens of each sequence: its context in pages, and its fresh tokens in rows of the step.

    Args:
        block_table: int32 [sequences, blocks]. rows: int32 [sequences + 1], where each sequence's tokens start in the
            results; the last is `tokens`. starts: int32 [sequences + 1], its first rows among the fresh tokens.

    Returns:
        Slots, int64 [tokens], as from `stored_slots`, or -1 - row for a fresh token; and ordinals.
    """
    owner, ordinals = owners(rows, rows.diff(), tokens)
    row = torch.arange(tokens, device=rows.device) - (rows - starts)[1:][owner]  # a sequence ends with its new tokens
    slots = _slots(block_table, owner, ordinals, block_size)
    return torch.where(row >= starts[owner], -1 - row, slots), ordinals


def _slots(block_table: torch.Tensor, owner: torch.Tensor, ordinals: torch.Tensor, block_size: int) -> torch.Tensor:
    place = ordinals - 1
    return block_table[owner, place // block_size].long() * block_size + place % block_size
