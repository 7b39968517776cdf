"""Packed pages reject bad input before any write. The error names the field."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels import check
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import decode_reference
from support.gpu_batch import DIMS

K4V4 = formats.parse("k4v4")
BLOCKS, HEADS, SIZE, DIM = 6, 2, 16, 64
Call = Callable[[PackedPages], object]


def cache(fmt: formats.Format = K4V4, dim: int = DIM) -> torch.Tensor:
    """Return a cache whose bytes are all 0xFF, so that all scales are NaN."""
    return torch.full((BLOCKS, HEADS, SIZE, fmt.row_bytes(dim)), 255, dtype=torch.uint8)


def filled(seed: int = 0, fmt: formats.Format = K4V4, dim: int = DIM) -> tuple[PackedPages, torch.Tensor, torch.Tensor]:
    """Store sequences of 40 and 20 tokens in blocks 1 to 3 and 4 to 5. Return pages, keys and values."""
    rng = torch.Generator().manual_seed(seed)
    pages = PackedPages(cache(fmt, dim), fmt, dim)
    key, value = (torch.randn(60, HEADS, dim, generator=rng) for _ in range(2))
    pages.store(key, value, SLOTS)
    return pages, key, value


TABLE = torch.tensor([[1, 2, 3], [4, 5, -7]])
LENGTHS = torch.tensor([40, 20])
SLOTS = torch.cat([torch.arange(16, 56), torch.arange(64, 84)])
QUERY = torch.randn(2, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dim", [1, 32, 40, 81, 100, 264, 336, 1024])
def test_a_head_dim_that_is_not_stored_is_refused_by_every_format(dim: int) -> None:
    for name in formats.own_names():
        fmt = formats.parse(name)
        with pytest.raises(formats.UnsupportedHeadDimError, match=f"head_dim {dim} .*{name}.*multiples of 8 from 48"):
            PackedPages(torch.zeros(2, 1, 16, 68, dtype=torch.uint8), fmt, dim)


ROW = K4V4.row_bytes(DIM)
BAD_CACHES = {
    "another type": torch.zeros(2, 2, 16, ROW, dtype=torch.int8),
    "three dimensions": torch.zeros(2, 16, ROW, dtype=torch.uint8),
    "rows of another format": torch.zeros(2, 2, 16, formats.parse("k8v4").row_bytes(DIM), dtype=torch.uint8),
    "rows of another head_dim": torch.zeros(2, 2, 16, K4V4.row_bytes(128), dtype=torch.uint8),
    "token before head": torch.zeros(2, 16, 2, ROW, dtype=torch.uint8).transpose(1, 2),
    "rows apart": torch.zeros(2, 2, 16, ROW + 4, dtype=torch.uint8)[..., :ROW],
    "every other byte": torch.zeros(2, 2, 16, 2 * ROW, dtype=torch.uint8)[..., ::2],
    "blocks of 8 tokens": torch.zeros(2, 2, 8, ROW, dtype=torch.uint8),
    "blocks of no token": torch.zeros(2, 2, 0, ROW, dtype=torch.uint8),
    "heads that share a page": torch.zeros(2, 1, 16, ROW, dtype=torch.uint8).expand(2, 2, 16, ROW),
    "blocks that share a page": torch.zeros(1, 2, 16, ROW, dtype=torch.uint8).expand(2, 2, 16, ROW),
    "an odd first byte": torch.zeros(2 * 2 * 16 * ROW + 1, dtype=torch.uint8)[1:].view(2, 2, 16, ROW),
}


@pytest.mark.parametrize("what", BAD_CACHES)
def test_a_cache_that_does_not_fit_is_refused_with_its_shape_and_strides(what: str) -> None:
    with pytest.raises(BadInputError, match=r"cache .*strides"):
        PackedPages(BAD_CACHES[what], K4V4, DIM)


def test_padding_between_blocks_is_no_fault() -> None:
    page = SIZE * ROW
    padded = torch.zeros(4, HEADS * page + 64, dtype=torch.uint8)[:, : HEADS * page].view(4, HEADS, SIZE, ROW)
    pages = PackedPages(padded, K4V4, DIM)
    key = torch.randn(16, HEADS, DIM)
    pages.store(key, key, torch.arange(32, 48))
    assert torch.equal(pages.read(torch.tensor([2]), 16)[0], filled_like(key))


def filled_like(key: torch.Tensor) -> torch.Tensor:
    """Return the same tokens from a cache without padding."""
    pages = PackedPages(cache(), K4V4, DIM)
    pages.store(key, key, torch.arange(key.shape[0]))
    return pages.read(torch.tensor([0]), key.shape[0])[0]


K = torch.randn(4, HEADS, DIM)
BAD_STORES: dict[str, tuple[str, Call]] = {
    "integers": ("key", lambda p: p.store(K.long(), K, torch.arange(4))),
    "bytes for values": ("value", lambda p: p.store(K, K.to(torch.uint8), torch.arange(4))),
    "another head_dim": ("key", lambda p: p.store(torch.randn(4, HEADS, 128), K, torch.arange(4))),
    "another number of heads": ("value", lambda p: p.store(K, torch.randn(4, 1, DIM), torch.arange(4))),
    "heads flattened": ("key", lambda p: p.store(K.flatten(1), K.flatten(1), torch.arange(4))),
    "more slots than tokens": ("slots", lambda p: p.store(K, K, torch.arange(5))),
    "slots of floats": ("slots", lambda p: p.store(K, K, torch.arange(4.0))),
    "slots of 32 bits": ("slots", lambda p: p.store(K, K, torch.arange(4, dtype=torch.int32))),
    "slots in two dimensions": ("slots", lambda p: p.store(K, K, torch.arange(4)[None])),
    "a slot just beyond": ("slots", lambda p: p.store(K, K, torch.tensor([0, 1, 2, BLOCKS * SIZE]))),
    "a slot far beyond": ("slots", lambda p: p.store(K, K, torch.tensor([2**40, 1, 2, 3]))),
}
BAD_READS: dict[str, tuple[str, Call]] = {
    "a query of integers": ("query", lambda p: p.decode(QUERY.long(), TABLE, LENGTHS, 1.0)),
    "a query of another head_dim": ("query", lambda p: p.decode(QUERY[..., :32], TABLE, LENGTHS, 1.0)),
    "heads that do not divide": ("query", lambda p: p.decode(QUERY[:, :3], TABLE, LENGTHS, 1.0)),
    "no heads": ("query", lambda p: p.decode(QUERY[:, :0], TABLE, LENGTHS, 1.0)),
    "a block just beyond": ("block_table", lambda p: p.decode(QUERY, swapped(BLOCKS), LENGTHS, 1.0)),
    "a negative block": ("block_table", lambda p: p.decode(QUERY, swapped(-1), LENGTHS, 1.0)),
    "a table of floats": ("block_table", lambda p: p.decode(QUERY, TABLE.float(), LENGTHS, 1.0)),
    "a table for fewer sequences": ("block_table", lambda p: p.decode(QUERY, TABLE[:1], LENGTHS, 1.0)),
    "a length without room": ("seq_lens", lambda p: p.decode(QUERY, TABLE, torch.tensor([49, 20]), 1.0)),
    "an empty sequence": ("seq_lens", lambda p: p.decode(QUERY, TABLE, torch.tensor([40, 0]), 1.0)),
    "lengths of floats": ("seq_lens", lambda p: p.decode(QUERY, TABLE, LENGTHS.float(), 1.0)),
    "a context beyond the table": ("seq_lens", lambda p: prefill(p, TABLE[0], 49)),
    "a context in a block beyond": ("block_table", lambda p: prefill(p, torch.tensor([1, 99, 3]), 40)),
    "a read beyond the table": ("seq_lens", lambda p: p.read(TABLE[0], 49)),
    "a read of a block beyond": ("block_table", lambda p: p.read(torch.tensor([BLOCKS]), 3)),
}


def swapped(block: int) -> torch.Tensor:
    """Return TABLE with this block as the middle one of the first sequence."""
    table = TABLE.clone()
    table[0, 1] = block
    return table


def prefill(pages: PackedPages, table: torch.Tensor, context: int) -> torch.Tensor:
    return pages.prefill(torch.randn(4, 2 * HEADS, DIM), K, K, table, context, 1.0)


@pytest.mark.parametrize("what", BAD_STORES)
def test_a_bad_store_names_the_field_and_writes_nothing(what: str) -> None:
    field, call = BAD_STORES[what]
    memory = cache()
    pages = PackedPages(memory, K4V4, DIM)
    with pytest.raises(BadInputError, match=f"^{field} .*; .+") as caught:
        call(pages)
    assert caught.value.field == field
    assert (memory == 255).all()


@pytest.mark.parametrize("what", BAD_READS)
def test_the_error_about_a_bad_read_names_the_field(what: str) -> None:
    field, call = BAD_READS[what]
    with pytest.raises(BadInputError, match=f"^{field} .*; .+") as caught:
        call(filled()[0])
    assert caught.value.field == field


def test_table_entries_past_a_sequences_end_may_have_any_value() -> None:
    pages, _, _ = filled()
    wild = TABLE.clone()
    wild[1, 2] = 2**40
    assert torch.equal(pages.decode(QUERY, wild, LENGTHS, 0.125), pages.decode(QUERY, TABLE, LENGTHS, 0.125))


@pytest.mark.parametrize("name", formats.own_names())
@pytest.mark.parametrize("dim", DIMS)
def test_zeros_come_back_as_zeros(name: str, dim: int) -> None:
    pages = PackedPages(cache(formats.parse(name), dim), formats.parse(name), dim)
    zero = torch.zeros(3, HEADS, dim)
    pages.store(zero, zero, torch.arange(3))
    key, value = pages.read(torch.tensor([0]), 3)
    assert not key.any()
    assert not value.any()
    out = pages.decode(torch.ones(1, HEADS, dim), torch.tensor([[0]]), torch.tensor([3]), 1.0)
    assert not out.any()


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-7, 1e30])
def test_tiny_and_huge_tokens_stay_finite_and_change_no_other_token(size: float) -> None:
    pages, key, value = filled()
    before = pages.read(TABLE[0], 40)
    pages.store(key[5:6] * size, value[5:6] * size, SLOTS[5:6])
    after = pages.read(TABLE[0], 40)
    others = torch.arange(40) != 5
    for old, new in zip(before, after, strict=True):
        assert new.isfinite().all()
        assert torch.equal(old[others], new[others])


@given(
    st.sampled_from(formats.own_names()), st.sampled_from(DIMS), st.integers(0, 39),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]), st.sampled_from(["key", "value"]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_a_nan_token_changes_no_byte_of_other_tokens(
    name: str, dim: int, at: int, broken: float, side: str, seed: int
) -> None:
    fmt = formats.parse(name)
    pages, key, value = filled(seed, fmt, dim)
    clean = [side.clone() for side in pages.read(TABLE[0], 40)]
    spoilt = key.clone(), value.clone()
    spoilt[side == "value"][at, 0, seed % dim] = broken
    pages.store(*spoilt, SLOTS)  # one batch that includes the broken token
    others = torch.arange(40) != at
    for old, new in zip(clean, pages.read(TABLE[0], 40), strict=True):
        assert torch.equal(old[others], new[others])
        assert torch.equal(old[at, 1], new[at, 1])  # the token's other head is intact, too


@given(st.sampled_from(formats.own_names()), st.integers(0, 39), st.sampled_from([0, 1]), st.integers(0, 2**31))
def test_a_nan_token_reaches_no_other_sequence_of_the_batch(name: str, at: int, side: int, seed: int) -> None:
    fmt = formats.parse(name)
    pages, key, value = filled(seed, fmt)
    clean = pages.decode(QUERY, TABLE, LENGTHS, 0.125)
    spoilt = key.clone(), value.clone()
    spoilt[side][at] = float("nan")
    pages.store(*spoilt, SLOTS)
    out = pages.decode(QUERY, TABLE, LENGTHS, 0.125)
    assert out[0].isnan().all()  # the sequence with the broken token gets NaN instead of a guess
    assert torch.equal(out[1], clean[1])
    args = (QUERY, key[40:42], value[40:42], TABLE[1], 20, 0.125)
    assert pages.prefill(*args).isfinite().all()


def test_a_slot_that_held_a_nan_can_be_reused() -> None:
    pages, key, value = filled()
    clean = pages.decode(QUERY, TABLE, LENGTHS, 0.125)
    pages.store(torch.full_like(key, float("nan")), torch.full_like(value, float("nan")), SLOTS)
    pages.store(key, value, SLOTS)
    assert torch.equal(pages.decode(QUERY, TABLE, LENGTHS, 0.125), clean)


def test_a_nan_query_makes_only_its_own_row_nan() -> None:
    pages, key, value = filled()
    query = QUERY.clone()
    query[0, 1] = float("nan")
    out = pages.decode(query, TABLE, LENGTHS, 0.125)
    assert out[0, 1].isnan().all()
    rest = out.clone()
    rest[0, 1] = 0
    assert rest.isfinite().all()
    wanted = decode_reference(QUERY[1], key[40:], value[40:], K4V4, 0.125)
    assert torch.allclose(out[1].double(), wanted, atol=2e-4, rtol=2e-4)


def test_checks_of_shapes_accept_valid_arguments() -> None:
    check.page_cache(cache(), K4V4, DIM)
    check.tokens(K, K, torch.arange(4), HEADS, DIM)
    check.tokens(K.bfloat16(), K.half(), torch.arange(3), HEADS, DIM)
    check.queries(QUERY, HEADS, DIM)
    check.slots(torch.tensor([-1, BLOCKS * SIZE - 1]), BLOCKS, SIZE)
    check.tables(TABLE.int(), LENGTHS.int(), BLOCKS, SIZE)
    check.tables(TABLE[:0], LENGTHS[:0], BLOCKS, SIZE)
