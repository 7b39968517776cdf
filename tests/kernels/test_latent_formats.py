"""Formats of multi-head latent attention: the layout of a page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats import formats, latent

every = st.sampled_from(latent.names())


@given(every, st.integers(1, 16).map(lambda n: 16 * n))
def test_regions_of_a_page_follow_one_another_without_a_gap_from_multiples_of_16_bytes(
    name: str, block_size: int
) -> None:
    fmt = latent.parse(name)
    page, at = fmt.page_layout(block_size), 0
    for region in (page.codes, page.rope_codes, page.meta):
        assert region.offset == at
        assert at % 16 == 0
        at += region.rows * region.row_bytes
    assert at == page.size == block_size * fmt.row_bytes
    assert (page.codes.row_bytes, page.rope_codes.row_bytes) == (512 * fmt.bits // 8, 64)
    assert (page.meta.rows, page.meta.row_bytes) == (2, 2 * block_size)


@pytest.mark.parametrize("block_size", [0, -16, 8, 24])
def test_a_block_size_without_a_layout_is_refused(block_size: int) -> None:
    with pytest.raises(formats.FormatError, match=f"block_size {block_size} is not a multiple of 16"):
        latent.parse("mla4").page_layout(block_size)


@pytest.mark.parametrize(("name", "bytes_a_token", "least"), [("mla8", 580, 1.85), ("mla4", 324, 3.2)])
def test_each_format_reaches_its_target_capacity(name: str, bytes_a_token: int, least: float) -> None:
    fmt = latent.parse(name)
    assert fmt.row_bytes == bytes_a_token
    assert 16 / fmt.bits_per_element() == pytest.approx(2 * 576 / bytes_a_token)
    assert 16 / fmt.bits_per_element() > least


def test_the_error_about_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(formats.UnknownFormatError, match="'k4v4' is not known; use one of: mla8, mla4"):
        latent.parse("k4v4")
