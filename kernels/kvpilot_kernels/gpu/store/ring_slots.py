"""Ring slots of a step's tokens, computed on the GPU. `kvpilot_kernels.ring.ring_slots` is the same on a CPU."""

import torch
import triton
import triton.language as tl

TOKENS = 128


@triton.jit(do_not_specialize=["sequences", "tokens", "table_stride"])
def ring_slots_kernel(starts_ptr, lens_ptr, table_ptr, slots_ptr, sequences, tokens, table_stride,
                      RECENT: tl.constexpr, RING: tl.constexpr, RING_BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
                      TOKENS: tl.constexpr):  # fmt: skip
    """Write the ring slots of a step's tokens. Grid (cdiv(tokens, TOKENS),).

    starts: int32 [sequences + 1], the first row of each sequence.
    lens: int32 [sequences], stored tokens after the step.
    table: int32 [sequences, RING_BLOCKS].
    slots: int64 [tokens], written.
    RECENT: number of last tokens that a ring keeps.
    RING: tokens of a ring page.
    ROUNDS: rounds of a binary search over sequences; 2^ROUNDS is more than `sequences`.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    low = tl.zeros([TOKENS], tl.int32)
    high = low + sequences
    for _ in range(ROUNDS):  # find the first sequence that ends after this token
        middle = (low + high) // 2
        ends = tl.load(starts_ptr + 1 + middle, mask=middle < high, other=2147483647)
        after = ends <= token
        low = tl.where(after & (middle < high), middle + 1, low)
        high = tl.where(after, high, middle)
    live = (low < sequences) & (token < tokens)
    ago = tl.load(starts_ptr + 1 + low, mask=live, other=0) - token  # 1 for the last token of a sequence
    position = tl.load(lens_ptr + low, mask=live, other=0) - ago
    live = live & (position >= 0) & (ago <= RECENT)
    place = tl.where(live, position, 0) % (RING_BLOCKS * RING)
    block = tl.load(table_ptr + low * table_stride + place // RING, mask=live, other=0).to(tl.int64)
    slot = tl.where(live & (block > 0), block * RING + place % RING, -1)
    tl.store(slots_ptr + token, slot, mask=token < tokens)


def fill_ring_slots(slots: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor,
                    recent: int, ring_tokens: int) -> None:  # fmt: skip
    """Compute each row's slot in its sequence's ring, as `kvpilot_kernels.ring.ring_slots` does; -1 for none.

    Args:
        slots: output, int64 [rows].
        starts: int32 [sequences + 1], the first row of each sequence; rows after the last sequence are padding.
        seq_lens: int32 [sequences], stored tokens after this step; 0 for padding.
        table: int32 [sequences, ring_blocks], the rings' blocks; 0 or negative for none, as in vLLM's tables.
        recent: number of last tokens that a ring keeps, drafts included.
        ring_tokens: tokens of a ring page.
    """
    rows, sequences = slots.shape[0], seq_lens.shape[0]
    ring_slots_kernel[(triton.cdiv(rows, TOKENS),)](
        starts, seq_lens, table, slots, sequences, rows, table.stride(0), RECENT=recent, RING=ring_tokens,
        RING_BLOCKS=table.shape[1], ROUNDS=rounds(sequences), TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip


def rounds(sequences: int) -> int:
    """Return the rounds of a binary search over sequences. It is a multiple of 4, so that few variants are compiled."""
    return -(-sequences.bit_length() // 4) * 4
