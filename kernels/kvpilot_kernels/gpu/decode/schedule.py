"""Plan the splits of decode on the GPU, so that a captured CUDA graph adapts to the sequence lengths of each step.

A wave is the number of splits that run at once: the concurrent programs, divided by the programs that share a split.
A plan cuts the tiles of all sequences into splits of about equal length, (number of tiles) / wave. All tiles of a split
belong to one sequence, so each sequence may end with a shorter split. If this would make more splits than a wave, all
splits become a little longer. Sometimes a large part of a wave would get no split, for example with 32 sequences and a
wave of 49. Then the plan makes splits for several waves (rounds), if these end sooner.
"""

import torch
import triton
import triton.language as tl

CHUNK, OWN, PER = 1024, 32, 16
"""Sizes of a program of `plan_kernel`.

CHUNK: sequences whose splits it counts at once.
OWN: sequences whose splits it writes.
PER: splits of a sequence that it writes at once.
"""

ROUNDS = 4
"""Number of plans that the search compares: with splits for one wave, for two waves, and so on."""

FIXED = tl.constexpr(3)
"""Fixed cost of a split, in tiles: first loads, results and their merge. It is an estimate, not tuned."""


def beyond(tokens: int) -> int:
    """Return how many splits a plan may have in addition to a wave, per sequence that has tokens.

    Every split needs memory for one result per query token, so steps with several query tokens get fewer splits. By the
    estimate of `most_tiles`, more than 3 would seldom make a step faster.
    """
    return 3 if tokens == 1 else 1


def most_splits(sequences: int, wave: int, more: int) -> int:
    """Return the largest number of splits of a plan: a `wave`, and `more` for each sequence."""
    return wave + more * sequences


def most_results(rows: int, tokens: int, wave: int, sequences: int) -> int:
    """Return the largest number of partial results of a plan with `rows` rows and up to `tokens` rows per sequence.

    A row is a query token. A split has a result for each row of its sequence. So the first splits of all sequences have
    `rows` results together. The number of further splits is at most a wave, plus `beyond` - 1 for each sequence with
    tokens.
    """
    return rows + (wave + (beyond(tokens) - 1) * sequences) * tokens


