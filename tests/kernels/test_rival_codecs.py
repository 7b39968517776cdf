"""Codecs of the accuracy table: their size, and their error on rows whose error is known."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.codec import Codec, own
from benchmarks.accuracy.rivals import plain
from benchmarks.accuracy.rivals.kivi import kivi
from benchmarks.accuracy.rivals.kvarn import kvarn, normalise
from benchmarks.accuracy.rivals.turboquant import lloyd_max, turboquant
from kvpilot_formats import formats

OURS = [own(formats.parse(name)) for name in ("int8", "k8v4", "k4v4", "k4v2", "k2v2")]
RIVALS = [
    plain.fp8_e4m3(), plain.int4_raw(), plain.int4_per_token_head(), turboquant(4), turboquant(3), kivi(2),
    kvarn(4, 4), kvarn(4, 2),
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(codec: Codec, x: torch.Tensor, side: str) -> float:
    back = codec.key(x) if side == "key" else codec.value(x)
    return float((back - x).square().mean() / x.square().mean())


@pytest.mark.parametrize(
    ("codec", "at_128", "at_64"),
    [(kvarn(4, 2), 3.375, 3.5625), (kvarn(4, 4), 4.375, 4.5625), (kivi(2), 3.0, 3.0), (turboquant(4), 4.1875, 4.375),
     (turboquant(3), 3.1875, 3.375), (plain.int4_per_token_head(), 4.25, 4.5), (plain.int4_raw(), 4.25, 4.5),
     (plain.fp8_e4m3(), 8.0, 8.0), (own(formats.parse("k4v4")), 4.25, 4.25), (own(formats.parse("k4v2")), 3.25, 3.25)],
    ids=lambda value: value.name if isinstance(value, Codec) else None,
)  # fmt: skip
def test_a_codecs_bits_count_every_scale_and_zero_point(codec: Codec, at_128: float, at_64: float) -> None:
    assert codec.bits(128) == pytest.approx(at_128)
    assert codec.bits(64) == pytest.approx(at_64)


@pytest.mark.parametrize("name", formats.own_names())
@pytest.mark.parametrize("dim", formats.HEAD_DIMS)
def test_our_codecs_count_the_bits_that_the_format_allocates(name: str, dim: int) -> None:
    assert own(formats.parse(name)).bits(dim) == pytest.approx(formats.parse(name).bits_per_element(dim))


@pytest.mark.parametrize("codec", OURS + RIVALS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_a_round_trip_keeps_shape_and_is_finite_at_any_length(codec: Codec, tokens: int) -> None:
    x = normal(tokens, 2, 64)
    for side in (codec.key, codec.value):
        assert side(x).shape == x.shape
        assert side(x).isfinite().all()
        assert side(torch.zeros_like(x)).abs().max() == 0


@pytest.mark.parametrize("side", ["key", "value"])
def test_more_bits_of_one_codec_mean_less_error(side: str) -> None:
    x = normal(256, 2, 128)
    for make in (turboquant, kivi):
        assert error(make(4), x, side) < error(make(3), x, side) < error(make(2), x, side)
    assert error(kvarn(4, 4), x, side) < error(kvarn(2, 2), x, side)
    assert error(OURS[0], x, side) < error(OURS[2], x, side) < error(OURS[4], x, side)


@pytest.mark.parametrize("codec", [c for c in RIVALS if "int4" in c.name or c.name == "kvarn_k4v4"],
                         ids=lambda codec: codec.name)  # fmt: skip
def test_ours_is_closer_than_min_max_rivals_on_gaussian_rows_at_no_more_bits(codec: Codec) -> None:
    x, ours = normal(512, 2, 128), own(formats.parse("k4v4"))
    assert ours.bits(128) <= codec.bits(128)
    for side in ("key", "value"):
        assert error(ours, x, side) < error(codec, x, side)


def test_our_2_bit_codec_has_half_the_error_of_min_max() -> None:
    x = normal(512, 2, 128)
    assert error(own(formats.parse("k4v2")), x, "value") < 0.55 * error(kvarn(4, 2), x, "value")


def test_lloyd_max_finds_the_published_centroids() -> None:
    # Source: Max (1960), table I, two and four levels for a normal variable.
    assert torch.allclose(lloyd_max(1), torch.tensor([-0.7980, 0.7980]), atol=2e-4)
    assert torch.allclose(lloyd_max(2), torch.tensor([-1.510, -0.4528, 0.4528, 1.510]), atol=5e-4)


def test_turboquant_keeps_the_length_of_every_key() -> None:
    x = normal(64, 2, 128) * torch.linspace(0.1, 50, 64)[:, None, None]
    assert torch.allclose(turboquant(3).key(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-3)


def test_kvarn_balances_columns_that_differ_tenfold_and_rows_that_differ_less() -> None:
    tile = 10 * normal(1, 128, 64) * torch.logspace(0, 0.2, 128)[:, None] * torch.logspace(0, 1, 64)
    rows, columns = normalise(tile)
    balanced = tile / rows / columns
    for axis in (-1, -2):
        deviation = balanced.std(axis)
        assert deviation.max() / deviation.min() < 1.2


def test_kivi_keeps_a_channel_offset_that_a_per_token_codec_loses() -> None:
    x = normal(64, 1, 64)
    x[..., 3] += 100
    assert error(kivi(4), x, "key") < 0.1 * error(plain.int4_raw(), x, "key")


def test_a_rotation_reduces_the_error_of_keys_with_an_outlier_channel() -> None:
    x = normal(64, 1, 64)
    x[..., 3] *= 30
    others = [i for i in range(64) if i != 3]
    raw, rotated = (c.key(x)[..., others] - x[..., others] for c in (plain.int4_raw(), plain.int4_per_token_head()))
    assert rotated.square().mean() < raw.square().mean()


def test_fp8_has_three_bits_of_mantissa_and_saturates() -> None:
    fp8 = plain.fp8_e4m3().key
    assert fp8(torch.tensor([1.0, 1.0625, 1e4, -1e4])).tolist() == [1.0, 1.0, 448.0, -448.0]
