"""Recent window on a CPU: the ring's layout and effect. Other tokens stay unchanged."""

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
from kvpilot_kernels.reference.quantize import decode, encode, pack, scale_and_zero
from kvpilot_kernels.reference.residual import (
    decode_residual,
    encode_residual,
    pack_digits,
    ring_meta,
    split_ring_meta,
    tags,
    unpack_digits,
)
from kvpilot_kernels.ring import ring_slots
from support.gpu_batch import DIMS, generator

WITH_RING = [name for name in formats.own_names() if formats.parse(name).has_ring]
names, dims, seeds = st.sampled_from(WITH_RING), st.sampled_from(DIMS), st.integers(0, 2**31)
rows = st.sampled_from(formats.HEAD_DIMS)
block_sizes = st.sampled_from([16, 32, 48, 64, 128])


@given(names, dims, block_sizes)
def test_a_ring_page_has_the_size_of_a_page_and_is_full(name: str, dim: int, size: int) -> None:
    fmt = formats.parse(name)
    ring, page = fmt.ring_layout(dim, size), fmt.page_layout(dim, size)
    end = 0
    for region in (ring.key_digits, ring.value_digits, ring.meta):
        assert region.offset == end
        assert region.offset % 8 == 0
        end += region.rows * region.row_bytes
    assert end == ring.size <= page.size < ring.size // ring.tokens * (ring.tokens + 1)


@given(names, dims, block_sizes, st.integers(0, 600))
def test_a_window_takes_the_smallest_sufficient_number_of_pages(name: str, dim: int, size: int, recent: int) -> None:
    fmt = formats.parse(name)
    blocks, tokens = fmt.ring_blocks(recent, dim, size), fmt.ring_layout(dim, size).tokens
    assert (blocks - 1) * tokens < recent <= blocks * tokens or recent == blocks == 0


@given(names, st.integers(0, 1024))
def test_only_a_default_window_is_cut_to_fit_the_context(name: str, context: int) -> None:
    fmt = formats.parse(name)
    cut = fmt.recent_tokens(context=context)
    assert cut in formats.RECENT_CHOICES and cut <= min(context, fmt.window)
    assert not any(cut < choice <= min(context, fmt.window) for choice in formats.RECENT_CHOICES)
    assert all(fmt.recent_tokens(choice, context) == choice for choice in formats.RECENT_CHOICES)


def test_a_format_of_8_bits_has_no_ring_and_a_negative_window_is_refused() -> None:
    int8 = formats.parse("int8")
    assert not int8.has_ring and int8.ring_blocks(64, 128, 64) == 0
    with pytest.raises(FormatError, match="'int8' stores every token in 8 bits: set recentTokens to 0"):
        int8.ring_layout(128, 64)
    with pytest.raises(FormatError, match="recentTokens -1 "):
        formats.parse("k4v4").ring_blocks(-1, 128, 64)


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


def test_the_bytes_of_a_ring_row_match_the_layout() -> None:
    """Compute the bytes by hand, from the formulas in `layouts`."""
    packed = torch.tensor([[1, 2, 9, 9, 255, 3, 9, 9]], dtype=torch.uint8)
    meta = torch.tensor([[-2, 7]], dtype=torch.int16)
    parts = [
        (0x9E3779B1 * u + 0x85EBCA77 * w) % 2**32 >> 18 for u, w in ((0x0201, 0xFFFE), (0x03FF, 7))
    ]  # fmt: skip
    assert tags(packed, meta).tolist() == [parts]
    written = ring_meta(tags(packed, meta), torch.tensor([[2, 1]]))
    assert [w % 2**16 for w in written[0].tolist()] == [parts[0] << 2 | 2, parts[1] << 2 | 1]
    r = torch.arange(64, dtype=torch.uint8)[None]
    assert pack_digits(r, 2)[0, :, 5].tolist() == [
        sum((e >> shift & 3) << 2 * i for i, e in enumerate((5, 21, 37, 53))) for shift in (4, 2, 0)
    ]


