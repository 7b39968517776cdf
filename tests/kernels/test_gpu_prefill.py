"""Prefill of wide heads: outputs and log-sum-exps equal their definition for any sequences."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.prefill import prefill
from kvpilot_kernels.gpu.launch.tuning import PrefillBlock
from support.gpu_batch import generator

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Largest allowed error, relative to a head's norm. Probabilities and outputs are rounded to the input's dtype."""


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool,
          softcap: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return one sequence in float64: outputs [tokens, heads, D], and log-sums [heads, tokens]."""
    key, value = (x.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = torch.einsum("ihd,thd->hit", query.double(), key) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1 + len(key) - len(query)).bool(), -torch.inf)
    return torch.einsum("hit,thd->ihd", scores.softmax(-1).nan_to_num(), value), scores.logsumexp(-1)


def assert_is_attention(
    news: list[int], olds: list[int], seed: int, dim: int, ratio: int, causal: bool, softcap: float, dtype: torch.dtype
) -> None:
    """Compare the kernel's attention with the reference, for sequences of `news` new and `olds` older tokens.

    Queries are the new tokens. They attend to all tokens if `causal`, and otherwise only to the older ones.
    """
    rng, kv_heads, heads = generator(seed), 2, 2 * ratio
    lens = [new + old for new, old in zip(news, olds, strict=True)] if causal else olds
    starts, rows = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (news, lens))
    # Queries and keys are views of wider rows, as projections return them. NaN follows the last token.
    query, key, value = (
        torch.randn(count + 5, n + 3, dim, generator=rng).to(dtype)[:, :n]
        for count, n in ((sum(news), heads), (sum(lens), kv_heads), (sum(lens), kv_heads))
    )
    query[sum(news) :] = key[sum(lens) :] = value[sum(lens) :] = torch.nan
    scale, out = 3 * dim**-0.5, torch.full((sum(news) + 2, heads, dim), torch.nan, dtype=dtype)
    found, lse = prefill(
        query[: sum(news)], key, value, starts, max(news), rows, scale, causal, softcap, out[: sum(news)]
    )
    assert found.data_ptr() == out.data_ptr()
    assert out[sum(news) :].isnan().all()
    for i in range(len(news)):
        q, k = slice(int(starts[i]), int(starts[i + 1])), slice(int(rows[i]), int(rows[i + 1]))
        wanted, wanted_lse = exact(query[q], key[k], value[k], scale, causal, softcap)
        assert ((found[q] - wanted).norm(dim=-1) <= CLOSE[dtype] * wanted.norm(dim=-1)).all()
        torch.testing.assert_close(lse[:, q], wanted_lse.float(), atol=1e-4, rtol=1e-4)


# Every pair of values occurs.
@pytest.mark.parametrize(
    ("causal", "softcap", "dtype"),
    [(True, 0.0, torch.float32), (True, 5.0, torch.float16), (False, 0.0, torch.float16), (False, 5.0, torch.float32)],
)
def test_outputs_and_log_sums_of_prefill_equal_the_definition(causal: bool, softcap: float, dtype: torch.dtype) -> None:
    assert_is_attention([40, 1, 33], [70, 9, 0], 3, 512, 4, causal, softcap, dtype)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=1, max_size=4), st.integers(0, 2**31),
    st.sampled_from([1, 2, 3, 8]), st.booleans(), st.sampled_from([0.0, 3.0]),
    st.sampled_from([(16, 16), (16, 32), (32, 16), (64, 32)]), st.sampled_from([64, 80, 384]),
)  # fmt: skip
def test_every_division_of_a_prefills_work_gives_the_same_result(
    sizes: list[tuple[int, int]], seed: int, ratio: int, causal: bool, softcap: float, block: tuple[int, int],
    dim: int,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "prefill_block", lambda _capability: PrefillBlock(*block, 4, 1))
        news, olds = zip(*sizes, strict=True)
        assert_is_attention(list(news), list(olds), seed, dim, ratio, causal, softcap, torch.float32)
