"""Pages on a GPU: errors before a launch, and all kernels one after another."""

import itertools

import pytest
import torch

from kvpilot_formats import formats
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.gpu.launch.tuning import Taken
from kvpilot_kernels.reference.attention import decode_reference
from support.gpu_batch import CPU, PAST_THE_END, generator, launch_as, ordinals, poisoned, some_factors

K4V4 = formats.parse("k4v4")
ROW = K4V4.row_bytes(64)
BAD_CACHES = {
    "another type": torch.zeros(2, 2, 16, ROW, dtype=torch.int8),
    "rows of another format": torch.zeros(2, 2, 16, formats.parse("k8v4").row_bytes(64), dtype=torch.uint8),
    "rows of another head_dim": torch.zeros(2, 2, 16, K4V4.row_bytes(128), dtype=torch.uint8),
    "another block size": torch.zeros(2, 2, 32, ROW, dtype=torch.uint8),
    "another number of heads": torch.zeros(2, 1, 16, ROW, dtype=torch.uint8),
    "no heads": torch.zeros(2, 16, ROW, dtype=torch.uint8),
    "token before head": torch.zeros(2, 16, 2, ROW, dtype=torch.uint8).transpose(1, 2),
    "rows apart": torch.zeros(2, 2, 16, ROW + 4, dtype=torch.uint8)[..., :ROW],
}


@pytest.mark.parametrize("what", BAD_CACHES)
def test_a_cache_of_the_wrong_shape_is_refused_with_the_right_shape(what: str) -> None:
    with pytest.raises(BadInputError, match=r"^cache .*(takes uint8|this layer has 2 KV heads and blocks of 16)"):
        GpuPages(BAD_CACHES[what], Shape(K4V4, 64, 2, 1, 16, CPU), Factors.identity(2, 64))


@pytest.mark.parametrize("ratio", [0, -1])
def test_a_kv_head_without_query_heads_is_refused(ratio: int) -> None:
    with pytest.raises(BadInputError, match=f"is {ratio} query heads per KV head; give 1 or more"):
        Shape(K4V4, 64, 2, ratio, 16, CPU)


@pytest.mark.parametrize(
    "sinks", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(8)[::2]]
)
def test_sinks_that_are_not_a_float_for_each_head_are_refused(sinks: torch.Tensor) -> None:
    with pytest.raises(BadInputError, match=r"^sinks .*one for each of 4 heads"):
        GpuPages(poisoned(2, 2, 16, K4V4, 64), Shape(K4V4, 64, 2, 2, 16, CPU), Factors.identity(2, 64), sinks=sinks)


@pytest.mark.parametrize("dim", [32, 81, 264, 1024])
def test_a_head_dim_that_is_not_stored_is_refused(dim: int) -> None:
    with pytest.raises(formats.UnsupportedHeadDimError, match=f"head_dim {dim} .*multiples of 8 from 48 to 256"):
        Shape(K4V4, dim, 2, 1, 16, CPU)


@pytest.mark.parametrize("block_size", [0, 8, 24, -16])
def test_a_block_size_that_no_tile_divides_is_refused(block_size: int) -> None:
    with pytest.raises(formats.FormatError, match=f"block_size {block_size} .*multiple of 16"):
        Shape(K4V4, 64, 2, 1, block_size, CPU)


def test_vllms_own_formats_are_refused() -> None:
    with pytest.raises(formats.UnsupportedHeadDimError, match="fp8"):
        Shape(formats.parse("fp8"), 64, 2, 1, 16, CPU)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("dim", formats.HEAD_DIMS)
def test_every_shape_gets_a_tile_that_lies_in_one_block(dim: int, queries: int, block_size: int) -> None:
    fmt = formats.parse(formats.own_names()[queries % len(formats.own_names())])
    choice = tuning.choose(dim, queries, fmt.key.bits + fmt.value.bits, block_size, 0, (9, 0))
    assert block_size % choice.tile == 0 == choice.tile % 16
    assert choice.stages >= 2
    assert choice.programs >= 1