@given(st.sampled_from([2, 4, 8]), rows, seeds)
def test_ring_rows_of_another_token_have_other_tags(bits: int, dim: int, seed: int) -> None:
    rng, group = generator(seed), formats.parse("k4v4").group_size(dim)
    codes, meta = encode(torch.randn(301, dim, generator=rng), bits, group)
    known = tags(pack(codes, bits), meta)
    ours = ring_meta(known, torch.zeros_like(known))
    assert split_ring_meta(ours, known)[1].all()
    assert split_ring_meta(ours[:1].expand(300, -1), known[1:])[1].float().mean() < 0.02
    same_codes = tags(pack(codes, bits), meta ^ torch.randint(1, 2**15, meta.shape, dtype=torch.int16, generator=rng))
    assert split_ring_meta(ours, same_codes)[1].float().mean() < 0.02


def test_stale_ring_rows_pass_the_tag_check_no_more_often_than_its_bits_allow() -> None:
    """Compare 4 million pairs of rows. By tags of 14 bits, about 240 match in keys, 240 in values, and none in both."""
    rng = generator(11)
    sides = []
    for _ in "kv":
        codes, meta = encode(torch.randn(2000, 64, generator=rng), 4, 64)
        known = tags(pack(codes, 4), meta)
        found = ring_meta(known, torch.zeros_like(known))
        sides.append(split_ring_meta(found[:, None].expand(-1, 2000, -1), known[None].expand(2000, -1, -1))[1])
        assert 120 < int(sides[-1].sum()) - 2000 < 480
    assert int((sides[0] & sides[1]).sum()) == 2000


@settings(max_examples=40)
@given(names, dims, st.lists(st.integers(1, 90), min_size=1, max_size=3), st.integers(1, 80), block_sizes,
       st.booleans(), seeds)  # fmt: skip
def test_decode_refines_only_the_last_tokens_by_the_ring(
    name: str, dim: int, lengths: list[int], recent: int, block_size: int, calibrated: bool, seed: int
) -> None:
    s = Sequences(name, dim, lengths, recent, seed, block_size=block_size, calibrated=calibrated)
    for i, n in enumerate(lengths):
        s.store(i, 0, n)
    s.assert_decode_equals_the_reference()


@settings(max_examples=20)
@given(names, st.lists(st.integers(2, 90), min_size=2, max_size=3), st.integers(1, 70), st.integers(0, 60), seeds)
def test_tokens_of_a_prefix_hit_are_read_from_pages_whatever_the_ring_held(
    name: str, lengths: list[int], recent: int, hit: int, seed: int
) -> None:
    """Ring blocks first hold another sequence's rows at the same positions, and then the correct ones."""
    s = Sequences(name, 64, lengths, recent, seed)
    s.poison_rings()
    for i, n in enumerate(lengths):
        start = min(hit, n - 1)
        s.store(i, 0, start, ring=False)
        for begin in range(start, n, 17):
            s.store(i, begin, min(begin + 17, n))
    s.assert_decode_equals_the_reference()
    s.assert_decode_equals_the_reference(order=list(reversed(range(len(lengths)))))


@pytest.mark.parametrize("name", WITH_RING)
def test_a_sequence_that_grows_overwrites_its_oldest_rows(name: str) -> None:
    s = Sequences(name, 64, [120], 33, seed=2)
    s.store(0, 0, 40)
    for n in range(41, 121):
        s.store(0, n - 1, n)
        if n % 13 == 0:
            s.assert_decode_equals_the_reference(lengths=[n])


def test_a_sequence_without_a_ring_block_is_read_from_pages_alone() -> None:
    s = Sequences("k4v4", 64, [50, 50], 64, seed=3)
    s.ring_table[1] = -1
    s.store(0, 0, 50)
    s.store(1, 0, 50)
    assert not s.fine[1].any()
    s.assert_decode_equals_the_reference()


