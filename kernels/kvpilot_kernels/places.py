"""Find the sequence of each query token in a batch, and the cache slots of several sequences' tokens."""

import torch


def owners(starts: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each row (query token), and the row's position in that sequence, counted from 1.

    The position is also the number of tokens that the row attends to. Nothing is copied from a GPU to its host.

    Args:
        starts: int [sequences + 1], the first row of each sequence; at least one sequence.
        seq_lens: int [sequences], stored tokens after this step.
        tokens: number of rows. Rows after those of the last sequence are padding.

    Returns:
        Sequences, int64 [tokens], arbitrary for padding.
        Positions, [tokens] of seq_lens' type, 0 for padding.
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
    """Return the slots of tokens [begin, begin + length) of each sequence, one sequence after another.

    All layers and heads share this list. A kernel with one program for each slot has no idle programs, unlike a kernel
    with a grid of (sequences, longest length).

    Args:
        block_table: int32 [sequences, blocks].
        rows: int32 [sequences + 1], index of each sequence's first token in the results. The differences are the
            lengths, and the last number is `tokens`.
        begins: int32 [sequences], position of the first token to return in each sequence.

    Returns:
        Slots, int64 [tokens], block * block_size + offset.
        Ordinals, int32 [tokens], positions in the sequence, counted from 1.
    """
    row, owner = _owners(rows, tokens)
    place = row + (begins - rows[:-1])[owner]
    return _slots(block_table, owner, place, block_size), place + 1


def joined_slots(
    block_table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each sequence's tokens are: first its context in pages, then its new tokens in rows of the step.

    Args:
        block_table: int32 [sequences, blocks].
        rows: as in `stored_slots`.
        starts: int32 [sequences + 1], index of each sequence's first row among the new tokens.

    Returns:
        Slots, int64 [tokens]: for a stored token as from `stored_slots`, and -1 - row for a new token.
        Ordinals, as from `stored_slots`.
    """
    row, owner = _owners(rows, tokens)
    place, fresh = row - rows[owner], row - (rows - starts)[1:][owner]  # A sequence ends with its new tokens.
    slots = _slots(block_table, owner, place, block_size)
    return torch.where(fresh >= starts[owner], -1 - fresh, slots), place + 1


def _owners(rows: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers from 0 to `tokens` - 1, and the sequence of each. No row is padding, unlike in `owners`."""
    row = torch.arange(tokens, dtype=rows.dtype, device=rows.device)
    return row, torch.searchsorted(rows[1:], row, right=True)


def _slots(block_table: torch.Tensor, owner: torch.Tensor, place: torch.Tensor, block_size: int) -> torch.Tensor:
    return block_table[owner, place // block_size].long() * block_size + place % block_size
