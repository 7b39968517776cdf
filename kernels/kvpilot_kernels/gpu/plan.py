"""Plan: how decode's work is cut, on the GPU, so that a captured graph follows the lengths of each step.

The tiles of all sequences are cut into splits of about `c` tiles of one sequence. One wave of programs is aimed at
while splits stay short; longer work is cut into several waves, so that a straggler costs little:

    one = ceil(tiles / wave)        c = max(SHORTEST, min(one, max(LONGEST, ceil(tiles / (WAVES * wave)))))

with `wave` the programs that fit the GPU at once, divided by the KV heads. Never more than WAVES * wave + sequences
splits come out of it.
"""

import triton
import triton.language as tl

SHORTEST = tl.constexpr(1)
LONGEST = tl.constexpr(8)
WAVES = tl.constexpr(2)


def most_splits(sequences: int, wave: int) -> int:
    """Rows of a split list that holds any plan."""
    return int(WAVES.value) * wave + sequences


@triton.jit(do_not_specialize=["sequences", "count", "wave"])
def plan_kernel(lens_ptr, splits_ptr, spans_ptr, sequences, count, wave, TILE: tl.constexpr, WINDOW: tl.constexpr,
                SEQUENCES: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Grid (cdiv(count, SPLITS),).

    lens: int32 [sequences], 0 for a row of padding; splits: int32 [count, 4] as (sequence or -1, start, end, 0) in
    tokens, start a multiple of TILE; spans: int32 [sequences, 2], the first split of a sequence and how many it has.
    """
    s = tl.arange(0, SEQUENCES)
    lens = tl.load(lens_ptr + s, mask=s < sequences, other=0)
    begin = tl.zeros([SEQUENCES], tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(lens - WINDOW, 0) // TILE
    tiles = tl.maximum((lens + TILE - 1) // TILE - begin, 0)
    total = tl.sum(tiles, 0)
    one = (total + wave - 1) // wave
    several = (total + WAVES * wave - 1) // (WAVES * wave)
    c = tl.maximum(tl.minimum(one, tl.maximum(several, LONGEST)), SHORTEST)
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
    end = tl.minimum(start + length * TILE, tl.sum(tl.where(mine, lens[None, :], 0), 1))
    to = splits_ptr + 4 * split
    tl.store(to, sequence, mask=split < count)
    tl.store(to + 1, start, mask=split < count)
    tl.store(to + 2, end, mask=split < count)
