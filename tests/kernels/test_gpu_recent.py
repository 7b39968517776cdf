"""Recent window in the GPU kernels: residual pages have the CPU code's bytes, and decode reads them by the map."""

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
    MINE,
    OTHERS,
    among_layers,
    decode_rows,
    launch_as,
    ordinals,
)  # fmt: skip

CLOSE = 1e-3
WITH_RESIDUALS = [name for name in formats.own_names() if formats.parse(name).has_residuals]
names, seeds = st.sampled_from(WITH_RESIDUALS), st.integers(0, 2**31)


def gpu(s: Sequences, cut: tuple[int, int, int] = (16, 2, 2), softcap: float = 0.0) -> GpuPages:
    """Return pages for the GPU's kernels over the same memory; `cut` is (tile, stages, wave)."""
    count = s.residuals.pages.shape[1]
    shape = Shape(s.fmt, s.dim, s.kv_heads, s.ratio, s.block_size, CPU, softcap, count)
    return GpuPages(s.cache, launch_as(shape, *cut), s.factors, s.residuals)


def attend(s: Sequences, at: GpuPages, query: torch.Tensor) -> torch.Tensor:
    """Return attention of one query per sequence."""
    return decode_rows(at, s.table, s.lengths, None, query, s.scale)


def assert_right(s: Sequences, at: GpuPages) -> None:
    query = s.queries()
    out = attend(s, at, query)
    for i, n in enumerate(s.lengths):
        wanted = s.wanted(query[i], i, n)
        assert_within_rounding(out[i], wanted, query[i], *s.read_back(i, n), s.factors, s.scale)


@settings(max_examples=12)
@given(names, st.sampled_from([64, 256]), st.sampled_from([16, 48, 64]), st.integers(1, 90),
       st.sampled_from([0.0, 0.5, 1.0]), seeds)  # fmt: skip
def test_store_writes_residuals_like_the_cpu_and_changes_no_other_byte(
    name: str, dim: int, block_size: int, tokens: int, mapped: float, seed: int
) -> None:
    s = Sequences(name, dim, [tokens], 1, seed, block_size=block_size, mapped=mapped)
    # Whole numbers, and a power of 2 as the square root of D, make the rotation exact in any order.
    key, value = (torch.randint(-100, 101, (tokens, 2, dim), generator=s.rng).float() * 0.25 for _ in "kv")
    key, value = (x * decided(x @ rotation(dim), side.bits, 64)[..., None]
                  for x, side in ((key, s.fmt.key), (value, s.fmt.value)))  # fmt: skip
    slots = torch.where(torch.rand(tokens, generator=s.rng) < 0.2, -1, s.slots(0, 0, tokens))
    theirs = s.cache.clone()
    s.cpu.store(key, value, slots)
    ours, s.cache = s.cache, theirs
    at = gpu(s)
    at.store(torch.zeros(tokens, 4, dim), key, value, slots, Plan(at.shape, 1), 0, 1.0)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dim", formats.HEAD_DIMS)
@pytest.mark.parametrize("name", WITH_RESIDUALS)
def test_decode_with_a_window_equals_the_reference_in_every_format_at_every_head_dim(name: str, dim: int) -> None:
    s = Sequences(name, dim, [41, 7], 2, seed=1, ratio=3)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    assert_right(s, gpu(s))


@pytest.mark.parametrize(("name", "layout"), zip(("k8v4", "k2v2"), BLOCK_OUTERMOST, strict=True))
def test_residual_pages_interleaved_with_other_layers_work_and_change_no_byte_of_them(name: str, layout: str) -> None:
    s = Sequences(name, 64, [70, 33], 2, seed=5)
    query, empty = s.queries(), s.cache

    def by_gpu(cache: torch.Tensor) -> list[torch.Tensor]:
        s.cache = cache
        at = gpu(s)
        for i, n in enumerate(s.lengths):
            at.store(torch.zeros(n, 4, 64), s.keys[i], s.values[i], s.slots(i, 0, n), Plan(at.shape, 1), 0, 1.0,
                     ordinals(0, n))  # fmt: skip
        return [cache, attend(s, at, query)]

    def by_cpu(cache: torch.Tensor) -> list[torch.Tensor]:
        s.cpu = PackedPages(cache, s.fmt, s.dim, s.factors, s.residuals)
        for i, n in enumerate(s.lengths):
            s.store(i, 0, n)
        return [cache, s.decode(query)]

    for sees in (by_gpu, by_cpu):
        layers = among_layers(empty, layout)
        for mine, alone in zip(sees(layers[MINE]), sees(empty.clone()), strict=True):
            assert torch.equal(mine, alone)
        assert all((layers[other] == 0x55).all() for other in OTHERS)


