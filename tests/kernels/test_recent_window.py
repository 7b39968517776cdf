"""Recent window on a CPU: the layout of residual pages, and their effect on the tokens of their blocks alone."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recent import Sequences

from kvpilot_formats import formats
from kvpilot_formats.formats import FormatError
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import decode_reference, round_trip
from kvpilot_kernels.reference.quantize import decode, encode, scale_and_zero, view_region
from kvpilot_kernels.reference.residual import decode_residual, encode_residual, pack_digits, unpack_digits
from kvpilot_kernels.residuals import Residuals
from support.gpu_batch import DIMS, generator, poisoned

WITH_RESIDUALS = [name for name in formats.own_names() if formats.parse(name).has_residuals]
names, dims, seeds = st.sampled_from(WITH_RESIDUALS), st.sampled_from(DIMS), st.integers(0, 2**31)
rows = st.sampled_from(formats.HEAD_DIMS)
block_sizes = st.sampled_from([16, 32, 48, 64, 128])


@given(names, dims, block_sizes)
def test_a_block_has_as_few_residual_pages_as_hold_all_its_tokens(name: str, dim: int, size: int) -> None:
    fmt = formats.parse(name)
    layout, page, n = fmt.residual_layout(dim, size), fmt.page_layout(dim, size), fmt.residual_pages(dim, size)
    end = 0
    for region in (layout.key_digits, layout.value_digits, layout.meta):
        assert region.offset == end
        assert region.offset % 8 == 0
        end += region.rows * region.row_bytes
    assert end == layout.size <= page.size
    row = layout.size // layout.tokens
    assert (n - 1) * layout.tokens < size <= n * layout.tokens
    assert n == 1 or (n - 1) * (page.size // row) < size


@given(names, st.integers(1, 600), block_sizes, st.integers(1, 2000))
def test_the_newest_blocks_always_have_the_whole_window(name: str, recent: int, size: int, length: int) -> None:
    blocks = formats.parse(name).recent_blocks(recent, size)
    assert (-(-length // size) - blocks) * size <= max(0, length - recent)
    assert formats.parse(name).recent_blocks(0, size) == 0


@given(names, dims, st.sampled_from(formats.RECENT_CHOICES), block_sizes)
def test_a_window_takes_the_residual_pages_of_its_blocks(name: str, dim: int, recent: int, size: int) -> None:
    fmt = formats.parse(name)
    assert fmt.recent_pages(recent, dim, size) == fmt.recent_blocks(recent, size) * fmt.residual_pages(dim, size)


@pytest.mark.parametrize(("name", "pages"), [("int8", 0), ("k8v4", 1), ("k4v4", 1), ("k4v2", 2), ("k2v2", 3)])
def test_all_layers_can_share_a_map_because_its_columns_do_not_depend_on_head_dim(name: str, pages: int) -> None:
    fmt = formats.parse(name)
    for size in range(16, 1025, 16):
        assert {fmt.residual_pages(dim, size) for dim in DIMS} == {4 if (name, size) == ("k2v2", 16) else pages}


@given(names, st.integers(0, 1024))
def test_only_a_default_window_is_cut_to_fit_the_context(name: str, context: int) -> None:
    fmt = formats.parse(name)
    cut = fmt.recent_tokens(context=context)
    assert cut in formats.RECENT_CHOICES and cut <= min(context, fmt.window)
    assert not any(cut < choice <= min(context, fmt.window) for choice in formats.RECENT_CHOICES)
    assert all(fmt.recent_tokens(choice, context) == choice for choice in formats.RECENT_CHOICES)


def test_a_format_of_8_bits_has_no_residuals_and_a_negative_window_is_refused() -> None:
    int8 = formats.parse("int8")
    assert not int8.has_residuals and int8.recent_pages(64, 128, 64) == int8.residual_pages(128, 64) == 0
    with pytest.raises(FormatError, match="'int8' stores every token in 8 bits: set recentTokens to 0"):
        int8.residual_layout(128, 64)
    with pytest.raises(FormatError, match="recentTokens -1 "):
        formats.parse("k4v4").recent_blocks(-1, 64)


@given(st.sampled_from([2, 4]), rows, seeds, st.floats(1e-3, 1e3))
def test_a_code_with_its_residual_is_about_as_exact_as_8_bits(bits: int, dim: int, seed: int, size: float) -> None:
    x = torch.randn(200, dim, generator=generator(seed)) * size
    group = formats.parse("k4v4").group_size(dim)
    codes, meta = encode(x, bits, group)
    fine = decode(codes, meta, bits) + decode_residual(*encode_residual(x, codes, meta, bits), meta, bits)
    whole = decode(*encode(x, 8, group), 8)
    assert (fine - x).square().mean() < (5 if bits == 2 else 2) * (whole - x).square().mean()


@given(st.sampled_from([2, 4]), rows, seeds)
def test_unpacking_restores_the_packed_digits(bits: int, dim: int, seed: int) -> None:
    r = torch.randint(0, 1 << 8 - bits, (3, dim), dtype=torch.uint8, generator=generator(seed))
    digits = pack_digits(r, bits)
    assert digits.shape == (3, 8 // bits - 1, dim * bits // 8)
    assert torch.equal(unpack_digits(digits, bits), r)


def test_a_digit_is_packed_like_a_code_and_the_highest_comes_first() -> None:
    r = torch.arange(64, dtype=torch.uint8)[None]
    assert pack_digits(r, 2)[0, :, 5].tolist() == [
        sum((e >> shift & 3) << 2 * i for i, e in enumerate((5, 21, 37, 53))) for shift in (4, 2, 0)
    ]


@given(names, dims, block_sizes, st.data())
def test_a_token_writes_only_its_own_row_of_its_own_residual_page(
    name: str, dim: int, size: int, data: st.DataObject
) -> None:
    fmt, place = formats.parse(name), data.draw(st.integers(0, size - 1))
    layout, n = fmt.residual_layout(dim, size), fmt.residual_pages(dim, size)
    cache, pages = poisoned(3 + n, 1, size, fmt, dim), torch.zeros(3 + n, n, dtype=torch.int32)
    pages[1] = torch.arange(3, 3 + n)
    packed = PackedPages(cache, fmt, dim, residuals=Residuals(pages, torch.ones(1, dtype=torch.int32)))
    key, value = torch.randn(2, 1, 1, dim, generator=generator(place))
    packed.store(key, value, torch.tensor([size + place]))
    assert (cache[[0, 2]] == 255).all()
    row = place % layout.tokens
    for page in range(n):
        written = cache[3 + page].flatten().clone()
        if page == place // layout.tokens:
            for region, side in ((layout.key_digits, fmt.key), (layout.value_digits, fmt.value)):
                if side.digits:
                    digits = view_region(written, region).view(-1, layout.tokens, region.row_bytes)[:, row]
                    assert (digits != 255).any()
                    digits.fill_(255)
            exponents = view_region(written, layout.meta).view(torch.int16)[:, row]
            assert set(exponents.tolist()) <= ({-1, 0, 1, 2} if fmt.key.bits == 8 else {0, 1, 2})
            exponents.fill_(-1)
        assert (written == 255).all()
    packed.store(key, value, torch.tensor([2 * size + place]))
    assert torch.equal(cache[2], cache[1])
    assert (cache[0] == 255).all()


@settings(max_examples=40)
@given(names, dims, st.lists(st.integers(1, 90), min_size=1, max_size=3), st.sampled_from([0, 1, 2, 3, 99]),
       block_sizes, st.booleans(), st.sampled_from([0.0, 0.6, 1.0]), seeds)  # fmt: skip
def test_decode_refines_the_newest_blocks_that_have_residual_pages(
    name: str, dim: int, lengths: list[int], newest: int, block_size: int, calibrated: bool, mapped: float, seed: int
) -> None:
    s = Sequences(name, dim, lengths, newest, seed, block_size=block_size, calibrated=calibrated, mapped=mapped)
    for i, n in enumerate(lengths):
        s.store(i, 0, n)
    s.assert_decode_equals_the_reference()
    s.assert_decode_equals_the_reference(order=list(reversed(range(len(lengths)))))


@settings(max_examples=20)
@given(names, st.sampled_from([16, 32, 64, 128]), seeds)
def test_a_block_that_gets_another_blocks_residual_pages_reads_only_its_own_residuals(
    name: str, block_size: int, seed: int
) -> None:
    s = Sequences(name, 64, [2 * block_size + 5, 3 * block_size], 3, seed, block_size=block_size, mapped=0.0)
    for block in range(3):
        s.claim(0, block)
    s.store(0, 0, s.lengths[0])
    s.store(1, 0, block_size)  # The first block of the other sequence is a prefix hit, so it has no residuals.
    for block in (0, 2):
        s.give_up(0, block)
    for block in (1, 2):
        s.claim(1, block)
    for begin in range(block_size, s.lengths[1], 17):
        s.store(1, begin, min(begin + 17, s.lengths[1]))
    assert [f.sum() for f in s.fine] == [block_size, 2 * block_size]
    s.assert_decode_equals_the_reference()


@settings(max_examples=20)
@given(names, st.integers(6, 90), st.integers(1, 6), st.sampled_from([0, 1, 2, 99]), seeds)
def test_all_rows_of_a_sequence_with_drafts_refine_the_same_blocks(
    name: str, length: int, count: int, newest: int, seed: int
) -> None:
    s = Sequences(name, 64, [length, 20], newest, seed)
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    rows = list(range(length - count + 1, length + 1))
    s.assert_decode_equals_the_reference([0] * count + [1], [*rows, 20], [length] * count + [20])


@pytest.mark.parametrize("name", WITH_RESIDUALS)
def test_a_sequence_that_grows_refines_its_newest_blocks_at_every_length(name: str) -> None:
    s = Sequences(name, 64, [120], 2, seed=2)
    s.store(0, 0, 40)
    for n in range(41, 121):
        s.store(0, n - 1, n)
        if n % 16 in (0, 1, 7):
            s.assert_decode_equals_the_reference(lengths=[n])


def test_a_later_step_can_refine_more_blocks() -> None:
    s = Sequences("k4v2", 64, [70], 0, seed=3)
    s.store(0, 0, 70)
    query, answers = s.queries(), []
    for newest in (0, 1, 3, 9):
        s.residuals.newest.fill_(newest)
        s.assert_decode_equals_the_reference()
        answers.append(s.decode(query))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(answers))


def test_a_nan_with_a_residual_changes_no_other_sequence() -> None:
    s = Sequences("k4v2", 96, [40, 20], 2, seed=4)
    s.keys[0][39] = torch.nan
    for i, n in enumerate(s.lengths):
        s.store(i, 0, n)
    out = s.decode(s.queries())
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_attention_in_4_bits_is_more_accurate_with_a_recent_window() -> None:
    """Attention prefers recent tokens, as in language models, so the window reduces the error by a large factor."""
    rng, fmt = generator(5), formats.parse("k4v4")
    key, value, query = (torch.randn(200, h, 128, generator=rng) for h in (1, 1, 1))
    query = query[:1] + key[-20:].mean(0, keepdim=True) * 8
    exact = decode_reference(query[0], key, value, formats.parse("int8"), 0.09)
    plain = decode_reference(query[0], key, value, fmt, 0.09)
    fine = decode_reference(query[0], key, value, fmt, 0.09, fine=torch.arange(200) >= 136)
    assert (fine - exact).norm() < 0.3 * (plain - exact).norm()
    assert (round_trip(key, fmt, "key", recent=True) - key).norm() < 0.15 * (round_trip(key, fmt, "key") - key).norm()


X = torch.randn(2, 2, 64)


def store(pages: torch.Tensor, newest: torch.Tensor | None = None) -> None:
    """Store two tokens and read them, in a cache of three blocks."""
    residuals = Residuals(pages, ONE if newest is None else newest)
    packed = PackedPages(CACHE, formats.parse("k4v2"), 64, residuals=residuals)
    packed.store(X, X, torch.arange(16, 18))
    packed.decode(X[:1], torch.tensor([[1]]), torch.tensor([2]), 1.0)


def decode_rows(ends: torch.Tensor) -> torch.Tensor:
    """Decode two rows whose sequences have these numbers of stored tokens."""
    table, lens = torch.tensor([[1], [1]]), torch.tensor([2, 1])
    return PackedPages(CACHE, formats.parse("k4v2"), 64).decode(X, table, lens, 1.0, newest_ends=ends)


CACHE = poisoned(3, 2, 16, formats.parse("k4v2"), 64)
MAP, ONE = torch.zeros(3, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
BAD: dict[str, tuple[str, Callable[[], object]]] = {
    "a map for fewer blocks": ("residuals.pages", lambda: store(MAP[:2])),
    "a map of too few pages a block": ("residuals.pages", lambda: store(MAP[:, :1])),
    "a map of int64": ("residuals.pages", lambda: store(MAP.long())),
    "a map that is not contiguous": ("residuals.pages", lambda: store(MAP.T.contiguous().T)),
    "a map on another device": ("residuals.pages", lambda: store(MAP.to("meta"))),
    "a page beyond the cache": ("residuals.pages", lambda: store(MAP + 3)),
    "a negative page": ("residuals.pages", lambda: store(MAP - 1)),
    "two numbers of newest blocks": ("residuals.newest", lambda: store(MAP, ONE.repeat(2))),
    "newest blocks of int64": ("residuals.newest", lambda: store(MAP, ONE.long())),
    "newest blocks on another device": ("residuals.newest", lambda: store(MAP, ONE.to("meta"))),
    "a map for a format of 8 bits": ("residuals", lambda: PackedPages(
        poisoned(3, 2, 16, formats.parse("int8"), 64), formats.parse("int8"), 64,
        residuals=Residuals(MAP, ONE))),
    "too few ends": ("newest_ends", lambda: decode_rows(torch.tensor([2]))),
    "ends of floats": ("newest_ends", lambda: decode_rows(torch.tensor([2.0, 1.0]))),
    "an end before a row's last token": ("newest_ends", lambda: decode_rows(torch.tensor([1, 1]))),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_residual_pages_that_do_not_fit_are_refused_and_nothing_is_written(what: str) -> None:
    field, call = BAD[what]
    CACHE.fill_(255)
    with pytest.raises(BadInputError, match=f"^{field} .*; .+") as caught:
        call()
    assert caught.value.field == field
    assert (CACHE == 255).all()


def test_a_map_that_has_become_wrong_is_refused() -> None:
    s = Sequences("k4v4", 64, [5], -1, seed=1)
    s.store(0, 0, 5)
    with pytest.raises(BadInputError, match=r"^residuals\.newest is -1 blocks; give 0 for none, or a positive number"):
        s.decode(s.queries())
    s.residuals.newest.fill_(1)
    s.residuals.pages[s.table[0, 0]] = 7
    with pytest.raises(BadInputError, match=r"^residuals\.pages names block 7; the cache has blocks 0 to 2; give 0"):
        s.decode(s.queries())


def test_the_steps_of_residuals_depend_only_on_the_scale() -> None:
    codes, meta = encode(torch.zeros(2, 64), 4, 64)
    assert not scale_and_zero(meta, 4)[0].any()
    assert not decode_residual(*encode_residual(torch.zeros(2, 64), codes, meta, 4), meta, 4).any()
