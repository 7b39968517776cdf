"""Kernels of latent pages on a CPU: bytes equal the CPU code's, and decode is close to the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_batch import CPU, LatentBatch, generator, poisoned, rotated, some_entries, some_factors

from kvpilot_formats.latent import ENTRY, RANK, names, parse
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.gpu.mla import decode as latent_decode
from kvpilot_kernels.gpu.mla import pages as latent_pages
from kvpilot_kernels.gpu.mla import tuning as latent_tuning
from kvpilot_kernels.gpu.mla.pages import LOG2_E, GpuLatentPages, LatentPlan, LatentShape
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.latent.reference import attend, round_trip
from support.gluon_eager import EagerKernel

BLOCKS, HEADS = 5, 3
every, seeds = st.sampled_from(names()), st.integers(0, 2**31)
# (block size, tile): a tile divides its block.
cuts = st.sampled_from([(16, 16), (32, 16), (32, 32), (48, 16), (64, 64)])


def store(cache: torch.Tensor, name: str, entries: torch.Tensor, slots: torch.Tensor,
          factors: LatentFactors | None = None) -> None:  # fmt: skip
    """Store entries by the GPU's kernel."""
    shape = LatentShape(parse(name), HEADS, cache.shape[1], CPU)
    GpuLatentPages(cache, shape, factors).store(entries[:, :RANK], entries[:, RANK:], slots)


@settings(max_examples=12)
@given(every, st.sampled_from([16, 48, 64]), st.integers(1, 40), st.booleans(),
       st.sampled_from([torch.float16, torch.float32]), seeds)  # fmt: skip
def test_store_writes_the_same_bytes_as_the_cpu(
    name: str, block_size: int, tokens: int, calibrated: bool, dtype: torch.dtype, seed: int
) -> None:
    rng, fmt = generator(seed), parse(name)
    entries, factors = some_entries(tokens, rng).to(dtype), some_factors(rng) if calibrated else None
    slots = torch.randperm(BLOCKS * block_size, generator=rng)[:tokens]
    slots = torch.where(torch.rand(tokens, generator=rng) < 0.2, -1 - slots, slots)
    ours, theirs = poisoned(BLOCKS, block_size, fmt), poisoned(BLOCKS, block_size, fmt)
    store(ours, name, entries, slots, factors)
    LatentPages(theirs, fmt, factors).store(entries[:, :RANK], entries[:, RANK:], slots)
    blank = poisoned(BLOCKS, block_size, fmt)
    # Stored zeros contain no byte 255, so each byte that is still 255 (the poison) was never written.
    LatentPages(blank, fmt).store(0 * entries[:, :RANK], 0 * entries[:, RANK:], slots)
    assert (ours[blank == 255] == 255).all()
    # Another order of sums may move an element across a boundary. Rarely it changes a group's range, and so all its 64
    # codes. The accuracy stays the same.
    assert (ours != theirs).sum() <= 2e-3 * ours.numel() + 2 * 66
    read = [LatentPages(x, fmt, factors).read(torch.arange(BLOCKS), BLOCKS * block_size) for x in (ours, theirs)]
    kept = slots >= 0
    errors = [(x[slots[kept]] - entries[kept].float()).norm() for x in read]
    assert errors[0] <= errors[1] * 1.002


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # Triton's interpreter uses numpy, which warns.
@pytest.mark.parametrize("name", names())
def test_a_nan_spoils_only_the_latent_or_the_rope_part_of_one_token(name: str) -> None:
    rng, fmt = generator(3), parse(name)
    entries, slots = some_entries(20, rng), torch.randperm(BLOCKS * 16, generator=rng)[:20]
    whole, hit = poisoned(BLOCKS, 16, fmt), poisoned(BLOCKS, 16, fmt)
    store(whole, name, entries, slots)
    entries[3, 7] = entries[18, ENTRY - 1] = torch.nan
    store(hit, name, entries, slots)
    before, after = (LatentPages(x, fmt).read(torch.arange(BLOCKS), BLOCKS * 16)[slots] for x in (whole, hit))
    assert after[3, :RANK].isnan().all()
    assert after[18, RANK:].isnan().all()
    before[3, :RANK] = before[18, RANK:] = 0
    assert torch.equal(after.nan_to_num(0.0), before)