@settings(max_examples=16)
@given(
    names, st.sampled_from([64, 96, 128, 256, 512]), st.lists(st.integers(1, 140), min_size=1, max_size=3),
    st.sampled_from([0, 1, 2, 3, 99]), st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from([1, 4, 9]),
    st.sampled_from([(16, 16), (48, 16), (64, 32), (64, 64)]), st.integers(2, 4), st.integers(1, 4), st.booleans(),
    seeds,
)  # fmt: skip
def test_blocks_with_and_without_residual_pages_equal_the_reference_for_every_division_into_splits(
    name: str, dim: int, lengths: list[int], newest: int, mapped: float, ratio: int, cut: tuple[int, int], stages: int,
    wave: int, calibrated: bool, seed: int,
) -> None:  # fmt: skip
    s = Sequences(name, dim, lengths, newest, seed, 2, ratio, cut[0], calibrated, mapped)
    for i, n in enumerate(lengths):
        s.store(i, 0, n)
    at = gpu(s, (cut[1], stages, wave))
    assert_right(s, at)
    # Without compiling again, read the same pages with another number of newest blocks.
    s.residuals.newest.fill_(int(torch.randint(4, (1,), generator=s.rng)))
    assert_right(s, at)


@settings(max_examples=10)
@given(names, st.sampled_from([64, 256]), st.sampled_from([(16, 16), (64, 32)]), st.integers(1, 5), seeds)
def test_residual_pages_that_another_block_had_equal_the_reference(
    name: str, dim: int, cut: tuple[int, int], wave: int, seed: int
) -> None:
    s = Sequences(name, dim, [2 * cut[0], 3 * cut[0] - 5], 2, seed, block_size=cut[0])
    s.store(0, 0, s.lengths[0])
    s.store(1, 0, s.lengths[1])
    for sequence, block in ((0, 0), (1, 1)):
        s.give_up(sequence, block)
    s.claim(0, 0)
    s.claim(1, 1)
    s.store(0, 0, s.lengths[0] - 1)
    s.store(1, cut[0], s.lengths[1])
    s.store(0, s.lengths[0] - 1, s.lengths[0])
    assert_right(s, gpu(s, (cut[1], 2, wave)))


@pytest.mark.parametrize("name", [n for n in formats.own_names() if formats.parse(n).window])
def test_the_default_window_of_each_format_is_read_in_all_its_pages(name: str) -> None:
    fmt = formats.parse(name)
    newest = fmt.recent_blocks(fmt.window, 64)
    s = Sequences(name, 64, [fmt.window + 134, fmt.window - 3], newest, seed=9, block_size=64)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    assert_right(s, gpu(s, (64, 2, 3)))


def test_soft_caps_work_with_a_recent_window() -> None:
    s = Sequences("k4v4", 64, [90, 33], 3, seed=6)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    query = s.queries() * 3
    out = attend(s, gpu(s, softcap=5.0), query)
    wanted = s.cpu.decode(query, s.table, torch.tensor(s.lengths), s.scale, 5.0)
    assert ((out - wanted).norm(dim=-1) < CLOSE * wanted.norm(dim=-1)).all()


@pytest.mark.parametrize("name", ["k4v4", "k2v2"])
def test_no_residual_is_read_before_the_step_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode start while `store` still runs. The newest rows are missing until decode has waited for `store`."""
    s = Sequences(name, 64, [70, 33], 3, seed=7)
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
    s = Sequences("k4v4", 64, [20], 1, seed=8)
    shape, found = gpu(s).shape, s.residuals
    with pytest.raises(BadInputError, match=r"^residuals is missing"):
        GpuPages(s.cache, shape, s.factors)
    with pytest.raises(BadInputError, match=r"^residuals is given"):
        GpuPages(s.cache, Shape(s.fmt, 64, 2, 2, 16, CPU), s.factors, found)
    for pages_ in (found.pages.long(), found.pages[1:], found.pages.expand(-1, 2)):
        with pytest.raises(BadInputError, match=r"^residuals\.pages is"):
            GpuPages(s.cache, shape, s.factors, found._replace(pages=pages_))
    with pytest.raises(BadInputError, match=r"^residuals\.newest is"):
        GpuPages(s.cache, shape, s.factors, found._replace(newest=torch.tensor([1])))
    with pytest.raises(BadInputError, match=r"^residuals is 2; k4v4 has 1 "):
        Shape(s.fmt, 64, 2, 2, 16, CPU, residuals=2)
    with pytest.raises(BadInputError, match=r"^residuals is 1; int8 has 0 "):
        Shape(formats.parse("int8"), 64, 2, 2, 16, CPU, residuals=1)
