"""Attention with a recent window equals its definition, query by query."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy import windowed as module
from benchmarks.accuracy.windowed import windowed


@given(
    tokens=st.integers(1, 30), newest=st.integers(0, 40), block=st.integers(1, 8), since=st.integers(0, 30),
    heads=st.sampled_from([(2, 2), (6, 2)]),
    sliding=st.one_of(st.none(), st.integers(1, 30)), piece=st.integers(1, 40),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_query_reads_its_newest_blocks_refined_and_all_others_from_pages(
    tokens: int, newest: int, block: int, since: int, heads: tuple[int, int], sliding: int | None, piece: int
) -> None:
    rng = torch.Generator().manual_seed(tokens)
    query = torch.randn(1, heads[0], tokens, 8, generator=rng)
    pages, fine = (tuple(torch.randn(1, heads[1], tokens, 8, generator=rng) for _ in "kv") for _ in "pf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        found = windowed(query, pages, fine, 0.4, newest, block=block, since=since, sliding_window=sliding)
    for t in range(tokens):
        first = 0 if sliding is None else max(0, t - sliding + 1)
        near = [t // block - i // block < newest and i >= since for i in range(first, t + 1)]
        for h in range(heads[0]):
            kv = h // (heads[0] // heads[1])
            key, value = (
                torch.stack(
                    [(fine if close else pages)[side][0, kv, i] for i, close in enumerate(near, first)]
                ).double()
                for side in (0, 1)
            )
            scores = key @ query[0, h, t].double() * 0.4
            torch.testing.assert_close(found[0, h, t].double(), scores.softmax(0) @ value, atol=1e-5, rtol=1e-5)
