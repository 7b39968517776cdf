"""A new dtype with known bit widths needs only one row in the table: pages on CPUs and GPUs follow from it."""

import pytest
import torch

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.reference.attention import decode_reference
from support.gpu_batch import CPU, Batch, generator, poisoned


@pytest.fixture(params=[("k8v2", 8, 2), ("k2v4", 2, 4)], ids=lambda row: row[0])
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> formats.Format:
    """Return a format that is added to the table of formats for this test."""
    row = formats.own(*request.param)
    monkeypatch.setitem(formats.FORMATS, row.name, row)
    return row


def test_a_dtype_that_is_added_to_the_table_has_a_name_and_a_size(new: formats.Format) -> None:
    assert formats.own_names()[-1] == new.name
    assert formats.parse(new.name).bits_per_element() == (new.key.bits + new.value.bits) / 2 + 0.25


@pytest.mark.parametrize("dim", [64, 96])
def test_cpu_and_gpu_store_and_decode_an_added_dtype_alike(new: formats.Format, dim: int) -> None:
    rng, ours, theirs = generator(4), poisoned(3, 2, 16, new, dim), poisoned(3, 2, 16, new, dim)
    key, value, query = (torch.randn(20, heads, dim, generator=rng) for heads in (2, 2, 4))
    slots, factors = 16 + torch.arange(20), Factors.identity(2, dim)
    shape = Shape(new, dim, 2, 2, 16, CPU)
    GpuPages(ours, shape, factors).store(query, key, value, slots, Plan(shape, 1), 0, 1.0)
    PackedPages(theirs, new, dim).store(key, value, slots)
    assert (ours != theirs).float().mean() < 2e-3
    out = PackedPages(ours, new, dim).decode(query[:1], torch.tensor([[1, 2]]), torch.tensor([20]), 0.1)
    wanted = decode_reference(query[0], key, value, new, 0.1)
    assert (out[0] - wanted).norm() < 5e-3 * wanted.norm()
    batch = Batch(new.name, dim, [40, 1], seed=3, ratio=3)
    query = batch.queries()
    out = batch.decode(query)
    for i in range(2):
        wanted = decode_reference(query[i], batch.keys[i], batch.values[i], new, batch.scale)
        assert (out[i] - wanted).norm() < 1e-3 * wanted.norm()
