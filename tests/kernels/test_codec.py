"""The codec of the group format: values after a round trip, and their error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_kernels.reference.hadamard import hadamard
from kvpilot_kernels.reference.quantize import decode, encode, pack, scale_and_zero, unpack
from support.gpu_batch import PADDED

dims = st.sampled_from(formats.HEAD_DIMS)
widths = st.sampled_from([2, 4, 8])
seeds = st.integers(0, 2**31)


def group(dim: int) -> int:
    return formats.parse("k4v4").group_size(dim)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [1, 2, 12, 64, 96, 128, 192, 256])
def test_the_hadamard_matrix_is_orthonormal_with_entries_of_one_size(dim: int) -> None:
    h = hadamard(dim, torch.float64)
    assert torch.allclose(h @ h.T, torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(h.abs(), torch.full_like(h, dim**-0.5))


@pytest.mark.parametrize("dim", [0, 3, 20, 80, 112])
def test_a_dimension_without_a_hadamard_matrix_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"dim {dim}"):
        hadamard(dim)


@given(seeds, dims, widths)
def test_unpacking_restores_the_packed_codes(seed: int, dim: int, bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.shape == (3, dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_a_byte_holds_elements_a_half_or_a_quarter_row_apart() -> None:
    row = torch.arange(64, dtype=torch.uint8)
    assert pack(row % 16, 4)[5] == 5 | (37 % 16) << 4
    assert pack(row % 4, 2)[6] == 2 | (22 % 4) << 2 | (38 % 4) << 4 | (54 % 4) << 6


@given(seeds, dims, widths, st.floats(1e-3, 1e4))
def test_the_error_of_an_unclipped_element_is_at_most_one_code_step(
    seed: int, dim: int, bits: int, size: float
) -> None:
    x = normal(seed, 4, dim) * size
    codes, meta = encode(x, bits, group(dim))
    scale, _ = scale_and_zero(meta, bits)
    scale = scale.repeat_interleave(group(dim), -1)
    error = (decode(codes, meta, bits) - x).abs()
    clipped = (codes == 0) | (codes == (1 << bits) - 1)
    # Two of the 2-bit codes lie inside the range. A stretched scale moves them by up to half their distance from zero.
    assert (error[~clipped] <= scale[~clipped] * (1.3 if bits == 2 else 0.51)).all()


@given(seeds, dims, st.floats(1e-3, 1e4), st.floats(-2, 2))
def test_a_decoded_2_bit_row_is_as_long_as_the_row_in_the_rows_direction(
    seed: int, dim: int, size: float, shift: float
) -> None:
    x = ((normal(seed, 64, dim) + shift) * size).double()
    back = decode(*encode(x.float(), 2, group(dim)), 2).double()
    shortness = (back * x).sum(-1) / x.square().sum(-1) - 1
    assert (shortness.abs() <= 2**-6).all()  # half of a scale's last bit


@given(seeds, dims)
def test_the_mean_of_similar_tokens_keeps_its_length(seed: int, dim: int) -> None:
    common = normal(seed, dim)
    x = common + normal(seed + 1, 512, dim)
    back = decode(*encode(x, 2, group(dim)), 2).mean(0)
    assert abs(float(back @ common / (common @ common)) - float(x.mean(0) @ common / (common @ common))) < 0.05


@pytest.mark.parametrize("x", [1e-7, 1e-30, 1e10, 3e38])
def test_rows_beyond_the_largest_scale_saturate(x: float) -> None:
    row = normal(5, 8, 64) * x
    row = torch.where(row.isfinite(), row, x)
    back = decode(*encode(row, 2, 64), 2)
    assert back.isfinite().all()
    assert back.norm() <= max(4 * float(row.double().norm()), 1e-3)


@given(seeds, dims)
def test_error_on_gaussian_rows_stays_under_its_bound(seed: int, dim: int) -> None:
    x = normal(seed, 512, dim)
    for bits, bound in ((8, 1e-4), (4, 0.010), (2, 0.14)):
        codes, meta = encode(x, bits, group(dim))
        assert (decode(codes, meta, bits) - x).square().mean() < bound


@given(dims, widths)
def test_zero_rows_come_back_as_zeros(dim: int, bits: int) -> None:
    codes, meta = encode(torch.zeros(2, dim), bits, group(dim))
    assert torch.equal(decode(codes, meta, bits), torch.zeros(2, dim))


@given(dims, st.floats(-1e3, 1e3).filter(lambda c: abs(c) > 1e-2), st.sampled_from(["int8", "k4v4"]))
def test_constant_rows_come_back_within_a_few_percent(dim: int, constant: float, name: str) -> None:
    x = torch.full((1, dim), constant)
    back = round_trip(x, formats.parse(name), "key")
    assert (back - x).norm() <= 0.05 * x.norm().double()


@given(seeds, dims, st.floats(10, 3e4))
def test_a_huge_outlier_changes_no_other_token_and_comes_back_itself(seed: int, dim: int, outlier: float) -> None:
    calm = normal(seed, 3, dim)
    hit = calm.clone()
    hit[1, 7] = outlier
    before, after = (round_trip(x, formats.parse("k4v4"), "value") for x in (calm, hit))
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert abs(after[1, 7] - outlier) <= 0.1 * outlier


def test_values_beyond_float16_saturate_and_stay_finite() -> None:
    codes, meta = encode(torch.full((1, 64), 3e38), 4, 64)
    assert decode(codes, meta, 4).isfinite().all()


@settings(max_examples=20)
@given(st.sampled_from([64, 96, 128]), widths)
def test_a_nan_comes_back_as_nan_and_only_in_its_own_group(dim: int, bits: int) -> None:
    x = torch.ones(2, dim)
    x[0, 0] = torch.nan
    back = decode(*encode(x, bits, group(dim)), bits)
    assert back[0, : group(dim)].isnan().all()
    assert back[0, group(dim) :].isfinite().all() and back[1].isfinite().all()


@given(seeds, st.integers(1, 64).map(lambda n: 8 * n).filter(formats.stored_dim), st.sampled_from(formats.own_names()))
def test_a_padded_head_reads_back_like_a_head_that_was_padded_and_cut_explicitly(
    seed: int, dim: int, name: str
) -> None:
    fmt, wide, x = formats.parse(name), formats.stored_dim(dim), normal(seed, 4, dim)
    padded = torch.nn.functional.pad(x, (0, wide - dim))
    back, own = round_trip(padded, fmt, "value")[:, :dim], round_trip(x, fmt, "value")
    # Rounding depends on the length of a sum. A code or a scale may move by one, which changes its row by less than the
    # codec's error.
    assert ((own - back).norm(dim=1) <= 2 * (own - x).norm(dim=1)).all()


@pytest.mark.parametrize("dim", PADDED)
@pytest.mark.parametrize("name", formats.own_names())
def test_the_elements_of_a_padded_head_share_the_error_with_its_padding(name: str, dim: int) -> None:
    fmt, wide = formats.parse(name), formats.stored_dim(dim)
    errors = []
    for size in (dim, wide):
        x = normal(size, 4096, size)
        errors.append(float((round_trip(x, fmt, "value") - x).norm() / x.norm()))
    assert errors[0] / errors[1] == pytest.approx((dim / wide) ** 0.5, rel=0.03)


@pytest.mark.parametrize("dim", formats.HEAD_DIMS)
def test_the_rotation_spreads_an_outlier_and_reduces_the_error_of_other_elements(dim: int) -> None:
    x = normal(3, 256, dim)
    x[:, 7] *= 40
    plain = decode(*encode(x, 4, group(dim)), 4)
    others = [i for i in range(dim) if i != 7]
    rotated = round_trip(x, formats.parse("k4v4"), "key")
    assert (rotated - x)[:, others].square().mean() < (plain - x)[:, others].square().mean()
