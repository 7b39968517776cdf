"""Attention with a recent window equals its definition, query by query."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_kernels.reference import windowed as module
from kvpilot_kernels.reference.windowed import windowed


@given(
    tokens=st.integers(1, 30), recent=st.integers(0, 40), since=st.integers(0, 30),
    heads=st.sampled_from([(2, 2), (6, 2)]), softcap=st.sampled_from([0.0, 2.0]),
    sliding=st.one_of(st.none(), st.integers(1, 30)), piece=st.integers(1, 40),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_query_reads_its_last_tokens_by_fine_and_all_others_by_pages(
    tokens: int, recent: int, since: int, heads: tuple[int, int], softcap: float, sliding: int | None, piece: int
) -> None:
    rng = torch.Generator().manual_seed(tokens)
    query = torch.randn(1, heads[0], tokens, 8, generator=rng)
    pages, fine = (tuple(torch.randn(1, heads[1], tokens, 8, generator=rng) for _ in "kv") for _ in "pf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        found = windowed(query, pages, fine, 0.4, recent, since=since, softcap=softcap, sliding_window=sliding)
    for t in range(tokens):
        first = 0 if sliding is None else max(0, t - sliding + 1)
        near = [t - i < recent and i >= since for i in range(first, t + 1)]
        for h in range(heads[0]):
            kv = h // (heads[0] // heads[1])
            key, value = (
                torch.stack(
                    [(fine if close else pages)[side][0, kv, i] for i, close in enumerate(near, first)]
                ).double()
                for side in (0, 1)
            )
            scores = key @ query[0, h, t].double() * 0.4
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            torch.testing.assert_close(found[0, h, t].double(), scores.softmax(0) @ value, atol=1e-5, rtol=1e-5)


def test_gradients_reach_pages_from_distant_queries_alone() -> None:
    rng = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 700, 8, generator=rng)  # more than one piece
    pages, fine = (tuple(torch.randn(1, 1, 700, 8, generator=rng).requires_grad_() for _ in "kv") for _ in "pf")
    windowed(query, pages, fine, 0.4, 100).square().sum().backward()
    for x in pages:
        assert x.grad is not None
        assert not x.grad[:, :, 600:].any()
        assert x.grad[:, :, :600].any(-1).all()
    plain = [x.detach().requires_grad_() for x in pages]
    torch.nn.functional.scaled_dot_product_attention(
        query, *plain, is_causal=True, scale=0.4, enable_gqa=True
    ).square().sum().backward()
    again = [x.detach().requires_grad_() for x in pages]
    windowed(query, (again[0], again[1]), (again[0], again[1]), 0.4, 0).square().sum().backward()
    for x, y in zip(plain, again, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-4)