def test_a_nan_in_an_unused_ring_row_changes_no_output() -> None:
    s = Sequences("k4v2", 96, [40, 20], 32, seed=4)
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


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 120), st.integers(1, 70), st.integers(0, 5))
def test_ring_slots_are_unique_and_only_for_tokens_of_the_window(
    length: int, new: int, recent: int, ring_tokens: int, padding: int
) -> None:
    new, blocks = min(new, length), -(-recent // ring_tokens)
    positions = torch.cat([torch.arange(length - new, length), torch.full((padding,), -1)])
    rows = (7 + 3 * torch.arange(blocks)).expand(len(positions), -1)
    slots = ring_slots(positions, torch.full_like(positions, length), rows, recent, ring_tokens)
    live = slots >= 0
    assert live.tolist() == [p >= 0 and p >= length - recent for p in positions.tolist()]
    assert len(slots[live].unique()) == int(live.sum())
    assert ((slots[live] // ring_tokens - 7) % 3 == 0).all()


BAD = {
    "a ring of other pages": ("ring", lambda c, f: PackedPages(c, f, 64, ring=c[:, :1], recent=8)),
    "a ring of another format": ("ring", lambda c, f: PackedPages(c, f, 64, ring=c[..., :32], recent=8)),
    "a ring without a window": ("recent", lambda c, f: PackedPages(c, f, 64, ring=c)),
    "a window without a ring": ("recent", lambda c, f: PackedPages(c, f, 64, recent=8)),
    "a negative window": ("recent", lambda c, f: PackedPages(c, f, 64, ring=c, recent=-8)),
    "no slots": ("ring_slots", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).store(X, X, torch.arange(2))),
    "slots too few": ("ring_slots", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).store(
        X, X, torch.arange(2), torch.arange(1))),
    "slots of int32": ("ring_slots", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).store(
        X, X, torch.arange(2), torch.arange(2).int())),
    "a slot beyond the ring": ("ring_slots", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).store(
        X, X, torch.arange(2), torch.tensor([0, 32]))),
    "slots without a ring": ("ring_slots", lambda c, f: PackedPages(c, f, 64).store(
        X, X, torch.arange(2), torch.arange(2))),
    "no table": ("ring_table", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).decode(
        X[:1], torch.tensor([[0]]), torch.tensor([1]), 1.0)),
    "a table of too few columns": ("ring_table", lambda c, f: PackedPages(c, f, 64, ring=c, recent=17).decode(
        X[:1], torch.tensor([[0]]), torch.tensor([1]), 1.0, ring_table=torch.tensor([[1]]))),
    "a ring block beyond": ("ring_table", lambda c, f: PackedPages(c, f, 64, ring=c, recent=8).decode(
        X[:1], torch.tensor([[0]]), torch.tensor([1]), 1.0, ring_table=torch.tensor([[2]]))),
}  # fmt: skip
X = torch.randn(2, 2, 64)


@pytest.mark.parametrize("what", BAD)
def test_a_ring_that_does_not_fit_is_refused_and_nothing_is_written(what: str) -> None:
    field, call = BAD[what]
    fmt = formats.parse("k4v4")
    cache = torch.full((2, 2, 16, fmt.row_bytes(64)), 255, dtype=torch.uint8)
    with pytest.raises(BadInputError, match=f"^{field} .*; .+") as caught:
        call(cache, fmt)
    assert caught.value.field == field
    assert (cache == 255).all()


def test_the_steps_of_residuals_depend_only_on_the_scale() -> None:
    codes, meta = encode(torch.zeros(2, 64), 4, 64)
    assert not scale_and_zero(meta, 4)[0].any()
    assert not decode_residual(*encode_residual(torch.zeros(2, 64), codes, meta, 4), meta, 4).any()
