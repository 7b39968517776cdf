"""Latent pages on CPU against the float64 reference: ragged lengths, poisoned pages, any order of storing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_batch import LatentBatch, poisoned

from kvpilot_formats.latent import ENTRY, RANK, ROPE, names, parse
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_kernels.latent.reference import attend, round_trip


@settings(max_examples=30)
@given(
    st.sampled_from(names()), st.lists(st.integers(1, 70), min_size=1, max_size=4), st.sampled_from([1, 5, 16, 20]),
    st.sampled_from([16, 32]), st.booleans(), st.sampled_from([1e-2, 1.0, 30.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_decode_equals_the_reference_over_ragged_poisoned_pages(
    name: str, lengths: list[int], heads: int, block_size: int, calibrated: bool, size: float, seed: int
) -> None:
    batch = LatentBatch(name, lengths, seed, heads, block_size, calibrated=calibrated, size=size)
    query = batch.queries()
    out = batch.cpu.decode(query[..., :RANK], query[..., RANK:], batch.table, batch.lens, batch.scale)
    for i in range(len(lengths)):
        wanted = attend(query[i, None], round_trip(batch.entries[i], batch.fmt, batch.factors), batch.scale)[0]
        assert ((out[i] - wanted).norm(dim=-1) <= 5e-4 * wanted.norm(dim=-1)).all()


@settings(max_examples=15)
@given(st.sampled_from(names()), st.integers(1, 70), st.booleans(), st.integers(0, 2**31))
def test_reading_latents_back_equals_the_reference(name: str, length: int, calibrated: bool, seed: int) -> None:
    batch = LatentBatch(name, [length], seed, calibrated=calibrated)
    wanted = round_trip(batch.entries[0], batch.fmt, batch.factors)
    read = batch.cpu.read(batch.table[0], length)
    # Another order of sums may move an element across a boundary, by at most one code.
    off = (read - wanted).square().sum(-1) / wanted.square().sum(-1)
    assert (off < 1e-3).all()
    assert off.median() < 1e-8


@pytest.mark.parametrize("name", names())
def test_a_token_writes_only_its_own_bytes_and_padding_none(name: str) -> None:
    fmt = parse(name)
    cache = poisoned(3, 16, fmt)
    LatentPages(cache, fmt).store(torch.zeros(3, RANK), torch.zeros(3, ROPE), torch.tensor([-1, 16 + 5, -7]))
    page = fmt.page_layout(16)
    touched = torch.zeros(page.size, dtype=torch.bool)
    for region in (page.codes, page.rope_codes):
        touched[region.offset + 5 * region.row_bytes : region.offset + 6 * region.row_bytes] = True
    for row in range(2):
        at = page.meta.offset + row * page.meta.row_bytes + 2 * 5
        touched[at : at + 2] = True
    flat = cache.flatten(1)
    assert (flat[[0, 2]] == 255).all()
    assert (flat[1][~touched] == 255).all()
    assert (flat[1][touched] != 255).all()


@pytest.mark.parametrize("name", names())
def test_the_error_for_a_cache_of_another_shape_has_the_right_shape(name: str) -> None:
    fmt = parse(name)
    row = fmt.row_bytes
    for cache in (
        torch.zeros(2, 16, row), torch.zeros(2, 1, 16, row, dtype=torch.uint8), torch.zeros(2, 8, row).byte(),
        torch.zeros(2, row, 16).byte().mT, torch.zeros(2, 16, row + 1).byte(),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=rf"{name} takes uint8 \[blocks, block_size, {row}\]"):
            LatentPages(cache, fmt)
    with pytest.raises(BadInputError, match="must not overlap"):
        LatentPages(torch.zeros(1, 16, row).byte().expand(2, -1, -1), fmt)
    with pytest.raises(BadInputError, match="multiples of 16 bytes"):
        LatentPages(torch.zeros(16 * row + 8).byte()[8:].view(1, 16, row), fmt)


def test_tokens_and_queries_of_another_shape_are_refused_and_nothing_is_written() -> None:
    batch = LatentBatch("mla4", [20], 1)
    before, query = batch.cache.clone(), batch.queries()
    one, slot = torch.zeros(1, ENTRY), torch.tensor([16])
    for latent, rope, slots, told in (
        (one[:, :64], one[:, :64], slot, "latent is"), (one[:, :512], one[:, :512], slot, "rope is"),
        (one[:, :512].long(), one[:, 512:], slot, "latent is torch.int64"),
        (one[:, :512], one[:, 512:], slot.int(), "give one int64"),
        (one[:, :512], one[:, 512:], slot.repeat(2), "2 entries"),
        (one[:, :512], one[:, 512:], slot * 100, "nothing was written"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.cpu.store(latent, rope, slots)
    assert torch.equal(batch.cache, before)
    for absorbed, rope, told in (
        (query[..., :RANK], query[:, :1, RANK:], "query_rope is"), (query, query[..., RANK:], "query is"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.cpu.decode(absorbed, rope, batch.table, batch.lens, 1.0)
    with pytest.raises(BadInputError, match="names block 99"):
        batch.cpu.decode(query[..., :RANK], query[..., RANK:], batch.table * 0 + 99, batch.lens, 1.0)
