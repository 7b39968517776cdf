"""Recent window in the GPU kernels: the ring's bytes equal those of the CPU code, and decode reads them."""

from dataclasses import replace

import pytest
import torch
from decided import decided
from hypothesis import given, settings
from hypothesis import strategies as st
from recent import Sequences
from rounding import assert_within_rounding

from kvpilot_formats import formats
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.gpu.decode import kernel as decode
from kvpilot_kernels.gpu.launch import pages
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.reference.hadamard import rotation
from support.gluon_eager import EagerKernel
from support.gpu_batch import (
    BLOCK_OUTERMOST,
    CPU,
    DIMS,
    MINE,
    OTHERS,
    among_layers,
    decode_rows,
    launch_as,
    ordinals,
)  # fmt: skip

CLOSE = 1e-3
WITH_RING = [name for name in formats.own_names() if formats.parse(name).has_ring]
names, dims, seeds = st.sampled_from(WITH_RING), st.sampled_from(DIMS), st.integers(0, 2**31)


def gpu(s: Sequences, cut: tuple[int, int, int] = (16, 2, 2), softcap: float = 0.0) -> GpuPages:
    """Return pages for the GPU's kernels over the same memory; `cut` is (tile, stages, wave)."""
    shape = Shape(s.fmt, s.dim, s.kv_heads, s.ratio, s.block_size, CPU, softcap, recent=s.recent)
    shape.ring_blocks = s.ring_table.shape[1]
    return GpuPages(s.cache, launch_as(shape, *cut), s.factors, ring=s.cache)


def attend(s: Sequences, at: GpuPages, query: torch.Tensor) -> torch.Tensor:
    """Return attention of one query per sequence."""
    return decode_rows(at, s.table, s.lengths, None, query, s.scale, s.ring_table)


def assert_right(s: Sequences, at: GpuPages) -> None:
    query = s.queries()
    out = attend(s, at, query)
    for i, n in enumerate(s.lengths):
        wanted = s.wanted(query[i], i, n)
        assert_within_rounding(out[i], wanted, query[i], *s.read_back(i, n), s.factors, s.scale)


@settings(max_examples=12)
@given(names, st.sampled_from([64, 256]), st.sampled_from([16, 48, 64]), st.integers(1, 60), st.integers(1, 40), seeds)
def test_store_writes_ring_rows_like_the_cpu_and_changes_no_other_byte(
    name: str, dim: int, block_size: int, recent: int, tokens: int, seed: int
) -> None:
    s = Sequences(name, dim, [tokens], recent, seed, block_size=block_size)
    # Whole numbers, and a power of 2 as the square root of D, make the rotation exact in any order.
    key, value = (torch.randint(-100, 101, (tokens, 2, dim), generator=s.rng).float() * 0.25 for _ in "kv")
    key, value = (x * decided(x @ rotation(dim), side.bits, 64)[..., None]
                  for x, side in ((key, s.fmt.key), (value, s.fmt.value)))  # fmt: skip
    theirs = s.cache.clone()
    s.cpu.store(key, value, s.slots(0, 0, tokens), s.ring_slots(0, 0, tokens))
    ours, s.cache = s.cache, theirs
    at = gpu(s)
    query = torch.zeros(tokens, 4, dim)
    at.store(query, key, value, s.slots(0, 0, tokens), Plan(at.shape, 1), 0, 1.0, s.ring_slots(0, 0, tokens))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dim", formats.HEAD_DIMS)
@pytest.mark.parametrize("name", WITH_RING)
def test_decode_with_a_window_equals_the_reference_in_every_format_at_every_head_dim(name: str, dim: int) -> None:
    s = Sequences(name, dim, [41, 7], 20, seed=1, ratio=3)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    assert_right(s, gpu(s))


@pytest.mark.parametrize(("name", "layout"), zip(("k8v4", "k2v2"), BLOCK_OUTERMOST, strict=True))
def test_rings_interleaved_with_other_layers_work_and_change_no_byte_of_them(name: str, layout: str) -> None:
    s = Sequences(name, 64, [70, 33], 20, seed=5)
    query, empty = s.queries(), s.cache

    def by_gpu(cache: torch.Tensor) -> list[torch.Tensor]:
        s.cache = cache
        at = gpu(s)
        for i, n in enumerate(s.lengths):
            at.store(torch.zeros(n, 4, 64), s.keys[i], s.values[i], s.slots(i, 0, n), Plan(at.shape, 1), 0, 1.0,
                     s.ring_slots(i, 0, n), ordinals(0, n))  # fmt: skip
        return [cache, attend(s, at, query)]

    def by_cpu(cache: torch.Tensor) -> list[torch.Tensor]:
        s.cpu = PackedPages(cache, s.fmt, s.dim, s.factors, ring=cache, recent=s.recent)
        for i, n in enumerate(s.lengths):
            s.store(i, 0, n)
        return [cache, s.decode(query)]

    for sees in (by_gpu, by_cpu):
        layers = among_layers(empty, layout)
        for mine, alone in zip(sees(layers[MINE]), sees(empty.clone()), strict=True):
            assert torch.equal(mine, alone)
        assert all((layers[other] == 0x55).all() for other in OTHERS)


