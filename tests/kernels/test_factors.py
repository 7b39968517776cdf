"""Static factors: how they change a cache, and how they are fitted."""

from dataclasses import fields

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Moments, Observed, fit
from kvpilot_kernels.reference.attention import decode_reference, round_trip
from support.gpu_batch import DIMS, ordinals
from support.prefill_reference import prefill_reference

SERVED = ["int8", "k8v4", "k4v4", "k4v2", "k2v2"]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_factors(kv_heads: int, dim: int, seed: int) -> Factors:
    rng = draw(seed)

    def mean() -> torch.Tensor:
        return torch.randn(kv_heads, dim, generator=rng)

    return Factors(mean(), (mean() / 2).exp(), mean(), (mean() / 2).exp(), mean())


def stored(key: torch.Tensor, value: torch.Tensor, fmt: formats.Format, factors: Factors | None) -> PackedPages:
    """Store tokens in blocks 1, 2, ... of a cache whose bytes were all 0xFF."""
    tokens, kv_heads, dim = key.shape
    cache = torch.full((tokens // 16 + 2, kv_heads, 16, fmt.row_bytes(dim)), 255, dtype=torch.uint8)
    pages = PackedPages(cache, fmt, dim, factors)
    pages.store(key, value, 16 + torch.arange(tokens), ordinals=ordinals(0, tokens))
    return pages


@given(st.sampled_from(SERVED), st.sampled_from(DIMS), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=25)
def test_factors_of_mean_0_and_scale_1_change_no_bit(name: str, dim: int, tokens: int, seed: int) -> None:
    rng, fmt = draw(seed), formats.parse(name)
    key, value = (torch.randn(tokens, 2, dim, generator=rng) for _ in "kv")
    query = torch.randn(1, 6, dim, generator=rng)
    table, lens = 1 + torch.arange(tokens // 16 + 1)[None], torch.tensor([tokens])
    plain, identity = (stored(key, value, fmt, f) for f in (None, Factors.identity(2, dim)))
    assert torch.equal(plain.decode(query, table, lens, dim**-0.5), identity.decode(query, table, lens, dim**-0.5))
    for a, b in zip(plain.read(table[0], tokens), identity.read(table[0], tokens), strict=True):
        assert torch.equal(a, b)


@given(
    st.sampled_from(SERVED), st.sampled_from(DIMS), st.integers(1, 50), st.sampled_from([1, 3, 7]),
    st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=40)
def test_decode_with_factors_equals_the_reference(
    name: str, dim: int, tokens: int, ratio: int, mean_only: bool, seed: int
) -> None:
    rng, fmt, factors = draw(seed), formats.parse(name), some_factors(2, dim, seed + 1)
    if mean_only:
        one = torch.ones(2, dim)
        factors = Factors(factors.key_mean, one, factors.value_mean, one, factors.key_first)
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


def test_a_mean_that_all_tokens_share_adds_no_error_if_the_factors_contain_it() -> None:
    fmt, rng = formats.parse("k4v4"), draw(5)
    offset = 10 * torch.randn(2, 64, generator=rng)
    x = torch.randn(200, 2, 64, generator=rng)
    one, zero = torch.ones(2, 64), torch.zeros(2, 64)
    known = round_trip(x + offset, fmt, "key", Factors(offset, one, zero, one)) - offset
    calm = round_trip(x, fmt, "key")
    unknown = round_trip(x + offset, fmt, "key") - offset
    assert (known - x).square().mean() < 1.01 * (calm - x).square().mean()
    assert (unknown - x).square().mean() > 20 * (known - x).square().mean()


def test_the_error_for_factors_of_another_shape_has_the_right_shape() -> None:
    fmt = formats.parse("k4v4")
    cache = torch.zeros(2, 3, 16, fmt.row_bytes(64), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[kv_heads, head_dim\] = \[3, 64\]"):
        PackedPages(cache, fmt, 64, Factors.identity(2, 64))


def damage(x: torch.Tensor, gradient: torch.Tensor, factors: Factors) -> float:
    """Return the damage of an error: the mean of (gradient . error)^2."""
    off = round_trip(x, formats.parse("k4v4"), "key", factors) - x
    return float((gradient * off).sum(-1).square().mean())


def fitted(x: torch.Tensor, gradient: torch.Tensor) -> Factors:
    moments = Moments(*x.shape[1:])
    for part in range(0, len(x), 100):
        moments.add(x[part : part + 100], gradient[part : part + 100].square())
    return Factors(*fit(moments), *fit(moments))


def test_a_fit_reduces_the_error_of_costly_channels() -> None:
    rng = draw(7)
    x = torch.randn(600, 2, 64, generator=rng) * torch.logspace(-0.5, 0.5, 64)
    gradient = torch.randn(600, 2, 64, generator=rng) * torch.logspace(0.5, -0.5, 64)
    factors = fitted(x[:400], gradient[:400])
    assert damage(x[400:], gradient[400:], factors) < 0.4 * damage(x[400:], gradient[400:], Factors.identity(2, 64))
    # Importance g and size x have opposite slopes. The best scale is (g / x)^(1/2), which spans a factor of ten over
    # the channels.
    assert factors.key_scale[0, 0] / factors.key_scale[0, -1] == pytest.approx(10, rel=0.3)


def test_a_fitted_mean_weights_tokens_by_their_cost() -> None:
    x, gradient = torch.zeros(100, 1, 64), torch.ones(100, 1, 64)
    x[0], x[1:] = 5.0, -1.0
    gradient[0] = 30.0  # This is an attention sink: one token has most of the gradient.
    factors = fitted(x, gradient)
    share = 900 / (900 + 99)
    assert torch.allclose(factors.key_mean, torch.full((1, 64), 5 * share - (1 - share)), atol=1e-3)


def test_channels_without_variance_or_cost_get_finite_positive_factors() -> None:
    x, gradient = torch.randn(50, 2, 64, generator=draw(9)), torch.randn(50, 2, 64, generator=draw(10))
    x[..., 5], gradient[..., 6] = 0, 0
    gradient[:, 1] = 0
    factors = fitted(x, gradient)
    for tensor in (factors.key_mean, factors.key_scale):
        assert tensor.isfinite().all()
    assert (factors.key_scale > 0).all()


@pytest.mark.parametrize("bad", ["shape", "nan"])
def test_the_sums_for_a_fit_refuse_tensors_of_the_wrong_shape_or_with_nan(bad: str) -> None:
    x, gradient = torch.ones(4, 2, 64), torch.ones(4, 2, 64)
    if bad == "shape":
        gradient = torch.ones(4, 3, 64)
    else:
        x[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="fit moments" if bad == "shape" else "not finite"):
        Moments(2, 64).add(x, gradient)


def observed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float = 0.5) -> Observed:
    found = Observed(*key.shape[1:])
    found.add(query, key, value, scale)
    return found


def told_by_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recent: int, scale: float, softcap: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return squared gradients of one head's keys [tokens, D] and values [tokens], directly from the formula."""
    for_key, for_value = torch.zeros_like(key), torch.zeros(len(key), dtype=key.dtype)
    for i in range(len(query)):
        first = max(0, i - window + 1)
        scores, slope = key[first : i + 1] @ query[i] * scale, 1.0
        if softcap:
            slope, scores = 1 - (scores / softcap).tanh() ** 2, softcap * (scores / softcap).tanh()
        p = scores.softmax(0)
        out = p @ value[first : i + 1]
        change = p * slope * (value[first : i + 1] - out).norm(dim=-1)
        for t in range(first, i - recent + 1):
            for_key[t] += (change[t - first] * query[i]) ** 2
            for_value[t] += p[t - first] ** 2
    return for_key, for_value


@given(
    st.integers(3, 40), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 3.0]), st.integers(1, 60),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_observed_costs_equal_the_formula(
    tokens: int, kv_heads: int, ratio: int, softcap: float, window: int, seed: int
) -> None:
    rng, dim = draw(seed), 8
    query = torch.randn(tokens, kv_heads * ratio, dim, generator=rng)
    key, value = (torch.randn(tokens, kv_heads, dim, generator=rng) for _ in "kv")
    found = Observed(kv_heads, dim)
    found.add(query, key, value, 0.7, softcap, window)
    keys, values = Moments(kv_heads, dim), Moments(kv_heads, dim)
    of_keys, of_values = torch.zeros_like(key).double(), torch.zeros(tokens, kv_heads).double()
    for head in range(kv_heads * ratio):
        kv = head // ratio
        one = (x.double() for x in (query[:, head], key[:, kv], value[:, kv]))
        for_key, for_value = told_by_attention(*one, tokens // 8, 0.7, softcap, window)
        of_keys[:, kv] += for_key
        of_values[:, kv] += for_value
    assume(of_keys[1:].sum((0, 2)).min() > 1e-3)  # A query that attends only to itself yields only rounding errors.
    keys.add(key[1:], of_keys[1:])
    values.add(value, of_values[..., None].expand(value.shape))
    factors = found.factors()
    for got, wanted in zip(
        (factors.key_mean, factors.key_scale, factors.value_mean, factors.value_scale),
        (*fit(keys), *fit(values)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)


def test_the_first_token_has_its_own_mean_and_does_not_change_the_other_factors() -> None:
    rng, fmt = draw(11), formats.parse("k4v4")
    key, value = torch.randn(400, 1, 64, generator=rng), torch.randn(400, 1, 64, generator=rng)
    sink = 20 * torch.randn(1, 64, generator=rng)
    query = torch.randn(400, 1, 64, generator=rng) + sink / 20
    others = observed(query, key, value, 0.05).factors()
    key[0] = sink + 0.1 * key[0]
    seen = observed(query, key, value, 0.05)
    common = seen.factors()
    assert torch.equal(common.key_first, common.key_mean)
    seen.add_first(sink + 0.1 * torch.randn(30, 1, 64, generator=rng))
    factors = seen.factors()
    assert max(float(one.key_mean.abs().max()) for one in (factors, others)) < 1 < float(sink.abs().mean())
    off, before = ((round_trip(key[:1], fmt, "key", one) - key[:1]).norm() for one in (factors, common))
    assert off < 0.05 * before
    # At any other position the key uses the common mean.
    second = round_trip(key[[1, 0]], fmt, "key", factors)[1:]
    assert torch.equal(second, round_trip(key[:1], fmt, "key", common))


def test_a_constant_channel_gets_a_finite_scale() -> None:
    rng = draw(3)
    q, k, v = (torch.randn(50, heads, 8, generator=rng) for heads in (4, 2, 2))
    k[:, 1, 5] = 3.0
    v[:, 0, 2] = 0.0
    seen = observed(q, k, v)
    found = seen.factors()
    assert found.key_mean[1, 5] == pytest.approx(3.0)
    for scale in (found.key_scale, found.value_scale):
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert (scale <= 16).all()


@pytest.mark.parametrize(("which", "said"), [(0, "queries"), (1, "keys"), (2, "values")])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_fit_to_values_that_are_not_finite_is_an_error(which: int, said: str, bad: float) -> None:
    given_ = [torch.ones(9, heads, 8) for heads in (4, 2, 2)]
    given_[which][7, 1, 3] = bad
    seen = observed(*given_)
    with pytest.raises(ValueError, match=f"{said} are not finite in 1 channels"):
        seen.factors()


def test_a_fit_to_tensors_of_another_layer_or_to_none_is_refused() -> None:
    seen = Observed(2, 8)
    with pytest.raises(ValueError, match="no token was counted"):
        seen.factors()
    for shapes in (
        ((9, 4, 8), (9, 3, 8), (9, 3, 8)),
        ((9, 3, 8), (9, 2, 8), (9, 2, 8)),
        ((9, 4, 8), (9, 2, 8), (9, 2, 4)),
    ):
        with pytest.raises(ValueError, match="do not fit a layer"):
            seen.add(*(torch.ones(shape) for shape in shapes), 1.0)


def test_factors_are_replaced_in_place_and_share_no_memory() -> None:
    one, other = Factors.identity(2, 8), some_factors(2, 8, 1)
    names = [field.name for field in fields(Factors)]
    before = [getattr(one, name).data_ptr() for name in names]
    one.copy_(other)
    assert [getattr(one, name).data_ptr() for name in names] == before
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    assert len(set(before)) == len(names) == 5