# Start of the error message, and the invalid arguments of `store`.
BAD_TOKENS = {
    "key of another head_dim": ("key .*64", {"key": torch.zeros(4, 2, 128)}),
    "value of other heads": ("value .*2, 64", {"value": torch.zeros(4, 1, 64)}),
    "key of whole numbers": ("key .*floats", {"key": torch.zeros(4, 2, 64, dtype=torch.int32)}),
    "queries of another head_dim": ("query", {"query": torch.zeros(4, 4, 96)}),
    "heads apart": ("key .*strides", {"key": torch.zeros(4, 2, 128)[..., :64]}),
    "elements before heads": ("value .*strides", {"value": torch.zeros(4, 64, 2).transpose(1, 2)}),
    "one query for all heads": ("query .*strides", {"query": torch.zeros(4, 1, 64).expand(4, 4, 64)}),
    "more slots than tokens": ("slots .*5", {"slot_mapping": torch.arange(5)}),
    "slots that are no numbers of places": ("slots", {"slot_mapping": torch.zeros(4)}),
}


@pytest.mark.parametrize("what", BAD_TOKENS)
def test_tokens_that_do_not_fit_are_refused_before_anything_is_written(what: str) -> None:
    message, wrong = BAD_TOKENS[what]
    shape, cache = Shape(K4V4, 64, 2, 2, 16, CPU), poisoned(2, 2, 16, K4V4, 64)
    plan = Plan(shape, 4)
    plan.units.fill_(torch.nan)
    right = {"query": torch.zeros(4, 4, 64), "key": torch.zeros(4, 2, 64), "value": torch.zeros(4, 2, 64),
             "slot_mapping": torch.arange(4)}  # fmt: skip
    with pytest.raises(BadInputError, match=f"^{message}"):
        GpuPages(cache, shape, Factors.identity(2, 64)).store(**(right | wrong), plan=plan, decodes=4, scale=1.0)
    assert (cache == 255).all()
    assert plan.units.isnan().all()