@settings(max_examples=10)
@given(
    st.sampled_from([1, 3, 16, 20]), st.integers(1, 20), st.integers(0, 20), st.sampled_from([1e-4, 1.0, 1e4]), seeds
)
def test_queries_of_any_size_are_prepared_for_decode(
    heads: int, tokens: int, decodes: int, size: float, seed: int
) -> None:
    rng, decodes = generator(seed), min(decodes, tokens)
    factors, shape = some_factors(rng), LatentShape(parse("mla4"), heads, 16, CPU)
    query = torch.randn(tokens, heads, ENTRY, generator=rng) * size
    plan, cache = LatentPlan(shape, tokens), poisoned(1, 16, parse("mla4"))
    plan.rotated.fill_(torch.nan)
    plan.sums.fill_(torch.nan)
    # As in vLLM, absorbed queries of one token are adjacent, and each contains its RoPE part.
    wide = torch.cat([torch.full((tokens, heads, 32), torch.nan), query[..., RANK:]], -1)
    GpuLatentPages(cache, shape, factors).prepare(
        query[:decodes, :, :RANK].contiguous(), wide[:decodes, :, 32:], plan, 0.07
    )
    wanted = rotated(query.double() / factors.scale) * (0.07 * LOG2_E)
    unit, total, rope_total = plan.sums.double().unbind(1)
    off = plan.rotated.double() * unit[..., None] - wanted
    limit = wanted.abs() * 2**-10 + wanted.abs().amax(-1, keepdim=True) * 1e-6
    assert (off.abs() <= limit)[:decodes].all()
    for part, sums in ((plan.rotated[..., :RANK], total), (plan.rotated[..., RANK:], rope_total)):
        assert torch.allclose(part.double().sum(-1)[:decodes], sums[:decodes], atol=0.05)
    assert plan.rotated[decodes:].isnan().all()
    assert plan.sums[decodes:].isnan().all()
    assert (cache == 255).all()


def assert_equals_reference(batch: LatentBatch) -> None:
    query = batch.queries()
    out = batch.decode(query)
    for i, n in enumerate(batch.lengths):
        if n == 0:
            assert torch.equal(out[i], torch.zeros_like(out[i]))
            continue
        wanted = attend(query[i, None], round_trip(batch.entries[i], batch.fmt, batch.factors), batch.scale)[0]
        batch.assert_within_rounding(out[i], wanted, query[i], i)


# The format decides how a tile is unpacked, and the number of heads decides how many programs share a tile. The cases
# below have every way to unpack and every number of programs.
@pytest.mark.parametrize(
    ("name", "heads"), [("mla4", 1), ("mla8", 8), ("mla8", 16), ("mla4", 20), ("mla8", 64), ("mla4", 128)]
)
def test_decode_equals_the_reference_for_every_models_heads(name: str, heads: int) -> None:
    assert_equals_reference(LatentBatch(name, [40, 0, 1], 3, heads))


@settings(max_examples=12)
@given(every, st.lists(st.integers(0, 150), min_size=1, max_size=3), seeds, st.sampled_from([1, 3, 7, 12, 33]), cuts,
       st.integers(2, 4), st.sampled_from([4, 8]), st.integers(1, 3), st.booleans())  # fmt: skip
def test_decode_equals_the_reference_for_every_division_into_splits(
    name: str, lengths: list[int], seed: int, heads: int, cut: tuple[int, int], stages: int, warps: int, wave: int,
    calibrated: bool,
) -> None:  # fmt: skip
    assert_equals_reference(LatentBatch(name, lengths, seed, heads, *cut, stages, warps, wave, calibrated))


@pytest.mark.parametrize("splits", [8, 33, 70])
def test_a_long_sequence_equals_the_reference_for_every_kind_of_merge(splits: int) -> None:
    assert len({latent_tuning.merging(n) for n in (8, 33, 70)}) == 3
    assert_equals_reference(LatentBatch("mla8", [1130], 7, heads=2, wave=splits))


