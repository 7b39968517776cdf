"""Decode and reduce on pages against the float64 reference; both kernels run on a CPU (`support.gluon_eager`)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_within_rounding

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.gpu.decode import kernel as decode
from kvpilot_kernels.gpu.launch import pages
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan
from kvpilot_kernels.places import stored_slots
from kvpilot_kernels.reference.attention import decode_reference
from support.gluon_eager import EagerKernel
from support.gpu_batch import BLOCK_OUTERMOST, DIMS, MINE, OTHERS, Batch, among_layers, ordinals

CLOSE = 1e-3
"""Largest allowed error, relative to a head's norm, for fixed inputs. Queries and probabilities are float16."""
ratios = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 12, 16, 20, 33])
# (block size, tile): a tile divides its block.
cuts = st.sampled_from([(16, 16), (32, 16), (32, 32), (48, 16), (64, 32), (64, 64), (128, 64)])
seeds = st.integers(0, 2**31)


def off(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of a head, in units of its norm."""
    return float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def assert_equals_reference(batch: Batch) -> None:
    query = batch.queries()
    out = batch.decode(query)
    for i, n in enumerate(batch.lengths):
        if n == 0:
            assert torch.equal(out[i], torch.zeros_like(out[i]))
            continue
        wanted = decode_reference(query[i], batch.keys[i], batch.values[i], batch.fmt, batch.scale, batch.factors)
        assert_within_rounding(out[i], wanted, query[i], *batch.read_back(i), batch.factors, batch.scale)


@pytest.mark.parametrize("dim", [*formats.HEAD_DIMS, 80])
@pytest.mark.parametrize("name", formats.own_names())
def test_decode_equals_the_reference_in_every_format_at_every_head_dim(name: str, dim: int) -> None:
    assert_equals_reference(Batch(name, dim, [40, 0, 1], seed=3, ratio=3))


@settings(max_examples=14)
@given(
    st.sampled_from(formats.own_names()), st.sampled_from(DIMS),
    st.lists(st.integers(0, 150), min_size=1, max_size=3), seeds, st.integers(1, 2), ratios, cuts, st.integers(2, 4),
    st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_decode_equals_the_reference_for_every_division_into_splits(
    name: str, dim: int, lengths: list[int], seed: int, kv_heads: int, ratio: int, cut: tuple[int, int], stages: int,
    wave: int, calibrated: bool,
) -> None:  # fmt: skip
    block_size, tile = cut
    assert_equals_reference(
        Batch(name, dim, lengths, seed, kv_heads, ratio, block_size, tile, stages, wave, calibrated=calibrated)
    )


@settings(max_examples=8)
@given(st.sampled_from(formats.own_names()), st.integers(2, 70), st.sampled_from([0.5, 5.0, 30.0]), seeds)
def test_decode_with_a_soft_cap_equals_the_cpus_decode(name: str, length: int, softcap: float, seed: int) -> None:
    batch = Batch(name, 64, [length], seed, ratio=2, softcap=softcap)
    query = batch.queries() * 3
    out, wanted = batch.decode(query), batch.cpu.decode(query, batch.table, batch.lens, batch.scale, softcap)
    assert_within_rounding(
        out[0], wanted[0], query[0], *batch.read_back(0), batch.factors, batch.scale, softcap
    )  # fmt: skip
    if softcap < 10:  # scores reach about 10
        assert off(out, batch.cpu.decode(query, batch.table, batch.lens, batch.scale)) > 5 * CLOSE


@pytest.mark.parametrize("softcap", [0.0, 5.0, 30.0])
@pytest.mark.parametrize("sinking", [False, True])
def test_soft_caps_and_sinks_apply_to_scores_that_include_the_keys_mean(softcap: float, sinking: bool) -> None:
    batch = Batch("k4v4", 64, [40, 0, 130], seed=3, ratio=3, softcap=softcap, calibrated=True)
    query, sinks = batch.queries(), torch.tensor([3.0, -2.0, 0.5, 6.0, 0.0, 1.0]) if sinking else None
    batch.pages = pages.GpuPages(batch.cache, batch.shape, batch.factors, sinks=sinks)
    out = batch.decode(query)
    assert not out[1].any()
    for i in (0, 2):
        wanted = decode_reference(
            query[i], batch.keys[i], batch.values[i], batch.fmt, batch.scale, batch.factors, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        assert off(out[i], wanted) < 5 * CLOSE  # Factors make scores larger, and queries are float16.
    if softcap or sinking:
        batch.factors.key_mean.neg_()
        batch.factors.key_first.neg_()
        assert off(batch.decode(query)[2], wanted) > 10 * CLOSE


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0])
def test_the_first_keys_mean_is_added_before_the_soft_cap(softcap: float) -> None:
    batch = Batch("k4v4", 64, [40], seed=3, ratio=2, softcap=softcap, calibrated=True)
    query = batch.queries()
    out, wanted = batch.decode(query), batch.cpu.decode(query, batch.table, batch.lens, batch.scale, softcap)
    assert off(out, wanted) < 5 * CLOSE  # Factors make scores larger, and queries are float16.
    batch.factors.key_first.copy_(batch.factors.key_mean)
    assert off(out, batch.cpu.decode(query, batch.table, batch.lens, batch.scale, softcap)) > 10 * CLOSE


def test_one_token_out_of_many_can_take_all_the_softmax_weight() -> None:
    batch = Batch("k4v4", 128, [200], seed=5, ratio=2, stages=3)
    query = batch.keys[0][130].repeat_interleave(2, 0)[None] * 20
    wanted = decode_reference(query[0], batch.keys[0], batch.values[0], batch.fmt, batch.scale)
    assert off(batch.decode(query)[0].double(), wanted) < CLOSE


@pytest.mark.parametrize("name", formats.own_names())
def test_a_query_with_an_outlier_is_as_exact_as_float16(name: str) -> None:
    batch = Batch(name, 128, [300], seed=6, ratio=5, tile=16, stages=3)
    query = batch.queries()
    query[..., 7] *= 30
    wanted = decode_reference(query[0], batch.keys[0], batch.values[0], batch.fmt, batch.scale)
    assert off(batch.decode(query)[0].double(), wanted) < 3 * CLOSE


@pytest.mark.parametrize("ratio", [*range(1, 18), 24, 32, 71])
def test_every_number_of_query_heads_has_its_own_output(ratio: int) -> None:
    assert_equals_reference(Batch("k2v2", 64, [37], seed=ratio, ratio=ratio))


def test_a_query_of_zeros_gives_the_mean_of_the_values() -> None:
    batch = Batch("k2v2", 128, [40], seed=8, ratio=3)
    out = batch.decode(torch.zeros(1, 6, 128))
    wanted = decode_reference(torch.zeros(6, 128), batch.keys[0], batch.values[0], batch.fmt, batch.scale)
    assert off(out[0].double(), wanted) < CLOSE


def test_a_nan_query_gives_nan_and_changes_no_other_output() -> None:
    batch = Batch("k4v2", 128, [40], seed=8, ratio=3)
    query = batch.queries()
    whole = batch.decode(query)
    query[0, 1, 5] = torch.nan
    out = batch.decode(query)
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, [0, 2, 3, 4, 5]], whole[0, [0, 2, 3, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_decode_may_write_into_a_part_of_a_wider_buffer(dtype: torch.dtype) -> None:
    batch = Batch("k4v2", 96, [33, 20], seed=1, ratio=3)
    query, plan = batch.queries(), batch.plan()
    buffer = torch.full((3, 8 * 96), 7.0, dtype=dtype)
    batch.rotate(query, plan)
    batch.pages.decode(batch.table, batch.lens, plan, buffer[:2, : 6 * 96].view(2, 6, 96))
    wanted = batch.cpu.decode(query, batch.table, batch.lens, batch.scale)
    assert off(buffer[:2, : 6 * 96].view(2, 6, 96).float(), wanted) < CLOSE
    assert (buffer[2] == 7).all()
    assert (buffer[:, 6 * 96 :] == 7).all()


def test_a_step_may_have_fewer_sequences_than_the_plan_holds() -> None:
    batch = Batch("k4v4", 64, [50, 30, 20], seed=2, ratio=2)
    query, plan = batch.queries(), batch.plan()
    plan.update(batch.lens[:2])
    batch.rotate(query, plan)
    out = torch.full_like(query, torch.nan)
    batch.pages.decode(batch.table[:2], batch.lens[:2], plan, out[:2])
    wanted = batch.cpu.decode(query, batch.table, batch.lens, batch.scale)
    assert off(out[:2], wanted[:2]) < CLOSE
    assert out[2].isnan().all()


def test_a_step_without_sequences_launches_nothing() -> None:
    batch = Batch("k4v4", 64, [5], seed=0)
    out = torch.full((0, 2, 64), torch.nan)
    batch.pages.decode(batch.table[:0], batch.lens[:0], batch.plan(), out)


@pytest.mark.parametrize("lengths", [[1], [16, 17], [100, 0, 33]])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_kernel_that_starts_early_reads_queries_and_the_last_two_tokens_only_after_its_wait(
    lengths: list[int], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch("k4v4", 64, lengths, seed=4, ratio=2, stages=stages)
    query = batch.queries()
    wanted, plan, waits = batch.decode(query), batch.plan(), 0
    batch.rotate(query, plan)
    prepared = [(part, part.clone()) for part in (plan.rotated, plan.sums, plan.units, plan.apart)]
    stored = [i for i, n in enumerate(lengths) if n]
    # These are not stored yet: the step's own token, and the end of a block that another sequence fills in this step.
    late = torch.cat([batch.slots[i][-2:] for i in stored])

    def hold_back() -> None:
        plan.rotated.fill_(85)
        plan.sums.fill_(2**20)
        plan.units.fill_(torch.nan)
        plan.apart.fill_(torch.nan)
        for part in (batch.cpu.key_codes, batch.cpu.value_codes):
            part[late // 16, :, late % 16] = 255
        for part in (batch.cpu.key_meta, batch.cpu.value_meta):
            part[late // 16, :, late % 16] = -1

    def store() -> None:
        nonlocal waits
        waits += 1
        for part, right in prepared:
            part.copy_(right)
        for i in stored:
            n = batch.lengths[i]
            these = slice(max(0, n - 2), n)
            batch.cpu.store(
                batch.keys[i][these], batch.values[i][these], batch.slots[i][these], ordinals=ordinals(these.start, n)
            )  # fmt: skip

    monkeypatch.setattr(pages, "decode_kernel", EagerKernel(decode, "decode_kernel", hold_back, store))
    batch.shape.can_overlap = True
    batch.pages.attend(batch.table, batch.lens, plan)
    batch.shape.can_overlap = False  # The interpreter has no equivalent of the wait in `reduce`.
    out = torch.full_like(query, torch.nan)
    batch.pages.merge(len(lengths), plan, out)
    assert torch.equal(out, wanted)
    assert waits == plan.splits.shape[0] * batch.kv_heads  # Check every program, even those without work.


@pytest.mark.parametrize(("name", "layout"), zip(("int8", "k4v2"), BLOCK_OUTERMOST, strict=True))
def test_pages_interleaved_with_other_layers_work_and_change_no_byte_of_them(name: str, layout: str) -> None:
    batch = Batch(name, 64, [70, 33], seed=5, ratio=3, calibrated=True)
    query, empty = batch.queries(), torch.full_like(batch.cache, 255)

    def by_gpu(cache: torch.Tensor) -> list[torch.Tensor]:
        batch.pages = GpuPages(cache, batch.shape, batch.factors)
        for key, value, slots in zip(batch.keys, batch.values, batch.slots, strict=True):
            nobodys = torch.zeros(len(key), query.shape[1], batch.dim)
            places = ordinals(0, len(key))
            batch.pages.store(nobodys, key, value, slots, Plan(batch.shape, 1), 0, 1.0, ordinals=places)
        read = [torch.zeros(sum(batch.lengths), batch.kv_heads, batch.dim) for _ in "kv"]
        rows = torch.tensor([0, 70, 103], dtype=torch.int32)
        places = stored_slots(batch.table, rows, torch.zeros(2, dtype=torch.int32), 103, batch.shape.block_size)
        batch.pages.gather(*places, *read)
        return [cache, batch.decode(query), *read]

    def by_cpu(cache: torch.Tensor) -> list[torch.Tensor]:
        stored = PackedPages(cache, batch.fmt, batch.dim, batch.factors)
        for key, value, slots in zip(batch.keys, batch.values, batch.slots, strict=True):
            stored.store(key, value, slots, ordinals=ordinals(0, len(key)))
        answers = stored.decode(query, batch.table, batch.lens, batch.scale)
        return [cache, answers, *stored.read(batch.table[0], batch.lengths[0])]

    for sees in (by_gpu, by_cpu):
        layers = among_layers(empty, layout)
        for mine, alone in zip(sees(layers[MINE]), sees(empty.clone()), strict=True):
            assert torch.equal(mine, alone)
        assert all((layers[other] == 0x55).all() for other in OTHERS)
