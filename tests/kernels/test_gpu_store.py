"""`store` writes the same bytes as the CPU code, changes no other byte, and rotates queries for decode."""

import pytest
import torch
from decided import decided
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch.pages import LOG2_E, GpuPages, Plan, Shape
from kvpilot_kernels.gpu.layout.mma import key_planes
from kvpilot_kernels.gpu.layout.page import side_layouts
from kvpilot_kernels.reference.hadamard import rotation
from kvpilot_kernels.reference.quantize import encode, pack
from support.gpu_batch import CPU, DIMS, generator, ordinals, poisoned, some_factors

KV_HEADS, RATIO, BLOCKS = 2, 3, 5
names, dims = st.sampled_from(formats.own_names()), st.sampled_from(DIMS)
block_sizes, seeds = st.sampled_from([16, 48, 64]), st.integers(0, 2**31)


def scattered_slots(tokens: int, block_size: int, rng: torch.Generator, padding: float = 0.0) -> torch.Tensor:
    """Return slots, int64 [tokens], in random order. No slot occurs twice, and some are padding."""
    slots = torch.randperm(BLOCKS * block_size, generator=rng)[:tokens]
    return torch.where(torch.rand(len(slots), generator=rng) < padding, -1 - slots, slots)


def whole(tokens: int, dim: int, rng: torch.Generator) -> torch.Tensor:
    """Return keys or values [tokens, kv_heads, dim]: whole numbers times a power of 2, so that sums are exact."""
    x = torch.randint(-100, 101, (tokens, KV_HEADS, dim), generator=rng).float()
    x[torch.rand(tokens, generator=rng) < 0.1] = 0.0
    return x * torch.randint(-18, 13, (tokens, 1, 1), generator=rng).float().exp2()


def store(cache: torch.Tensor, fmt: formats.Format, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor,
          factors: Factors | None = None, ordinals: torch.Tensor | None = None) -> None:  # fmt: skip
    """Store tokens by the GPU's kernel, without queries."""
    dim = key.shape[-1]
    shape = Shape(fmt, dim, KV_HEADS, RATIO, cache.shape[2], CPU)
    query = torch.full((len(key), KV_HEADS * RATIO, dim), torch.nan)
    pages = GpuPages(cache, shape, factors or Factors.identity(KV_HEADS, dim))
    pages.store(query, key, value, slots, Plan(shape, 1), 0, 1.0, ordinals=ordinals)


def rotated_once(x: torch.Tensor, fmt: formats.Format) -> torch.Tensor:
    """Return rows of whole numbers. Their rotation is exact except for one division by the square root of D."""
    dim = x.shape[-1]
    return (x @ rotation(dim).sign()) * fmt.row_dim(dim) ** -0.5


def decided_rows(x: torch.Tensor, fmt: formats.Format, bits: int) -> torch.Tensor:
    """Replace rows whose bytes depend on the order of a sum with zeros."""
    rows = decided(rotated_once(x, fmt), bits, fmt.group_size(x.shape[-1]))
    return torch.where(rows[..., None], x, 0.0)


