"""A NaN in a stored value makes every answer that attends to it NaN, and leaves all others unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_batch import LatentBatch
from recent import Sequences

from kvpilot_formats import formats
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from support.gpu_batch import CPU, DIMS, Batch, decode_rows, launch_as, ordinals

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's minimum under Triton's interpreter
RATIO, LENGTHS = 2, [50, 33]
WITH_RESIDUALS = [name for name in formats.own_names() if formats.parse(name).has_residuals]
broken, seeds = st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.integers(0, 2**31)
# Each entry: ((tokens of a block, tokens of a tile), tiles in shared memory at once, splits that run at the same time).
cuts = st.sampled_from([((16, 16), 2, 1), ((64, 32), 3, 2), ((64, 64), 2, 4), ((48, 16), 4, 3)])
counts = st.sampled_from([None, [1, 1], [4, 2], [7, 5]])


def restore(pages: GpuPages, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor, at: int,
            element: float | None) -> None:  # fmt: skip
    """Store one token again by the GPU kernel, either unchanged or with one NaN in its second KV head's value."""
    value = value.clone()
    if element is not None:
        value[0, 1, at % value.shape[-1]] = element
    query = torch.zeros(1, pages.shape.kv_heads * pages.shape.ratio, pages.shape.head_dim)
    pages.store(query, key, value, slot, Plan(pages.shape, 1), 0, 1.0, ordinals(at, at + 1))


def assert_seen_by_its_readers_alone(whole: torch.Tensor, out: torch.Tensor, rows: list[int], at: int) -> None:
    """Check that exactly the rows that see the broken token are NaN.

    `rows` has the number of tokens that each row of the first sequence sees. The rows of the other sequence follow.
    """
    assert whole.isfinite().all()
    readers = torch.zeros(out.shape[:2], dtype=torch.bool)
    for row, seen in enumerate(rows):
        readers[row, RATIO:] = at < seen
    assert out[readers].isnan().all()
    assert torch.equal(out[~readers], whole[~readers])


def rows_of(step: list[int] | None) -> tuple[list[int], int]:
    """Return how many tokens each row of the first sequence sees, and the number of rows."""
    first = 1 if step is None else step[0]
    return list(range(LENGTHS[0] - first + 1, LENGTHS[0] + 1)), 2 if step is None else sum(step)


@settings(max_examples=12)
@given(st.sampled_from(formats.own_names()), st.sampled_from(DIMS), st.integers(0, 49), broken, counts, cuts,
       st.sampled_from([0.0, 30.0]), seeds)  # fmt: skip
def test_one_nan_value_makes_every_output_that_attends_to_it_nan(
    name: str, dim: int, at: int, element: float, step: list[int] | None, cut: tuple[tuple[int, int], int, int],
    softcap: float, seed: int,
) -> None:  # fmt: skip
    (block, tile), stages, wave = cut
    batch = Batch(name, dim, LENGTHS, seed, 2, RATIO, block, tile, stages, wave, softcap, calibrated=True)
    rows, count = rows_of(step)
    query = torch.randn(count, 2 * RATIO, dim, generator=batch.rng)
    one = slice(at, at + 1)
    answers = []
    for bad in (None, element):
        restore(batch.pages, batch.keys[0][one], batch.values[0][one], batch.slots[0][one], at, bad)
        answers.append(decode_rows(batch.pages, batch.table, LENGTHS, step, query, batch.scale))
    whole, out = answers
    assert_seen_by_its_readers_alone(whole, out, rows, at)


@settings(max_examples=8)
@given(st.sampled_from(WITH_RESIDUALS), st.sampled_from([64, 96, 128, 512]), st.integers(0, 49), broken, counts, cuts,
       st.integers(0, 4), st.sampled_from([0.5, 1.0]), seeds)  # fmt: skip
def test_one_nan_value_shows_through_the_recent_window_too(
    name: str, dim: int, at: int, element: float, step: list[int] | None, cut: tuple[tuple[int, int], int, int],
    newest: int, mapped: float, seed: int,
) -> None:  # fmt: skip
    (block, tile), stages, wave = cut
    s = Sequences(name, dim, LENGTHS, newest, seed, ratio=RATIO, block_size=block, mapped=mapped)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    shape = Shape(s.fmt, dim, 2, RATIO, block, CPU, residuals=s.residuals.pages.shape[1])
    pages = GpuPages(s.cache, launch_as(shape, tile, stages, wave), s.factors, s.residuals)
    rows, count = rows_of(step)
    query = torch.randn(count, 2 * RATIO, dim, generator=s.rng)
    one = slice(at, at + 1)
    answers = []
    for bad in (None, element):
        restore(pages, s.keys[0][one], s.values[0][one], s.slots(0, at, at + 1), at, bad)
        answers.append(decode_rows(pages, s.table, LENGTHS, step, query, s.scale))
    whole, out = answers
    assert_seen_by_its_readers_alone(whole, out, rows, at)


@settings(max_examples=10)
@given(st.sampled_from(["mla8", "mla4"]), st.integers(0, 39), st.integers(0, 575), broken, st.integers(1, 4), seeds)
def test_one_nan_element_of_a_latent_makes_all_outputs_of_its_sequence_nan(
    name: str, at: int, channel: int, element: float, wave: int, seed: int
) -> None:
    batch = LatentBatch(name, [40, 30], seed, wave=wave)
    query = batch.queries()
    whole, entry = batch.decode(query), batch.entries[0][at : at + 1].clone()
    entry[0, channel] = element
    slot = batch.table[0, at // 16].long() * 16 + at % 16
    batch.pages.store(entry[:, :512].contiguous(), entry[:, 512:].contiguous(), slot[None])
    out = batch.decode(query)
    assert out[0].isnan().all()
    assert torch.equal(out[1], whole[1])
