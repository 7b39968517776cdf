"""Formats: names, sizes, and the page layout on which all implementations rely."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_formats.formats import FormatError, UnknownFormatError, UnsupportedHeadDimError

own = st.sampled_from(formats.own_names())
any_name = st.sampled_from(tuple(formats.FORMATS))
dims = st.sampled_from(formats.HEAD_DIMS)
block_sizes = st.sampled_from([16, 32, 48, 64, 128, 256])


@pytest.mark.parametrize(
    ("name", "bits"), [("int8", 8.25), ("k8v4", 6.25), ("k4v4", 4.25), ("k4v2", 3.25), ("k2v2", 2.25), ("auto", 16.0)]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_per_element_with_scales_are_the_same_at_every_multiple_of_64(
    name: str, bits: float, head_dim: int
) -> None:
    assert formats.parse(name).bits_per_element(head_dim) == bits


@pytest.mark.parametrize(
    ("name", "bits"),
    [("fp8", 8), ("int8_per_token_head", 8.25), ("int4_per_token_head", 4.25), ("nvfp4", 4.5),
     ("turboquant_k8v4", 6.125), ("turboquant_4bit_nc", 4.1875), ("turboquant_k3v4_nc", 3.6875),
     ("turboquant_3bit_nc", 3.1875)],
)  # fmt: skip
def test_bits_of_vllms_own_dtypes_count_their_scales(name: str, bits: float) -> None:
    assert formats.parse(name).bits_per_element(128) == bits


def test_every_vllm_dtype_is_either_offered_or_left_out_for_a_reason() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    # Read the source text: once vLLM is imported, the literal also contains the names of plugins.
    tree = ast.parse((Path(vllm.origin).parent / "config" / "cache.py").read_text())
    [literal] = [node.value for node in tree.body if isinstance(node, ast.Assign) and "CacheDType" in ast.unparse(node)]
    assert isinstance(literal, ast.Subscript)
    theirs = {n for n in tuple(formats.FORMATS) if not formats.parse(n).ours}
    assert set(ast.literal_eval(literal.slice)) == theirs | set(formats.VLLM_DTYPES_LEFT_OUT)


@given(own, dims, block_sizes)
def test_regions_tile_the_page_without_gap_or_overlap(name: str, head_dim: int, block_size: int) -> None:
    fmt = formats.parse(name)
    layout = fmt.page_layout(head_dim, block_size)
    end = 0
    for region in (layout.key_codes, layout.value_codes, layout.key_meta, layout.value_meta):
        assert region.offset == end
        assert region.offset % 16 == 0
        end += region.row_bytes * region.rows
    assert end == layout.size == block_size * fmt.row_bytes(head_dim)


@given(own, dims)
def test_groups_divide_the_row_and_codes_fill_whole_bytes(name: str, head_dim: int) -> None:
    fmt = formats.parse(name)
    assert head_dim % fmt.group_size(head_dim) == 0
    assert head_dim * fmt.key.bits % 8 == 0 == head_dim * fmt.value.bits % 8


@given(any_name)
def test_parse_returns_the_format_with_the_given_name(name: str) -> None:
    assert formats.parse(name).name == name


@given(st.text().filter(lambda s: s not in tuple(formats.FORMATS)))
def test_an_unknown_name_is_refused_with_the_names_that_exist(name: str) -> None:
    with pytest.raises(UnknownFormatError) as error:
        formats.parse(name)
    assert "k4v4" in str(error.value)
    assert len(str(error.value)) < 1000


def served(head_dim: int) -> bool:
    """Return True if this head dimension is served, by the ranges that `formats.SERVED` names in messages."""
    return head_dim % 8 == 0 and (48 <= head_dim <= 256 or 344 <= head_dim <= 512)


@given(st.integers(-8, 600))
def test_a_head_is_padded_to_the_next_stored_size_if_less_than_a_third_is_padding(head_dim: int) -> None:
    wide = formats.stored_dim(head_dim)
    assert (wide is not None) == served(head_dim)
    if wide is not None:
        assert wide in formats.HEAD_DIMS
        assert [dim for dim in formats.HEAD_DIMS if head_dim <= dim < wide] == []
        assert 3 * (wide - head_dim) < wide


def test_messages_name_the_head_dims_that_are_stored() -> None:
    assert formats.SERVED == "multiples of 8 from 48 to 256 and from 344 to 512"


@given(own, st.integers(1, 64).map(lambda n: 8 * n).filter(served), block_sizes)
def test_a_padded_head_takes_the_bytes_of_its_stored_row(name: str, head_dim: int, block_size: int) -> None:
    fmt, wide = formats.parse(name), formats.stored_dim(head_dim)
    assert fmt.row_bytes(head_dim) == fmt.row_bytes(wide)
    assert fmt.page_layout(head_dim, block_size) == fmt.page_layout(wide, block_size)
    assert fmt.bits_per_element(head_dim) * head_dim == pytest.approx(fmt.bits_per_element(wide) * wide)
    if fmt.has_residuals:
        assert fmt.residual_layout(head_dim, block_size) == fmt.residual_layout(wide, block_size)


def test_heads_of_80_elements_hold_three_times_the_tokens_of_16_bits_in_k4v4() -> None:
    assert formats.parse("auto").row_bytes(80) / formats.parse("k4v4").row_bytes(80) == pytest.approx(320 / 104)


@given(own, st.integers(-8, 600).filter(lambda d: not served(d)))
def test_a_head_dim_that_is_not_stored_is_refused(name: str, head_dim: int) -> None:
    with pytest.raises(FormatError, match=f"head_dim {head_dim}"):
        formats.parse(name).row_bytes(head_dim)


def test_vllms_own_formats_have_no_page_layout() -> None:
    with pytest.raises(UnsupportedHeadDimError):
        formats.parse("fp8").page_layout(128, 16)


@pytest.mark.parametrize("block_size", [0, -16, 1, 24])
def test_a_page_size_that_is_not_a_multiple_of_16_tokens_is_refused(block_size: int) -> None:
    with pytest.raises(FormatError, match=f"block_size {block_size} is not"):
        formats.parse("k4v4").page_layout(128, block_size)


def test_only_k2v2_requires_calibration() -> None:
    assert [n for n in tuple(formats.FORMATS) if formats.parse(n).calibrated_only] == ["k2v2"]


def test_importing_formats_imports_neither_torch_nor_numpy() -> None:
    code = "import kvpilot_formats.formats, sys; print({'torch', 'numpy', 'vllm'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert out.stdout.strip() == "set()"
