"""Weigh: each stretch of a sequence gets the attention that a plain softmax gives to its tokens."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels import check
from kvpilot_kernels.gpu.h2o.weigh import stretch, weigh
from kvpilot_kernels.gpu.launch.pages import GpuPages
from support.gpu_batch import DIMS, Batch, several


def masses(batch: Batch, query: torch.Tensor, sequence: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return float64 [kv_heads, tokens], summed over query heads, by plain softmax of stored tokens."""
    key = batch.read_back(sequence)[0].repeat_interleave(batch.ratio, 1)
    score = torch.einsum("hd,thd->ht", query[sequence].double(), key) * batch.scale
    if batch.softcap:
        score = batch.softcap * torch.tanh(score / batch.softcap)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None]], 1)
    return score.softmax(1)[:, : key.shape[0]].unflatten(0, (batch.kv_heads, batch.ratio)).sum(1)


def weighed(
    batch: Batch, query: torch.Tensor, wanted: int = 1, times: int = 1, room: int | None = None
) -> torch.Tensor:
    """Return the totals after `times` calls of `weigh`. Every total starts at 3.

    The buffers have one sequence and one stretch (`room`) more than needed, to show writes past the end.
    """
    plan, out = batch.plan(), torch.empty_like(query)
    batch.rotate(query, plan)
    batch.pages.decode(batch.table, batch.lens, plan, out)
    room = room or batch.table.shape[1] * batch.block_size // stretch(batch.shape) + 1
    total = torch.full((batch.kv_heads, len(batch.lengths) + 1, room), 3.0)
    for _ in range(times):
        weigh(batch.pages, batch.table, batch.lens, plan, torch.tensor([wanted], dtype=torch.int32), total)
    return total


def assert_right(
    batch: Batch, query: torch.Tensor, total: torch.Tensor, times: int = 1, sinks: torch.Tensor | None = None
) -> None:
    """Check that each stretch has its tokens' masses, up to the rounding of queries to float16."""
    size = stretch(batch.shape)
    wanted = torch.full(total.shape, 3.0, dtype=torch.float64)
    for i, length in enumerate(batch.lengths):
        if length:
            own = times * masses(batch, query, i, sinks)
            own = torch.nn.functional.pad(own, (0, -length % size)).unflatten(1, (-1, size)).sum(2)
            wanted[:, i, : own.shape[1]] += own
    torch.testing.assert_close(total.double(), wanted, rtol=2e-3, atol=2e-3)


@example("k4v2", 96, [130, 0, 1], 3, 16, 1, False, 0)
@example("k4v4", 512, [70], 2, 64, 3, True, 1)
@settings(max_examples=10)
@given(
    st.sampled_from(formats.own_names()), st.sampled_from(DIMS), st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.integers(1, 5), st.sampled_from([16, 48, 64]), st.integers(1, 20), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_stretches_weigh_what_a_plain_softmax_gives_them_however_the_work_is_cut(
    name: str, dim: int, lengths: list[int], ratio: int, block_size: int, wave: int, calibrated: bool, seed: int
) -> None:
    batch = Batch(name, dim, lengths, seed, ratio=ratio, block_size=block_size, wave=wave, calibrated=calibrated)
    query = batch.queries()
    assert_right(batch, query, weighed(batch, query, times=2), times=2)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinking", [False, True])
def test_what_a_sink_takes_no_token_has_and_a_cap_bends_scores_first(softcap: float, sinking: bool) -> None:
    batch = Batch("k4v4", 64, [40, 0, 130], seed=3, ratio=3, softcap=softcap, calibrated=True)
    query, sinks = batch.queries(), torch.tensor([3.0, -2.0, 0.5, 6.0, 0.0, 1.0]) if sinking else None
    batch.pages = GpuPages(batch.cache, batch.shape, batch.factors, sinks=sinks)
    assert_right(batch, query, weighed(batch, query), sinks=sinks)


@pytest.mark.parametrize("ratio", [1, 16, 17, 32])
def test_every_query_head_counts_once(ratio: int) -> None:
    batch = Batch("k8v4", 64, [100], seed=ratio, ratio=ratio)
    query = batch.queries()
    total = weighed(batch, query)
    assert_right(batch, query, total)
    assert total[:, 0].sum() - 3 * total[:, 0].numel() == pytest.approx(batch.kv_heads * ratio, rel=1e-3)


def test_a_step_that_is_not_to_be_weighed_adds_nothing() -> None:
    batch = Batch("k4v4", 64, [100, 20], seed=1)
    assert (weighed(batch, batch.queries(), wanted=0) == 3).all()


def test_what_is_past_the_last_stretch_is_left_out() -> None:
    batch = Batch("k4v4", 64, [100, 20], seed=1)
    query = batch.queries()
    whole, part = weighed(batch, query), weighed(batch, query, room=3)
    assert part.shape[2] == 3
    assert torch.equal(part, whole[..., :3])


def test_sequences_of_several_tokens_and_a_total_of_other_heads_or_too_few_sequences_are_refused() -> None:
    batch = Batch("k4v4", 64, [100, 20], seed=1)
    plan, wanted = batch.plan(), torch.ones(1, dtype=torch.int32)
    for total in (torch.zeros(2, 1, 7), torch.zeros(3, 2, 7), torch.zeros(2, 7, 2).mT):
        with pytest.raises(check.BadInputError, match=r"total .*2 heads and 2 sequences or more, contiguous"):
            weigh(batch.pages, batch.table, batch.lens, plan, wanted, total)
    plan.several = several([2, 1])
    with pytest.raises(check.BadInputError, match="several tokens"):
        weigh(batch.pages, batch.table, batch.lens, plan, wanted, torch.zeros(2, 2, 7))