# Start of the error message, and the invalid arguments of `decode`.
BAD_STEPS = {
    "a table of int64": ("block_table .*int64.*int32", {"block_table": torch.zeros(2, 1, dtype=torch.int64)}),
    "lengths of int64": ("seq_lens .*int64.*int32", {"seq_lens": torch.ones(2, dtype=torch.int64)}),
    "more sequences than the plan": ("seq_lens has 5 rows", {"seq_lens": torch.ones(5, dtype=torch.int32)}),
    "more sequences than the table": ("seq_lens has 3 rows", {"seq_lens": torch.ones(3, dtype=torch.int32)}),
}


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(what: str) -> None:
    message, wrong = BAD_STEPS[what]
    shape = Shape(K4V4, 64, 2, 2, 16, CPU)
    out = torch.full((8, 4, 64), torch.nan)
    right = {"block_table": torch.zeros(2, 1, dtype=torch.int32), "seq_lens": torch.ones(2, dtype=torch.int32)}
    pages = GpuPages(poisoned(2, 2, 16, K4V4, 64), shape, Factors.identity(2, 64))
    with pytest.raises(BadInputError, match=f"^{message}"):
        pages.decode(**(right | wrong), plan=Plan(shape, 4), out=out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("name", "dim", "ratio"),
    [("k4v4", 64, 3), ("k8v4", 96, 1), ("int8", 128, 5), ("k4v2", 128, 9), ("k2v2", 256, 2)],
)
def test_growing_sequences_equal_the_reference_at_every_token(name: str, dim: int, ratio: int) -> None:
    """Store prompts at once. Then run steps that store and decode one token per sequence, all with one plan."""
    rng, fmt, heads, prompts, steps = generator(7), formats.parse(name), 2, [30, 1, 47], 3
    factors, shape = some_factors(heads, dim, rng), Shape(fmt, dim, heads, ratio, 16, CPU)
    launch_as(shape, 16, 3, 2)
    cache = poisoned(13, heads, 16, fmt, dim)
    pages, plan = GpuPages(cache, shape, factors), Plan(shape, 4)
    table = (1 + torch.randperm(12, generator=rng)).view(3, 4).int()
    keys, values = ([torch.randn(n + steps, heads, dim, generator=rng) for n in prompts] for _ in "kv")

    def slots(sequence: int, begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        return table[sequence][at // 16].long() * 16 + at % 16

    def both(of: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([k[s] for k, s in zip(keys, of, strict=True)]), torch.cat(
            [v[s] for v, s in zip(values, of, strict=True)]
        )

    key, value = both([slice(0, n) for n in prompts])
    where = torch.cat([slots(i, 0, n) for i, n in enumerate(prompts)])
    first = torch.cat([ordinals(0, n) for n in prompts])
    pages.store(key.repeat_interleave(ratio, 1), key, value, where, plan, 0, 1.0, ordinals=first)
    for step in range(steps):
        lens = [n + step + 1 for n in prompts]
        key, value = both([slice(n - 1, n) for n in lens])
        query = torch.randn(3, heads * ratio, dim, generator=rng)
        counts = torch.tensor(lens, dtype=torch.int32)
        plan.update(counts)
        where = torch.cat([slots(i, n - 1, n) for i, n in enumerate(lens)])
        pages.store(query, key, value, where, plan, 3, dim**-0.5, ordinals=counts)
        seen = table.clone()
        for i, n in enumerate(lens):
            seen[i, -(-n // 16) :] = PAST_THE_END
        out = torch.full((3, heads * ratio, dim), torch.nan)
        pages.decode(seen, counts, plan, out)
        for i, n in enumerate(lens):
            wanted = decode_reference(query[i], keys[i][:n], values[i][:n], fmt, dim**-0.5, factors)
            assert ((out[i] - wanted).norm(dim=-1) < 2e-3 * wanted.norm(dim=-1)).all()


@pytest.mark.parametrize("residuals", [0, 1])
@pytest.mark.parametrize("sequences", [1, 64])
def test_decode_overlaps_with_store_if_step_and_gpu_allow_it(sequences: int, residuals: int) -> None:
    shape = Shape(formats.parse("k4v4"), 128, 1, 1, 64, torch.device("cpu"), residuals=residuals)
    plan, lens = Plan(shape, 64), torch.ones(sequences, dtype=torch.int32)
    for gpu, step in ((False, True), (True, False), (True, True)):
        shape.can_overlap = gpu
        plan.update(lens, overlap=step)
        assert plan.overlap is (gpu and step)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_a_warm_up_with_powers_of_two_runs_every_kind_of_merge(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 132)
    for kv_heads, most in itertools.product((1, 2, 3, 8), (1, 7, 64, 300)):
        warmed = {*(2**i for i in range(most.bit_length())), most}
        ways = [
            {tuning.merging(128, n * kv_heads, ratio, CPU) for n in counts} for counts in (warmed, range(1, most + 1))
        ]
        assert ways[0] == ways[1]


HOPPER = 228 * 1024


@pytest.mark.parametrize(("registers", "shared", "programs"), [
    (32, 1024, 64), (128, 13312, 16), (168, 17664, 12), (169, 17664, 11), (214, 17664, 9), (255, 8704, 8),
    (137, 33792, 6), (171, 25600, 8), (88, 12800, 16), (129, 16896, 13),
])  # fmt: skip
def test_the_number_of_programs_follows_from_registers_and_shared_memory(
    registers: int, shared: int, programs: int
) -> None:
    assert tuning.fitting(Taken(registers, shared), HOPPER) == programs


def test_fewer_programs_fit_on_a_multiprocessor_with_less_shared_memory() -> None:
    assert tuning.fitting(Taken(168, 17664), 100 * 1024) == 5


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_plan_has_no_more_programs_than_fit_with_the_compiled_kernel(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 132)
    shape = Shape(K4V4, 128, 2, 4, 16, CPU, residuals=1)
    cut = shape.cut(tokens)
    counted_on, a_multiprocessor = cut.choice.programs, 132 // (2 * cut.parts)
    assert cut.wave == counted_on * a_multiprocessor
    monkeypatch.setattr(tuning, "shared_memory", lambda device: HOPPER)
    shape.settle(tokens, None)  # Resources are unknown.
    shape.settle(tokens, Taken(64, 4096))  # more programs would fit than are useful
    assert shape.cut(tokens) == cut
    shape.settle(tokens, Taken(255, 4096))
    assert shape.cut(tokens) == cut._replace(wave=min(counted_on, 8) * a_multiprocessor)
    # A plan that was made earlier has room for either choice.
    plan = Plan(Shape(K4V4, 128, 2, 4, 16, CPU, residuals=1), 2, tokens=3)
    plan.shape.settle(tokens, Taken(168, 33792))
    assert plan.shape.cut(tokens).wave == min(counted_on, 6) * a_multiprocessor
    assert plan.splits.shape[0] >= plan.shape.cut(tokens).wave + 2
