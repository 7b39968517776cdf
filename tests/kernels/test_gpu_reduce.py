"""`reduce` merges the partial results of any splits to the result of one split over all tokens."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.reference.hadamard import rotation
from support.gpu_batch import CPU, DIMS, generator, poisoned, some_factors

FMT = formats.parse("k4v4")


class Merge:
    """Rotated scores and values of tokens in float64, and pages with a plan that can hold their partial results."""

    def __init__(self, lengths: list[int], dim: int, kv_heads: int, ratio: int, spread: float, seed: int) -> None:
        rng = generator(seed)
        self.shape = Shape(FMT, dim, kv_heads, ratio, 16, CPU)
        self.factors = some_factors(kv_heads, dim, rng)
        self.pages = GpuPages(poisoned(1, kv_heads, 16, FMT, dim), self.shape, self.factors)
        self.scores = [torch.randn(n, kv_heads, ratio, generator=rng).double() * spread for n in lengths]
        self.values = [torch.randn(n, kv_heads, self.shape.row_dim, generator=rng).double() for n in lengths]

    def wanted(self) -> torch.Tensor:
        """Return the right result, float64 [sequences, heads, dim]: softmax to base 2, with rotation and factors
        undone.
        """
        f, dim, out = self.factors, self.shape.head_dim, []
        for scores, values in zip(self.scores, self.values, strict=True):
            o = torch.einsum("thr,thd->hrd", (scores * 0.6931471805599453).softmax(0), values)
            o = o @ rotation(dim, torch.float64).T / f.value_scale[:, None] + f.value_mean[:, None]
            out.append(o.flatten(0, 1) if len(scores) else torch.zeros_like(o.flatten(0, 1)))
        return torch.stack(out)

    def merged(self, cuts: list[list[int]]) -> torch.Tensor:
        """Return the result of `reduce` for splits that end at `cuts`. All other rows of the scratch memory are NaN."""
        kv_heads, ratio, row = self.shape.kv_heads, self.shape.ratio, self.shape.row_dim
        plan, first = Plan(self.shape, len(cuts)), 0
        count = sum(map(len, cuts)) + 1
        plan.partial = torch.full((count, kv_heads, ratio, row), torch.nan)
        plan.lse = torch.full((count, kv_heads, ratio), torch.nan)
        for i, ends in enumerate(cuts):
            plan.spans[i] = torch.tensor([first, len(ends)])
            for start, end in zip([0, *ends], ends, strict=False):
                scores, values = self.scores[i][start:end], self.values[i][start:end]
                lse = torch.logsumexp(scores * 0.6931471805599453, 0) / 0.6931471805599453
                plan.lse[first] = lse
                plan.partial[first] = torch.einsum("thr,thd->hrd", (scores - lse).exp2(), values)
                first += 1
        out = torch.full((len(cuts), kv_heads * ratio, self.shape.head_dim), torch.nan)
        self.pages.merge(len(cuts), plan, out)
        return out


@st.composite
def ends(draw: st.DrawFn, length: int) -> list[int]:
    """Draw the ends of splits: any subset of the tokens and always the last one."""
    inner = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=20)) if length > 1 else set()
    return sorted(inner | {length}) if length else []


@settings(max_examples=12)
@given(st.data(), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.sampled_from(DIMS),
       st.sampled_from([1, 2, 5, 7, 16]), st.sampled_from([1.0, 30.0, 1000.0]), st.booleans(),
       st.integers(0, 2**31))  # fmt: skip
def test_the_division_into_splits_does_not_change_the_result(
    data: st.DataObject, lengths: list[int], dim: int, ratio: int, spread: float, big_gpu: bool, seed: int
) -> None:
    merge = Merge(lengths, dim, 2 if ratio < 8 else 1, ratio, spread, seed)
    cuts = [data.draw(ends(n)) for n in lengths]
    # On a large GPU with few sequences, each query head gets its own program.
    with mock.patch.object(tuning, "multiprocessors", lambda device: 1000 if big_gpu else 1):
        out = merge.merged(cuts)
    wanted = merge.wanted()
    assert torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()) + 1e-30)


@pytest.mark.parametrize("splits", [7, 8, 9, 128, 129, 300])
def test_many_splits_of_one_sequence_are_merged(splits: int) -> None:
    merge = Merge([splits], 64, 1, 2, 30.0, seed=splits)
    assert torch.allclose(merge.merged([list(range(1, splits + 1))]).double(), merge.wanted(), rtol=1e-4, atol=1e-5)


def test_without_calibration_only_the_rotation_is_undone() -> None:
    merge = Merge([9], 128, 2, 3, 1.0, seed=0)
    merge.factors = Factors.identity(2, 128)
    merge.pages = GpuPages(merge.pages.cache, merge.shape, merge.factors)
    assert torch.allclose(merge.merged([[4, 9]]).double(), merge.wanted(), rtol=1e-4, atol=1e-5)