@triton.jit
def tiles_of(lens_ptr, s, live, TILE: tl.constexpr):
    """Return lengths and numbers of tiles of sequences s."""
    lens = tl.load(lens_ptr + s, mask=live, other=0)
    return lens, tl.maximum((lens + TILE - 1) // TILE, 0)


@triton.jit
def cut(tiles, c):
    """Return the tiles per split and the number of splits of each sequence, for splits of at most c tiles."""
    parts = tl.maximum((tiles + c - 1) // c, 1)
    each = tl.maximum((tiles + parts - 1) // parts, 1)
    return each, (tiles + each - 1) // each


@triton.jit
def count_splits(lens_ptr, sequences, c, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of splits of all sequences if a split has at most c tiles, and the tiles of the largest one."""
    total = 0
    largest = 1
    for at in range(0, sequences, CHUNK):
        s = at + tl.arange(0, CHUNK)
        each, number = cut(tiles_of(lens_ptr, s, s < sequences, TILE)[1], c)
        total += tl.sum(number, 0)
        largest = tl.maximum(tl.max(each, 0), largest)
    return total, largest


@triton.jit
def most_tiles(lens_ptr, sequences, more, wave, TILE: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the limit on tiles per split that gives the step the shortest estimated time.

    A plan has at most a wave of splits, plus `more` for each sequence that has tokens. Sequences without tokens get no
    splits; `most_results` relies on this. The estimated time of a plan is its number of rounds, times the sum of FIXED
    and the tiles of its largest split. The search compares up to ROUNDS plans, starting with the fewest rounds. It
    stops at a plan whose time is at most an eighth above the lower bound.
    """
    total = 0
    live = 0
    for at in range(0, sequences, CHUNK):
        s = at + tl.arange(0, CHUNK)
        tiles = tiles_of(lens_ptr, s, s < sequences, TILE)[1]
        total += tl.sum(tiles, 0)
        live += tl.sum((tiles > 0).to(tl.int32), 0)
    count = wave + more * live
    fewest = tl.maximum((live + wave - 1) // wave, 1)
    least = (total + wave - 1) // wave + FIXED
    c = tl.maximum((total + wave - 1) // wave, 1)
    cost = total + FIXED + 1
    for rounds in range(fewest, fewest + ROUNDS):
        if cost * 8 > least * 9:
            room = tl.minimum(rounds * wave, count)
            may = tl.maximum((total + room - 1) // room, 1)
            number, largest = count_splits(lens_ptr, sequences, may, TILE, CHUNK)
            for _ in range(4):
                if number > room:
                    may += (may + 7) // 8
                    number, largest = count_splits(lens_ptr, sequences, may, TILE, CHUNK)
            found = (number + wave - 1) // wave * (largest + FIXED)
            if (number <= count) & ((rounds == fewest) | (found < cost)):
                c = may
                cost = found
    return c


@triton.jit
def rows_of(starts_ptr, s, live, SEVERAL: tl.constexpr):
    """Return the number of rows (query tokens) of each of the sequences s in this step."""
    rows = s * 0 + 1
    if SEVERAL:
        rows = tl.load(starts_ptr + 1 + s, mask=live, other=0) - tl.load(starts_ptr + s, mask=live, other=0)
    return rows


@triton.jit(do_not_specialize=["sequences", "count", "more", "wave"])
def plan_kernel(lens_ptr, starts_ptr, splits_ptr, spans_ptr, bases_ptr, sequences, count, more, wave,
                TILE: tl.constexpr, SEVERAL: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr,
                OWN: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """Count the splits of all sequences, and write those of the program's own sequences. Grid (cdiv(sequences, OWN),).

    lens: int32 [sequences], stored tokens; 0 means padding.
    starts: int32 [sequences + 1], the first row of each sequence; read only with SEVERAL.
    splits: int32 [count, 4], written, as (sequence, start, end, length of the sequence) in tokens. `start` is a
        multiple of TILE. Unused splits have the sequence -1.
    spans: int32 [sequences, 2], written: the first split of a sequence and the number of its splits.
    bases: int32 [sequences], written with SEVERAL: the first result of a sequence's first split.
    more, wave: as in `most_tiles`.
    """
    c = most_tiles(lens_ptr, sequences, more, wave, TILE, ROUNDS, CHUNK)
    own = tl.program_id(0) * OWN
    used = 0
    first = 0
    base = 0
    for at in range(0, sequences, CHUNK):
        s = at + tl.arange(0, CHUNK)
        tiles = tiles_of(lens_ptr, s, s < sequences, TILE)[1]
        number = cut(tiles, c)[1]
        used += tl.sum(number, 0)
        before = tl.where(s < own, number, 0)
        first += tl.sum(before, 0)
        if SEVERAL:
            base += tl.sum(before * rows_of(starts_ptr, s, s < sequences, SEVERAL), 0)
    s = own + tl.arange(0, OWN)
    live = s < sequences
    lens, tiles = tiles_of(lens_ptr, s, live, TILE)
    each, number = cut(tiles, c)
    first += tl.cumsum(number, 0) - number
    tl.store(spans_ptr + 2 * s, first, mask=live)
    tl.store(spans_ptr + 2 * s + 1, number, mask=live)
    if SEVERAL:
        results = number * rows_of(starts_ptr, s, live, SEVERAL)
        tl.store(bases_ptr + s, base + tl.cumsum(results, 0) - results, mask=live)
    for i in range(0, tl.max(number, 0), PER):
        k = i + tl.arange(0, PER)[None, :]
        mine = k < number[:, None]
        start = k * each[:, None] * TILE
        to = splits_ptr + 4 * (first[:, None] + k)
        tl.store(to, s[:, None] + k * 0, mask=mine)
        tl.store(to + 1, start, mask=mine)
        tl.store(to + 2, tl.minimum(start + each[:, None] * TILE, lens[:, None]), mask=mine)
        tl.store(to + 3, lens[:, None] + k * 0, mask=mine)
    for at in range(used + tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
        split = at + tl.arange(0, CHUNK)
        tl.store(splits_ptr + 4 * split, split * 0 - 1, mask=split < count)


def fill_splits(seq_lens: torch.Tensor, splits: torch.Tensor, spans: torch.Tensor, wave: int, tile: int,
                bases: torch.Tensor | None = None, starts: torch.Tensor | None = None, tokens: int = 1,
                more: int | None = None) -> None:  # fmt: skip
    """Split the work of a step into `splits` and `spans`, with `plan_kernel`.

    Args:
        seq_lens: int32 [sequences], stored tokens.
        starts, bases: as in `plan_kernel`; None if each sequence has one row.
        wave: number of splits that run at once.
        tile: tokens of a tile.
        tokens: largest number of rows of a sequence.
        more: as in `most_splits`; None for `beyond(tokens)`.
    """
    sequences, several = seq_lens.shape[0], starts is not None
    more = beyond(tokens) if more is None else more
    count = most_splits(sequences, wave, more)
    plan_kernel[(triton.cdiv(sequences, OWN),)](
        seq_lens, starts if several else spans, splits, spans, bases if several else spans, sequences,
        count, more, wave, TILE=tile, SEVERAL=several, ROUNDS=ROUNDS, CHUNK=CHUNK, OWN=OWN, PER=PER, num_warps=4,
    )  # fmt: skip
