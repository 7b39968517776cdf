"""Plan: how decode's work is cut, on the GPU, so that a captured graph follows the lengths of each step.

The tiles of all sequences are cut into splits of one sequence, of about tiles / wave tiles each; `wave` is how many
programs fit the GPU at once, divided by the KV heads, and each has one split. Where the ends of sequences would make
more, all become a little longer. Only of many sequences there are more, and never more than wave + sequences.
"""

import triton
import triton.language as tl


def most_splits(sequences: int, wave: int) -> int:
    """Rows of a split list that holds any plan."""
    return wave + sequences


@triton.jit(do_not_specialize=["sequences", "count", "wave"])
def plan_kernel(lens_ptr, splits_ptr, spans_ptr, sequences, count, wave, TILE: tl.constexpr, WINDOW: tl.constexpr,
                SEQUENCES: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Grid (cdiv(count, SPLITS),).

    lens: int32 [sequences], 0 for a row of padding; splits: int32 [count, 4] as (sequence or -1, start, end, length)
    in tokens, start a multiple of TILE, length the sequence's; spans: int32 [sequences, 2], the first split of a
    sequence and how many it has.
    """
    s = tl.arange(0, SEQUENCES)
    lens = tl.load(lens_ptr + s, mask=s < sequences, other=0)
    begin = tl.zeros([SEQUENCES], tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(lens - WINDOW, 0) // TILE
    tiles = tl.maximum((lens + TILE - 1) // TILE - begin, 0)
    total = tl.sum(tiles, 0)
    c = tl.maximum((total + wave - 1) // wave, 1)
    for _ in tl.static_range(4):
        c += tl.where(tl.sum((tiles + c - 1) // c, 0) > wave, (c + 7) // 8, 0)
    parts = tl.maximum((tiles + c - 1) // c, 1)
    each = tl.maximum((tiles + parts - 1) // parts, 1)
    number = (tiles + each - 1) // each
    first = tl.cumsum(number, 0) - number
    if tl.program_id(0) == 0:
        tl.store(spans_ptr + 2 * s, first, mask=s < sequences)
        tl.store(spans_ptr + 2 * s + 1, number, mask=s < sequences)
    split = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    mine = (split[:, None] >= first[None, :]) & (split[:, None] < (first + number)[None, :])
    sequence = tl.max(tl.where(mine, s[None, :], -1), 1)
    place = split - tl.sum(tl.where(mine, first[None, :], 0), 1)
    length = tl.sum(tl.where(mine, each[None, :], 0), 1)
    start = (tl.sum(tl.where(mine, begin[None, :], 0), 1) + place * length) * TILE
    whole = tl.sum(tl.where(mine, lens[None, :], 0), 1)
    to = splits_ptr + 4 * split
    tl.store(to, sequence, mask=split < count)
    tl.store(to + 1, start, mask=split < count)
    tl.store(to + 2, tl.minimum(start + length * TILE, whole), mask=split < count)
    tl.store(to + 3, whole, mask=split < count)