@settings(max_examples=12)
@given(
    names, st.sampled_from([64, 128]), st.lists(st.integers(1, 140), min_size=1, max_size=3), st.integers(1, 80),
    st.integers(0, 60), st.sampled_from([1, 4, 9]), st.sampled_from([(16, 16), (48, 16), (64, 32), (64, 64)]),
    st.integers(2, 4), st.integers(1, 4), st.booleans(), seeds,
)  # fmt: skip
def test_stale_rings_and_prefix_hits_equal_the_reference_for_every_division_into_splits(
    name: str, dim: int, lengths: list[int], recent: int, hit: int, ratio: int, cut: tuple[int, int], stages: int,
    wave: int, calibrated: bool, seed: int,
) -> None:  # fmt: skip
    s = Sequences(name, dim, lengths, recent, seed, ratio=ratio, block_size=cut[0], calibrated=calibrated)
    s.poison_rings()
    for i, n in enumerate(lengths):
        start = min(hit, n - 1)
        s.store(i, 0, start, ring=False)
        s.store(i, start, n)
    assert_right(s, gpu(s, (cut[1], stages, wave)))


@pytest.mark.parametrize("name", [n for n in formats.own_names() if formats.parse(n).window])
def test_the_default_window_of_each_format_is_read_in_all_its_pages(name: str) -> None:
    recent = formats.parse(name).window
    s = Sequences(name, 64, [recent + 70, recent - 3], recent, seed=9, block_size=64)
    s.poison_rings()
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    assert_right(s, gpu(s, (64, 2, 3)))


def test_soft_caps_work_with_a_recent_window() -> None:
    s = Sequences("k4v4", 64, [90, 33], 40, seed=6)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    query = s.queries() * 3
    out = attend(s, gpu(s, softcap=5.0), query)
    lens = torch.tensor(s.lengths)
    wanted = s.cpu.decode(query, s.table, lens, s.scale, 5.0, ring_table=s.ring_table)
    assert ((out - wanted).norm(dim=-1) < CLOSE * wanted.norm(dim=-1)).all()


def test_no_byte_of_a_ring_is_read_before_the_step_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode start while `store` still runs. The newest rows are missing until decode has waited for `store`."""
    s = Sequences("k4v4", 64, [70, 33], 32, seed=7)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n - 1)
    before = s.cache.clone()
    for i, n in enumerate(s.lengths):
        s.store(i, n - 1, n)
    after, at, query = s.cache.clone(), gpu(s, (16, 3, 8)), s.queries()
    wanted = attend(s, at, query)
    eager = EagerKernel(decode, "decode_kernel", lambda: s.cache.copy_(before), lambda: s.cache.copy_(after))

    class Overlapping:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *a, **k: eager[grid](*a, **{**k, "C": replace(k["C"], overlap=True)})

    monkeypatch.setattr(pages, "decode_kernel", Overlapping())
    assert torch.equal(attend(s, at, query), wanted)


def test_wrong_arguments_for_a_window_are_refused_before_a_launch() -> None:
    s = Sequences("k4v4", 64, [20], 16, seed=8)
    at, before = gpu(s), s.cache.clone()
    x, slots, plan = torch.zeros(2, 2, 64), torch.arange(2), Plan(gpu(s).shape, 1)
    lens, out = torch.ones(1, dtype=torch.int32), torch.zeros(1, 4, 64)
    query = torch.zeros(2, 4, 64)
    for bad in (None, slots.int(), slots[:1]):
        with pytest.raises(BadInputError, match=r"^ring_slots are"):
            at.store(query, x, x, slots, plan, 0, 1.0, bad)
    for table in (None, s.ring_table.long(), s.ring_table[:, :0], s.ring_table[:0]):
        with pytest.raises(BadInputError, match=r"^ring_table is"):
            at.decode(s.table, lens, plan, out, table)
    with pytest.raises(BadInputError, match=r"^recent is 16 without a ring"):
        GpuPages(s.cache, at.shape, s.factors)
    with pytest.raises(BadInputError, match=r"^ring is"):
        GpuPages(s.cache, at.shape, s.factors, ring=s.cache[:, :1])
    with pytest.raises(formats.FormatError, match="'int8'"):
        Shape(formats.parse("int8"), 64, 2, 2, 16, CPU, recent=16)
    assert torch.equal(s.cache, before)