@pytest.mark.parametrize("wave", [1, 132, 264, 528])
def test_a_warm_up_with_powers_of_two_runs_every_kind_of_merge(wave: int) -> None:
    for most in (1, 7, 64, 300):
        warmed = {*(2**i for i in range(most.bit_length())), most}
        ways = [{latent_tuning.merging(wave // n) for n in counts} for counts in (warmed, range(1, most + 1))]
        assert ways[0] == ways[1]


@pytest.mark.parametrize("name", names())
def test_a_decode_that_starts_while_queries_are_prepared_reads_them_afterwards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = LatentBatch(name, [90, 0, 1], 9, wave=4)
    query, plan = batch.queries(), batch.plan()
    whole = batch.decode(query)
    batch.prepare(query, plan)
    scratch = (plan.rotated, plan.sums)
    ready = [x.clone() for x in scratch]
    waits = []

    def hold_back() -> None:
        waits.append(0)
        for x in scratch:
            x.fill_(torch.nan)

    def arrive() -> None:
        waits[-1] += 1
        for x, as_prepared in zip(scratch, ready, strict=True):
            x.copy_(as_prepared)

    monkeypatch.setattr(
        latent_pages, "latent_decode_kernel", EagerKernel(latent_decode, "latent_decode_kernel", hold_back, arrive)
    )
    batch.shape.overlap = True
    batch.pages.attend(batch.table, len(batch.lengths), plan)
    assert waits == [1] * len(plan.splits), "a program that does not wait lets what comes after start too soon"
    batch.shape.overlap = False
    out = torch.full_like(whole, torch.nan)
    batch.pages.merge(len(batch.lengths), plan, out)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 30.0, 500.0])
@pytest.mark.parametrize("name", names())
def test_latents_may_be_arbitrarily_small_or_large(name: str, size: float) -> None:
    assert_equals_reference(LatentBatch(name, [100], 5, size=size))


def test_one_token_out_of_many_can_take_all_the_weight() -> None:
    batch = LatentBatch("mla4", [200], 5, heads=2)
    query = batch.entries[0][130].expand(1, 2, -1) * 5
    wanted = attend(query[:1], round_trip(batch.entries[0], batch.fmt), batch.scale)[0]
    assert ((batch.decode(query)[0] - wanted).norm(dim=-1) < 1e-3 * wanted.norm(dim=-1)).all()


def test_a_token_of_zeros_among_others_counts_with_its_weight() -> None:
    batch = LatentBatch("mla4", [30], 6)
    nothing = torch.zeros(1, ENTRY)
    slot = batch.table[0, 0].long()[None] * 16 + 7
    batch.cpu.store(nothing[:, :RANK], nothing[:, RANK:], slot)
    batch.entries[0][7] = 0.0
    assert_equals_reference(batch)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_nan_query_gives_nan_and_changes_no_other_output() -> None:
    batch = LatentBatch("mla8", [40], 8)
    query = batch.queries()
    whole = batch.decode(query)
    query[0, 1, 5] = torch.nan
    out = batch.decode(query)
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, [0, 2]], whole[0, [0, 2]])


