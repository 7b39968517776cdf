"""Static factors: what they change in a cache, what they may not change, and how they are fitted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_kernels import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import SINKS, Moments, Sums, fit
from kvpilot_kernels.reference.attention import decode_reference, prefill_reference, round_trip

SERVED = ["int8", "k8v4", "k4v4", "k4v2", "k2v2"]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_factors(kv_heads: int, dim: int, seed: int) -> Factors:
    rng = draw(seed)

    def mean() -> torch.Tensor:
        return torch.randn(kv_heads, dim, generator=rng)

    return Factors(mean(), (mean() / 2).exp(), mean(), (mean() / 2).exp())


def stored(key: torch.Tensor, value: torch.Tensor, fmt: formats.Format, factors: Factors | None) -> PackedPages:
    """Tokens in blocks 1, 2, ... of a cache whose every byte was 0xFF."""
    tokens, kv_heads, dim = key.shape
    cache = torch.full((tokens // 16 + 2, kv_heads, 16, fmt.row_bytes(dim)), 255, dtype=torch.uint8)
    pages = PackedPages(cache, fmt, dim, factors)
    pages.store(key, value, 16 + torch.arange(tokens))
    return pages


@given(st.sampled_from(SERVED), st.sampled_from(formats.HEAD_DIMS), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=25)
def test_identity_factors_change_no_bit(name: str, dim: int, tokens: int, seed: int) -> None:
    rng, fmt = draw(seed), formats.parse(name)
    key, value = (torch.randn(tokens, 2, dim, generator=rng) for _ in "kv")
    query = torch.randn(1, 6, dim, generator=rng)
    table, lens = 1 + torch.arange(tokens // 16 + 1)[None], torch.tensor([tokens])
    plain, identity = (stored(key, value, fmt, f) for f in (None, Factors.identity(2, dim)))
    assert torch.equal(plain.decode(query, table, lens, dim**-0.5), identity.decode(query, table, lens, dim**-0.5))
    for a, b in zip(plain.read(table[0], tokens), identity.read(table[0], tokens), strict=True):
        assert torch.equal(a, b)


@given(
    st.sampled_from(SERVED), st.sampled_from(formats.HEAD_DIMS), st.integers(1, 50), st.sampled_from([1, 3, 7]),
    st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=40)
def test_decode_with_factors_equals_the_reference(
    name: str, dim: int, tokens: int, ratio: int, mean_only: bool, seed: int
) -> None:
    rng, fmt, factors = draw(seed), formats.parse(name), some_factors(2, dim, seed + 1)
    if mean_only:
        one = torch.ones(2, dim)
        factors = Factors(factors.key_mean, one, factors.value_mean, one)
    key, value = (torch.randn(tokens, 2, dim, generator=rng) for _ in "kv")
    query = torch.randn(1, 2 * ratio, dim, generator=rng)
    pages = stored(key, value, fmt, factors)
    table = 1 + torch.arange(tokens // 16 + 1)[None]
    out = pages.decode(query, table, torch.tensor([tokens]), dim**-0.5)
    wanted = decode_reference(query[0], key, value, fmt, dim**-0.5, factors)
    assert torch.allclose(out[0].double(), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", SERVED)
def test_prefill_with_factors_equals_the_reference(name: str) -> None:
    rng, fmt, factors = draw(3), formats.parse(name), some_factors(2, 64, 4)
    key, value = (torch.randn(45, 2, 64, generator=rng) for _ in "kv")
    query = torch.randn(15, 6, 64, generator=rng)
    pages = stored(key, value, fmt, factors)
    out = pages.prefill(query, key[30:], value[30:], 1 + torch.arange(3), 30, 0.125)
    assert torch.allclose(out.double(), prefill_reference(query, key, value, 30, fmt, 0.125, factors), atol=1e-3)


def test_a_mean_that_all_tokens_share_costs_nothing_once_it_is_known() -> None:
    fmt, rng = formats.parse("k4v4"), draw(5)
    offset = 10 * torch.randn(2, 64, generator=rng)
    x = torch.randn(200, 2, 64, generator=rng)
    one, zero = torch.ones(2, 64), torch.zeros(2, 64)
    known = round_trip(x + offset, fmt, "key", Factors(offset, one, zero, one)) - offset
    calm = round_trip(x, fmt, "key")
    unknown = round_trip(x + offset, fmt, "key") - offset
    assert (known - x).square().mean() < 1.01 * (calm - x).square().mean()
    assert (unknown - x).square().mean() > 20 * (known - x).square().mean()


def test_factors_of_another_shape_are_refused_with_the_right_one() -> None:
    fmt = formats.parse("k4v4")
    cache = torch.zeros(2, 3, 16, fmt.row_bytes(64), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[kv_heads, head_dim\] = \[3, 64\]"):
        PackedPages(cache, fmt, 64, Factors.identity(2, 64))


def damage(x: torch.Tensor, gradient: torch.Tensor, factors: Factors) -> float:
    """What an error costs: the mean of (gradient . error)^2."""
    off = round_trip(x, formats.parse("k4v4"), "key", factors) - x
    return float((gradient * off).sum(-1).square().mean())


def fitted(x: torch.Tensor, gradient: torch.Tensor) -> Factors:
    moments = Moments(*x.shape[1:])
    for part in range(0, len(x), 100):
        moments.add(x[part : part + 100], gradient[part : part + 100])
    return Factors(*fit(moments), *fit(moments))


def test_a_fit_spares_the_channels_that_matter() -> None:
    rng = draw(7)
    x = torch.randn(600, 2, 64, generator=rng) * torch.logspace(-0.5, 0.5, 64)
    gradient = torch.randn(600, 2, 64, generator=rng) * torch.logspace(0.5, -0.5, 64)
    factors = fitted(x[:400], gradient[:400])
    assert damage(x[400:], gradient[400:], factors) < 0.4 * damage(x[400:], gradient[400:], Factors.identity(2, 64))
    # Opposite slopes of importance and size: the best scale is (g / x)^(1/2), tenfold over the channels.
    assert factors.key_scale[0, 0] / factors.key_scale[0, -1] == pytest.approx(10, rel=0.3)


def test_a_fitted_mean_heeds_the_tokens_that_matter() -> None:
    x, gradient = torch.zeros(100, 1, 64), torch.ones(100, 1, 64)
    x[0], x[1:] = 5.0, -1.0
    gradient[0] = 30.0  # an attention sink: one token, most of the gradient
    factors = fitted(x, gradient)
    share = 900 / (900 + 99)
    assert torch.allclose(factors.key_mean, torch.full((1, 64), 5 * share - (1 - share)), atol=1e-3)


def test_dead_channels_and_heads_without_gradient_give_finite_positive_factors() -> None:
    x, gradient = torch.randn(50, 2, 64, generator=draw(9)), torch.randn(50, 2, 64, generator=draw(10))
    x[..., 5], gradient[..., 6] = 0, 0
    gradient[:, 1] = 0
    factors = fitted(x, gradient)
    for tensor in (factors.key_mean, factors.key_scale):
        assert tensor.isfinite().all()
    assert (factors.key_scale > 0).all()


@pytest.mark.parametrize("bad", ["shape", "nan"])
def test_moments_refuse_what_does_not_fit(bad: str) -> None:
    x, gradient = torch.ones(4, 2, 64), torch.ones(4, 2, 64)
    if bad == "shape":
        gradient = torch.ones(4, 3, 64)
    else:
        x[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="fit moments" if bad == "shape" else "not finite"):
        Moments(2, 64).add(x, gradient)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31)
)
@settings(max_examples=40)
def test_sums_of_a_forward_pass_give_mean_and_scale_as_the_formula_says(
    lengths: list[int], kv_heads: int, ratio: int, seed: int
) -> None:
    rng, dim, sums = draw(seed), 16, Sums(kv_heads, 16)
    spread = (torch.randn(3, 1, kv_heads, dim, generator=rng) / 2).exp()
    counted: list[list[torch.Tensor]] = [[], [], []]
    weights = []
    for length in lengths:
        q = torch.randn(length + SINKS, kv_heads * ratio, dim, generator=rng) * spread[0].repeat_interleave(ratio, 1)
        k, v = (torch.randn(length + SINKS, kv_heads, dim, generator=rng) * spread[i] + i for i in (1, 2))
        for x in (q, k, v):
            x[:SINKS] = 1e6  # first tokens are unlike all others, and do not count
        sums.add(q, k, v)
        for kept, x in zip(counted, (q, k, v), strict=True):
            kept.append(x[SINKS:].double())
        weights.append(1 / (1 + torch.arange(SINKS, SINKS + length, dtype=torch.float64) / 1024))
    q, k, v = (torch.cat(kept) for kept in counted)
    weight = torch.cat(weights)[:, None, None]

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).sum(0) / weight.sum()

    found = sums.factors()
    torch.testing.assert_close(found.key_mean.double(), mean(k), atol=1e-4, rtol=1e-4)
    assert not found.value_mean.any()
    if sum(lengths) < 20:
        return  # a variance of few tokens is all floor
    heads_of = mean(q.square()).view(kv_heads, ratio, dim).mean(1)
    for got, wanted in (
        (found.key_scale, heads_of / mean((k - mean(k)).square())),
        (found.value_scale, 1 / mean((v - mean(v)).square())),
    ):
        wanted = wanted**0.25
        wanted = wanted / wanted.log().mean(-1, keepdim=True).exp()
        # The floor, a thousandth of the mean of the head, moves the smallest by a little.
        torch.testing.assert_close(got.double(), wanted, rtol=0.1, atol=0)


def test_a_late_token_counts_less_than_an_early_one() -> None:
    sums = Sums(1, 2)
    key = torch.zeros(4096, 1, 2)
    key[:1024, 0, 0], key[1024:, 0, 1] = 1.0, 1.0
    sums.add(torch.ones(4096, 1, 2), key, key)
    early, late = sums.factors().key_mean[0].tolist()
    # A quarter of the tokens; the integral of 1 / (1 + p / 1024) gives log 2 / log 5 of the weight.
    assert abs(early - 0.431) < 0.01
    assert abs(early + late - 1) < 1e-6


def test_a_channel_that_never_moves_is_counted_and_gets_a_finite_scale() -> None:
    sums, rng = Sums(2, 8), draw(3)
    q, k, v = (torch.randn(50, heads, 8, generator=rng) for heads in (4, 2, 2))
    k[:, 1, 5] = 3.0
    v[:, 0, 2] = 0.0
    sums.add(q, k, v)
    assert sums.still() == 2
    found = sums.factors()
    assert found.key_mean[1, 5] == 3.0
    for scale in (found.key_scale, found.value_scale):
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert (scale <= 16).all()
        torch.testing.assert_close(scale.log().mean(-1), torch.zeros(2), atol=0.2, rtol=0)


@pytest.mark.parametrize(("which", "said"), [(0, "queries"), (1, "keys"), (2, "values")])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_sums_that_are_not_finite_give_no_factors(which: int, said: str, bad: float) -> None:
    sums, given_ = Sums(2, 8), [torch.ones(9, heads, 8) for heads in (4, 2, 2)]
    given_[which][7, 1, 3] = bad
    sums.add(*given_)
    with pytest.raises(ValueError, match=f"{said} are not finite in 1 channels"):
        sums.factors()


def test_sums_refuse_another_layer_and_nothing_at_all() -> None:
    sums = Sums(2, 8)
    with pytest.raises(ValueError, match="give longer text"):
        sums.factors()
    sums.add(*(torch.ones(SINKS, heads, 8) for heads in (4, 2, 2)))
    with pytest.raises(ValueError, match="give longer text"):
        sums.factors()
    for shapes in (
        ((9, 4, 8), (9, 3, 8), (9, 3, 8)),
        ((9, 3, 8), (9, 2, 8), (9, 2, 8)),
        ((9, 4, 8), (9, 2, 8), (9, 2, 4)),
    ):
        with pytest.raises(ValueError, match="do not fit a layer"):
            sums.add(*(torch.ones(shape) for shape in shapes))


def test_factors_are_replaced_in_place_and_share_no_memory() -> None:
    one, other = Factors.identity(2, 8), some_factors(2, 8, 1)
    names = ("key_mean", "key_scale", "value_mean", "value_scale")
    before = [getattr(one, name).data_ptr() for name in names]
    one.copy_(other)
    assert [getattr(one, name).data_ptr() for name in names] == before
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    assert len(set(before)) == 4