def store_rounded_once(cache: torch.Tensor, fmt: formats.Format, key: torch.Tensor, value: torch.Tensor,
                       slots: torch.Tensor) -> None:  # fmt: skip
    """Store whole numbers by the reference code, whose bytes are exact."""
    pages, dim = PackedPages(cache, fmt, key.shape[-1]), key.shape[-1]
    key, value, slots = key[slots >= 0], value[slots >= 0], slots[slots >= 0]
    for x, bits, codes_at, meta_at in ((key, fmt.key.bits, pages.key_codes, pages.key_meta),
                                       (value, fmt.value.bits, pages.value_codes, pages.value_meta)):  # fmt: skip
        codes, meta = encode(rotated_once(x, fmt), bits, fmt.group_size(dim))
        codes_at[slots // cache.shape[2], :, slots % cache.shape[2]] = pack(codes, bits)
        meta_at[slots // cache.shape[2], :, slots % cache.shape[2]] = meta


@settings(max_examples=12)
@given(names, dims, block_sizes, st.integers(1, 40), seeds)
def test_store_writes_the_references_bytes_and_changes_no_other(
    name: str, dim: int, block_size: int, tokens: int, seed: int
) -> None:
    rng, fmt = generator(seed), formats.parse(name)
    ours, theirs = (poisoned(BLOCKS, KV_HEADS, block_size, fmt, dim) for _ in range(2))
    key, value = (decided_rows(whole(tokens, dim, rng), fmt, side.bits) for side in (fmt.key, fmt.value))
    slots = scattered_slots(tokens, block_size, rng, padding=0.2)
    store(ours, fmt, key, value, slots)
    store_rounded_once(theirs, fmt, key, value, slots)
    assert torch.equal(ours, theirs)


@settings(max_examples=8)
@given(names, dims, block_sizes, st.integers(1, 40), st.booleans(), st.sampled_from([torch.float16, torch.float32]),
       seeds)  # fmt: skip
def test_stored_tokens_read_back_are_as_exact_as_the_cpus(
    name: str, dim: int, block_size: int, tokens: int, calibrated: bool, dtype: torch.dtype, seed: int
) -> None:
    rng, fmt = generator(seed), formats.parse(name)
    factors = some_factors(KV_HEADS, dim, rng) if calibrated else Factors.identity(KV_HEADS, dim)
    key, value = (torch.randn(tokens, KV_HEADS, dim, generator=rng).to(dtype) for _ in "kv")
    ours, theirs = (poisoned(1 + -(-tokens // block_size), KV_HEADS, block_size, fmt, dim) for _ in range(2))
    slots, numbers = block_size + torch.arange(tokens), ordinals(0, tokens)
    table = 1 + torch.arange(-(-tokens // block_size))
    store(ours, fmt, key, value, slots, factors, numbers)
    cpu = PackedPages(theirs, fmt, dim, factors)
    cpu.store(key, value, slots, ordinals=numbers)
    # Another order of sums may move an element across a boundary. Rarely it changes a group's range, and so all its 64
    # codes. The accuracy stays the same.
    assert (ours != theirs).sum() <= 2e-3 * ours.numel() + 2 * 66
    read, wanted = PackedPages(ours, fmt, dim, factors).read(table, tokens), cpu.read(table, tokens)
    for x, mine, his in zip((key, value), read, wanted, strict=True):
        x = x.float()
        assert (mine - x).norm() <= (his - x).norm() * 1.001


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's minimum under Triton's interpreter
@settings(max_examples=8)
@given(names, dims, seeds)
def test_a_nan_changes_only_its_own_token_and_head(name: str, dim: int, seed: int) -> None:
    rng, fmt, tokens = generator(seed), formats.parse(name), 20
    ours, theirs = (poisoned(BLOCKS, KV_HEADS, 16, fmt, dim) for _ in range(2))
    key, value = (decided_rows(whole(tokens, dim, rng), fmt, side.bits) for side in (fmt.key, fmt.value))
    slots = scattered_slots(tokens, 16, rng)
    key[3, 1, 7] = value[18, 0, dim - 1] = torch.nan
    store(ours, fmt, key, value, slots)
    store_rounded_once(theirs, fmt, key, value, slots)
    assert torch.equal(ours, theirs)
    pages = PackedPages(ours, fmt, dim)
    for meta, token, head in ((pages.key_meta, 3, 1), (pages.value_meta, 18, 0)):
        meta = meta[slots // 16, :, slots % 16].int() & 0xFFFF
        assert ((meta >> 5 == 0x7E0).any(-1).nonzero() == torch.tensor([token, head])).all()


@pytest.mark.parametrize("name", formats.own_names())
def test_query_key_and_value_may_be_views_of_one_buffer(name: str) -> None:
    rng, fmt, dim, tokens = generator(1), formats.parse(name), 64, 20
    fused = torch.randn(tokens, KV_HEADS * (RATIO + 2) * dim + 8, generator=rng)
    parts = fused[:, 8:].split([KV_HEADS * RATIO * dim, KV_HEADS * dim, KV_HEADS * dim], dim=1)
    query, key, value = (x.view(tokens, -1, dim) for x in parts)
    shape, caches, plans = Shape(fmt, dim, KV_HEADS, RATIO, 16, CPU), [], []
    for q, k, v in ((query, key, value), (query.contiguous(), key.contiguous(), value.contiguous())):
        caches.append(poisoned(BLOCKS, KV_HEADS, 16, fmt, dim))
        plans.append(Plan(shape, tokens))
        pages = GpuPages(caches[-1], shape, Factors.identity(KV_HEADS, dim))
        pages.store(q, k, v, torch.arange(tokens) + 30, plans[-1], tokens, 0.125)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(plans[0].rotated, plans[1].rotated)


def test_pages_may_have_gaps_and_heads_may_come_before_blocks() -> None:
    rng, fmt, dim = generator(2), formats.parse("k4v2"), 96
    row = fmt.row_bytes(dim)
    buffer = torch.full((KV_HEADS, BLOCKS, 16 * row + 64), 255, dtype=torch.uint8)
    apart = buffer[..., : 16 * row].view(KV_HEADS, BLOCKS, 16, row).transpose(0, 1)
    close = poisoned(BLOCKS, KV_HEADS, 16, fmt, dim)
    key, value, slots = whole(30, dim, rng), whole(30, dim, rng), scattered_slots(30, 16, rng)
    store(apart, fmt, key, value, slots)
    store(close, fmt, key, value, slots)
    assert torch.equal(apart, close)
    assert (buffer[..., 16 * row :] == 255).all()


@settings(max_examples=16)
@given(names, dims, st.sampled_from([1, 3, 7, 16]), st.integers(1, 36), st.integers(0, 36), seeds)
def test_decoding_queries_are_scaled_rotated_and_converted_to_16_bit_integers_with_sums(
    name: str, dim: int, ratio: int, tokens: int, decodes: int, seed: int
) -> None:
    rng, fmt, decodes = generator(seed), formats.parse(name), min(decodes, tokens)
    factors, shape = some_factors(KV_HEADS, dim, rng), Shape(fmt, dim, KV_HEADS, ratio, 16, CPU)
    query = torch.randn(tokens, KV_HEADS * ratio, dim, generator=rng)
    query[0, 0, 0] = 300.0
    nothing, plan = torch.zeros(tokens, KV_HEADS, dim), Plan(shape, tokens)
    plan.rotated.fill_(85)
    plan.sums.fill_(2**20)
    for scratch in (plan.units, plan.apart):
        scratch.fill_(torch.nan)
    pages = GpuPages(poisoned(1, KV_HEADS, 16, fmt, dim), shape, factors)
    pages.store(query, nothing, nothing, torch.full((tokens,), -1), plan, decodes, dim**-0.5)
    wanted = query.double() / factors.key_scale.double().repeat_interleave(ratio, 0)
    wanted = (wanted @ rotation(dim, torch.float64) * (dim**-0.5 * LOG2_E))[:decodes]
    row, group = wanted.shape[-1], fmt.group_size(dim)
    factors_of, signed = torch.ones(row), torch.zeros(row)
    for _, plane, at, first, _, factor in key_planes(side_layouts(fmt, dim, 16, 0)[0]):
        here = (torch.arange(row) // (row * fmt.key.bits // 8) == plane) & (torch.arange(row) // group == at)
        factors_of[here], signed[here] = factor, float(first + fmt.key.bits == 8)
    found = plan.rotated[:decodes].int()
    units = plan.units[:decodes, :, None].double()
    whole = found[:, :, 0] * 256 + found[:, :, 1]
    # Half a unit, plus float32's error: a few times 2^-23 of the largest element.
    assert (whole * units - wanted / factors_of).abs().le(0.6 * units).all()
    assert torch.allclose(units[..., 0] * 32512, (wanted / factors_of).abs().amax(-1), rtol=1e-4)
    sums = torch.stack([*(found * signed).unbind(2), whole * factors_of], 3).unflatten(2, (-1, group)).sum(3)
    assert torch.equal(plan.sums[:decodes].long(), sums.long())
    apart = (factors.key_first - factors.key_mean).double().repeat_interleave(ratio, 0)
    apart = (query.double() * apart).sum(-1) * (dim**-0.5 * LOG2_E)
    assert torch.allclose(plan.apart[:decodes].double(), apart[:decodes], rtol=1e-4, atol=1e-4)
    assert plan.apart[decodes:].isnan().all()
    assert plan.units[decodes:].isnan().all()
    assert (plan.rotated[decodes:] == 85).all()
    assert (plan.sums[decodes:] == 2**20).all()
    assert (pages.cache == 255).all()


def test_a_step_without_tokens_launches_nothing() -> None:
    fmt = formats.parse("int8")
    cache = poisoned(1, KV_HEADS, 16, fmt, 64)
    nothing = torch.zeros(0, KV_HEADS, 64)
    store(cache, fmt, nothing, nothing, torch.zeros(0, dtype=torch.int64))
    assert (cache == 255).all()