def test_a_stored_nan_affects_only_its_own_sequence() -> None:
    batch = LatentBatch("mla4", [40, 30], 8)
    query = batch.queries()
    whole, broken = batch.decode(query), batch.entries[0][:1].clone()
    broken[0, 3] = torch.nan
    batch.cpu.store(broken[:, :RANK], broken[:, RANK:], batch.table[0, :1].long() * 16)
    out = batch.decode(query)
    assert out[0].isnan().all()
    assert torch.equal(out[1], whole[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_out_may_be_a_part_of_a_wider_buffer_and_a_step_smaller_than_the_plan(dtype: torch.dtype) -> None:
    batch = LatentBatch("mla4", [33, 20, 7], 1)
    query, plan = batch.queries(), batch.plan()
    buffer = torch.full((3, 8 * RANK), 7.0, dtype=dtype)
    plan.update(batch.lens[:2])
    batch.prepare(query[:2], plan)
    out = buffer[:, : 3 * RANK].view(3, 3, RANK)
    batch.pages.decode(batch.table[:2], batch.lens[:2], plan, out[:2])
    wanted = batch.cpu.decode(query[..., :RANK], query[..., RANK:], batch.table, batch.lens, batch.scale)
    assert ((out[:2] - wanted[:2]).norm(dim=-1) < 2e-3 * wanted[:2].norm(dim=-1)).all()
    assert (buffer[2] == 7).all()
    assert (buffer[:, 3 * RANK :] == 7).all()


@settings(max_examples=8)
@given(
    every, st.sampled_from([16, 48, 64]),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=3),
    st.sampled_from([torch.float16, torch.float32]), st.booleans(), seeds,
)  # fmt: skip
def test_a_chunk_of_every_context_is_gathered_as_the_cpu_reads_it(
    name: str, block_size: int, wanted: list[tuple[int, int]], dtype: torch.dtype, calibrated: bool, seed: int
) -> None:
    lengths = [begin + n for begin, n in wanted]
    batch = LatentBatch(name, lengths, seed, block_size=block_size, calibrated=calibrated)
    chunks = [n for _, n in wanted]
    rows = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.full((sum(chunks) + 2, ENTRY), 7.0, dtype=dtype)
    starts = torch.tensor([begin for begin, _ in wanted], dtype=torch.int32)
    batch.pages.gather(batch.table, starts, rows, max(chunks), out)
    for i, n in enumerate(chunks):
        if n:
            part = batch.cpu.read(batch.table[i], lengths[i])[starts[i] :]
            off = (out[rows[i] : rows[i + 1]].float() - part).norm(dim=-1)
            assert (off <= part.norm(dim=-1) * (1e-3 if dtype == torch.float16 else 1e-5)).all()
    assert (out[rows[-1] :] == 7).all()


def test_bad_input_for_latent_kernels_is_refused_before_a_launch() -> None:
    batch = LatentBatch("mla4", [20], 1)
    query, plan = batch.queries(), batch.plan()
    before, entry = batch.cache.clone(), torch.zeros(1, ENTRY)
    absorbed, rope = query[..., :RANK], query[..., RANK:]
    for first, second, told in (
        (absorbed[:, :2], rope, "give floats"), (absorbed, rope[..., :8], "query_rope is"),
        (absorbed.expand(2, -1, -1), rope.expand(2, -1, -1), "query has 2 rows"),
        (torch.zeros(1, 3, 2 * RANK)[..., ::2], rope, "query has strides"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.pages.prepare(first, second, plan, 1.0)
    assert plan.rotated.isnan().all()
    for latent, slots, told in (
        (entry, torch.tensor([16]), "latent is"), (entry[:, :RANK], torch.tensor([16, 17]), "2 entries"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.pages.store(latent, entry[:, RANK:], slots)
    assert torch.equal(batch.cache, before)
    out = torch.zeros(1, 3, RANK)
    for table, lens, to, told in (
        (batch.table.long(), batch.lens, out, "block_table is torch.int64"),
        (batch.table, batch.lens, out[..., :64], "out is"),
        (batch.table, batch.lens.repeat(2), out, "seq_lens has 2 rows"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.pages.decode(table, lens, plan, to)
    rows, chunk = torch.tensor([0, 20], dtype=torch.int32), torch.full((20, ENTRY), 7.0)
    first = torch.zeros(1, dtype=torch.int32)
    for table, starts, at, to, told in (
        (batch.table, first, rows.long(), chunk, "rows is torch.int64"),
        (batch.table, first.long(), rows, chunk, "starts is torch.int64"),
        (batch.table, first, rows, chunk[:, :RANK], "out is"),
        (batch.table[:0], first, rows, chunk, "rows are of 1 sequences"),
        (batch.table, first[:0], rows, chunk, "rows are of 1 sequences"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=told):
            batch.pages.gather(table, starts, at, 20, to)
    assert (chunk == 7).all()
    for heads in (0, 129):
        with pytest.raises(BadInputError, match=f"heads is {heads}"):
            LatentShape(batch.fmt, heads, 16, CPU)
    with pytest.raises(BadInputError, match="blocks of 32 tokens"):
        GpuLatentPages(batch.cache, LatentShape(batch.fmt, 3, 32, CPU))


@given(st.integers(1, 128), every, st.sampled_from([16, 32, 48, 64, 128]),
       st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]))  # fmt: skip
def test_every_chosen_launch_covers_all_heads_and_fits_the_shared_memory(
    heads: int, name: str, block_size: int, capability: tuple[int, int]
) -> None:
    fmt, take = parse(name), latent_tuning.program_heads(heads)
    choice = latent_tuning.choose(fmt, heads, block_size, capability)
    assert take <= choice.heads <= latent_tuning.MOST_HEADS
    assert choice.heads % 8 == 0
    assert block_size % choice.tile == 0
    limit = {(8, 0): 164, (9, 0): 228, (10, 0): 228}.get(capability, 100)
    assert choice.programs in (1, 2)
    assert choice.programs * (choice.shared_bytes(fmt) + 2048) <= limit * 1024
