"""The plan of decode: every tile of every sequence in exactly one split, in order."""

import pytest
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_kernels.gpu.plan import most_splits, plan_kernel

SPLITS = 128


def cut(lengths: list[int], tile: int, wave: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits [count, 4] and spans [sequences, 2]; both full of 77 before."""
    sequences = len(lengths)
    count = most_splits(sequences, wave)
    # One row more than asked for, to see that nobody writes there.
    splits = torch.full((count + 1, 4), 77, dtype=torch.int32)
    spans = torch.full((sequences + 1, 2), 77, dtype=torch.int32)
    plan_kernel[(triton.cdiv(count, SPLITS),)](
        torch.tensor(lengths, dtype=torch.int32), splits, spans, sequences, count, wave, TILE=tile, WINDOW=window,
        SEQUENCES=triton.next_power_of_2(max(sequences, 16)), SPLITS=SPLITS,
    )  # fmt: skip
    assert (splits[-1] == 77).all()
    assert (spans[-1] == 77).all()
    return splits[:-1], spans[:-1]


# Two sequences of 1 and 4095 tiles, one of no token, many of one: what a step may look like.
@example([16, 16 * 4095, 0, 1], 16, 2, 0)
@example([1] * 40, 64, 1, 0)
@example([10**6], 64, 1056, 0)
@example([100, 4000, 7], 32, 3, 33)
@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20000)), min_size=1, max_size=20),
    st.sampled_from([16, 32, 64]), st.integers(1, 300), st.one_of(st.just(0), st.integers(1, 500)),
)  # fmt: skip
def test_items_cover_every_tile_that_is_seen_once_and_in_order(
    lengths: list[int], tile: int, wave: int, window: int
) -> None:
    splits, spans = cut(lengths, tile, wave, window)
    used = 0
    for sequence, length in enumerate(lengths):
        first, number = spans[sequence].tolist()
        assert first == used
        used += number
        assert (number == 0) == (length == 0)
        mine = splits[first:used, :3].tolist()
        seen = max(length - window, 0) if window else 0
        at = seen // tile * tile
        for owner, start, end in mine:
            assert (owner, start) == (sequence, at)
            assert start % tile == 0
            assert end > start
            at = end
        if mine:
            assert at == length
    assert used <= splits.shape[0]
    assert (splits[used:, 0] == -1).all()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 200))
def test_no_item_is_longer_than_its_share_allows(lengths: list[int], wave: int) -> None:
    splits, _ = cut(lengths, 16, wave, 0)
    share = max(1, -(-sum(-(-n // 16) for n in lengths) // wave))
    for _ in range(4):
        share += -(-share // 8)
    assert -(-int((splits[:, 2] - splits[:, 1])[splits[:, 0] >= 0].max()) // 16) <= share


@pytest.mark.parametrize("lengths", [
    [65600], [300000], [1056] * 8, [2080] * 32, [16500] * 32, [131100], [4096] * 16, [3000] * 20, [17000] * 48,
    [40000, 100, 100, 90000, 7], [2000] * 150,
])  # fmt: skip
def test_no_program_waits_for_another_to_end(lengths: list[int]) -> None:
    splits, _ = cut(lengths, 64, 198, 0)
    used = int((splits[:, 0] >= 0).sum())
    assert 140 <= used <= 198 or len(lengths) == 8
