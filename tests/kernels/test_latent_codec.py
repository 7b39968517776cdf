"""Latent cache: errors on realistic entries, and a check of the absorbed form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_batch import generator, some_entries, some_factors

from kvpilot_formats.latent import ENTRY, RANK, ROPE, names, parse
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.latent.reference import attend, round_trip

seeds = st.integers(0, 2**31)
every = st.sampled_from(names())
BOUNDS = {8: 1e-4, 4: 0.014}
"""Largest mean squared error, relative to the signal's power, by bits; measured: 4.6e-5, 0.0113 (decision 25)."""


def share_lost(x: torch.Tensor, back: torch.Tensor) -> float:
    return float((back - x).square().sum() / x.double().square().sum())


@settings(max_examples=20)
@given(seeds, every, st.integers(0, 40), st.sampled_from([1e-2, 1.0, 100.0]))
def test_the_error_stays_below_its_bound_with_outlier_channels(
    seed: int, name: str, outliers: int, size: float
) -> None:
    fmt, x = parse(name), some_entries(64, generator(seed), outliers, size)
    back = round_trip(x, fmt)
    assert share_lost(x[:, :RANK], back[:, :RANK]) < BOUNDS[fmt.bits]
    assert share_lost(x[:, RANK:], back[:, RANK:]) < BOUNDS[8]


@pytest.mark.parametrize("name", names())
def test_a_mean_that_all_latents_share_adds_no_error_if_the_factors_contain_it(name: str) -> None:
    rng, fmt = generator(4), parse(name)
    mean = 3 * torch.randn(ENTRY, generator=rng)
    x = torch.randn(128, ENTRY, generator=rng) + mean
    factors = LatentFactors(mean, torch.ones(ENTRY))
    plain, calibrated = (share_lost(x - mean, round_trip(x, fmt, f) - mean) for f in (None, factors))
    assert calibrated < BOUNDS[fmt.bits]
    assert plain > 3 * calibrated


@settings(max_examples=20)
@given(seeds, every)
def test_reading_an_entry_back_undoes_the_factors_that_storing_applied(seed: int, name: str) -> None:
    rng, fmt = generator(seed), parse(name)
    x, factors = some_entries(32, rng), some_factors(rng)
    back = round_trip(x, fmt, factors)
    stored, given_back = (((y - factors.mean) * factors.scale)[:, :RANK] for y in (x, back))
    assert share_lost(stored, given_back) < BOUNDS[fmt.bits]


@settings(max_examples=10)
@given(seeds, every)
def test_a_token_changes_no_other_and_a_nan_only_its_own_part(seed: int, name: str) -> None:
    fmt, x = parse(name), some_entries(4, generator(seed))
    hit = x.clone()
    hit[1, 7] = torch.nan
    hit[2, RANK + 3] = 1e4
    before, after = round_trip(x, fmt), round_trip(hit, fmt)
    assert torch.equal(after[[0, 3]], before[[0, 3]])
    assert after[1, :RANK].isnan().all()
    assert torch.equal(after[1, RANK:], before[1, RANK:])
    assert torch.equal(after[2, :RANK], before[2, :RANK])
    assert abs(after[2, RANK + 3] - 1e4) < 200


@pytest.mark.parametrize("name", names())
def test_zeros_read_back_as_zeros_and_constants_within_a_few_percent(name: str) -> None:
    fmt = parse(name)
    assert torch.equal(round_trip(torch.zeros(1, ENTRY), fmt), torch.zeros(1, ENTRY, dtype=torch.float64))
    constant = torch.full((1, ENTRY), 0.37)
    assert (round_trip(constant, fmt) - constant).norm() < 0.05 * constant.norm()


def unabsorbed(
    query: torch.Tensor, entries: torch.Tensor, up_key: torch.Tensor, up_value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the same attention by the model's definition: compute each head's keys and values from the latents.

    Args:
        query: [tokens, heads, nope + 64], not absorbed.
        entries: [context + tokens, 576].
        up_key: W_UK, [heads, nope, 512].
        up_value: W_UV, [heads, 512, value].
        scale: factor on the scores.

    Returns:
        float64 [tokens, heads, value].
    """
    latent, rope = entries[:, :RANK].double(), entries[:, RANK:].double()
    nope, q_rope = query[..., :-ROPE].double(), query[..., -ROPE:].double()
    key = torch.einsum("td,hnd->htn", latent, up_key.double())
    value = torch.einsum("td,hdv->htv", latent, up_value.double())
    scores = (torch.einsum("ihn,htn->hit", nope, key) + torch.einsum("ihr,tr->hit", q_rope, rope)) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(entries.shape[0] - query.shape[0] + 1)
    return torch.einsum("hit,htv->ihv", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@given(seeds, st.integers(1, 4), st.integers(0, 30), st.integers(1, 5), st.sampled_from([8, 24]))
def test_the_absorbed_form_equals_the_models_own_attention(
    seed: int, heads: int, context: int, tokens: int, nope: int
) -> None:
    rng = generator(seed)
    up_key, up_value = (torch.randn(heads, *shape, generator=rng) / 20 for shape in ((nope, RANK), (RANK, 16)))
    query = torch.randn(tokens, heads, nope + ROPE, generator=rng)
    entries = some_entries(context + tokens, rng)
    absorbed = torch.einsum("ihn,hnd->ihd", query[..., :nope].double(), up_key.double())
    out = attend(torch.cat([absorbed, query[..., nope:].double()], -1), entries, 0.07)
    wanted = unabsorbed(query, entries, up_key, up_value, 0.07)
    assert torch.allclose(torch.einsum("ihd,hdv->ihv", out, up_value.double()), wanted)


def test_factors_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is \(512,\); give one number for 576 channels"):
        LatentFactors(torch.zeros(ENTRY), torch.ones(RANK))
