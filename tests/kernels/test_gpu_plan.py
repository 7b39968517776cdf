"""A decode plan puts every tile of every sequence into exactly one split, in order."""

import heapq
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_formats.formats import parse
from kvpilot_formats.latent import parse as parse_latent
from kvpilot_formats.models.architecture import Architecture, Group, Kind
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.gpu.decode.schedule import FIXED, beyond, fill_splits, most_results, most_splits
from kvpilot_kernels.gpu.launch.pages import Plan, Shape
from kvpilot_kernels.gpu.mla.pages import LatentPlan, LatentShape
from kvpilot_runtime.preflight.memory import step_buffers
from kvpilot_runtime.preflight.request import Request
from support.gpu_batch import CPU, launch_as, several


def cut(lengths: list[int], tile: int, wave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return splits [count, 4] and spans [sequences, 2], from buffers that were filled with 77."""
    sequences = len(lengths)
    count = most_splits(sequences, wave, beyond(1))
    # The additional row would show writes past the end.
    splits = torch.full((count + 1, 4), 77, dtype=torch.int32)
    spans = torch.full((sequences + 1, 2), 77, dtype=torch.int32)
    fill_splits(torch.tensor(lengths, dtype=torch.int32), splits, spans, wave, tile)
    assert (splits[-1] == 77).all()
    assert (spans[-1] == 77).all()
    return splits[:-1], spans[:-1]


# Possible steps: sequences of 1 and 4,095 tiles, one without tokens, or many of one tile.
@example([16, 16 * 4095, 0, 1], 16, 2)
@example([1] * 40, 64, 1)
@example([10**6], 64, 1056)
@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20000)), min_size=1, max_size=20),
    st.sampled_from([16, 32, 64]), st.integers(1, 300),
)  # fmt: skip
def test_splits_cover_every_tile_once_and_in_order(lengths: list[int], tile: int, wave: int) -> None:
    splits, spans = cut(lengths, tile, wave)
    used = 0
    for sequence, length in enumerate(lengths):
        first, number = spans[sequence].tolist()
        assert first == used
        used += number
        assert (number == 0) == (length == 0)
        mine = splits[first:used, :3].tolist()
        at = 0
        for owner, start, end in mine:
            assert (owner, start) == (sequence, at)
            assert start % tile == 0
            assert end > start
            at = end
        if mine:
            assert at == length
    assert used <= splits.shape[0]
    assert (splits[used:, 0] == -1).all()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 200))
def test_no_split_is_longer_than_the_plans_share_of_the_tiles(lengths: list[int], wave: int) -> None:
    splits, _ = cut(lengths, 16, wave)
    share = max(1, -(-sum(-(-n // 16) for n in lengths) // wave))
    for _ in range(4):
        share += -(-share // 8)
    assert -(-int((splits[:, 2] - splits[:, 1])[splits[:, 0] >= 0].max()) // 16) <= share


@pytest.mark.parametrize("lengths", [
    [65600], [300000], [1056] * 8, [2080] * 32, [16500] * 32, [131100], [4096] * 16, [3000] * 20, [17000] * 48,
    [40000, 100, 100, 90000, 7], [2000] * 150,
])  # fmt: skip
def test_no_program_waits_for_another_to_end(lengths: list[int]) -> None:
    splits, _ = cut(lengths, 64, 198)
    used = int((splits[:, 0] >= 0).sum())
    assert 140 <= used <= 198 or len(lengths) == 8


def takes(splits: torch.Tensor, wave: int, tile: int) -> int:
    """Return the total time in tiles. Programs start in order, each as soon as one of `wave` running programs ends."""
    ends = [0] * wave
    for _, start, end, _ in splits[splits[:, 0] >= 0].tolist():
        heapq.heapreplace(ends, ends[0] + -(-(end - start) // tile) + int(FIXED))
    return max(ends)


@pytest.mark.parametrize(("lengths", "wave"), [
    ([16384] * 32, 49), ([4096] * 256, 198), ([4096] * 128, 198), ([16384] * 64, 49), ([8000] * 140, 198),
    ([100000] * 3 + [500] * 250, 198), ([4096] * 1024, 198), ([16000 + 37 * i for i in range(27)], 45),
])  # fmt: skip
def test_a_gpu_is_nearly_always_busy_for_any_number_of_sequences(lengths: list[int], wave: int) -> None:
    """A step must take at most 1.3 times the shortest time. One split per sequence often takes 1.4 to 1.6 times it."""
    splits, _ = cut(lengths, 64, wave)
    least = -(-sum(-(-n // 64) for n in lengths) // wave) + int(FIXED)
    assert takes(splits, wave, 64) <= 1.3 * least


@settings(max_examples=30)
@given(st.lists(st.integers(1, 20000), min_size=1, max_size=60), st.integers(1, 60))
def test_more_rounds_of_programs_are_planned_only_if_the_step_may_end_sooner(lengths: list[int], wave: int) -> None:
    splits, _ = cut(lengths, 64, wave)
    tiles = [-(-n // 64) for n in lengths]
    whole = torch.tensor([[i, 0, n, n] for i, n in enumerate(lengths)])
    assert takes(splits, wave, 64) <= max(takes(whole, wave, 64), -(-len(lengths) // wave) * (max(tiles) + int(FIXED)))


rows = st.integers(0, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 3000) if n else st.just(0)))


@settings(max_examples=40)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from([16, 32]), st.integers(1, 100))
def test_each_split_has_one_result_per_row_and_covers_the_tokens_of_all_rows(
    sequences: list[tuple[int, int]], tile: int, wave: int
) -> None:
    counts, lengths = [n for n, _ in sequences], torch.tensor([n for _, n in sequences], dtype=torch.int32)
    most = max(2, *counts)
    splits = torch.full((most_splits(len(counts), wave, beyond(most)), 4), 77, dtype=torch.int32)
    spans, bases = torch.full((len(counts), 2), 77, dtype=torch.int32), torch.full((len(counts) + 1,), 77).int()
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    fill_splits(lengths, splits, spans, wave, tile, bases[:-1], starts, most)
    assert bases[-1] == 77
    results = 0
    for i, (count, length) in enumerate(sequences):
        first, number = spans[i].tolist()
        assert bases[i] == results
        results += number * count
        begin = 0
        for owner, start, end, whole in splits[first : first + number].tolist():
            assert (owner, start, whole) == (i, begin, length)
            begin = end
        assert begin == length
    assert results <= most_results(sum(counts), most, wave, len(counts))


# (rows, tokens) of sequences. Some have no rows, which eager steps with drafts allow.
idle = st.one_of(st.just((0, 0)), st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 3000))))


@example([(5, 2660), (8, 2885), (8, 475), (0, 0), (7, 777), (0, 0), (0, 0), (4, 2484), (1, 924)], 2, 0)
@settings(max_examples=60)
@given(st.lists(idle, min_size=1, max_size=14), st.integers(1, 40), st.integers(0, 4))
def test_a_plan_with_empty_sequences_writes_no_result_past_its_buffers(
    step: list[tuple[int, int]], wave: int, padding: int
) -> None:
    counts, lengths = [n for n, _ in step], torch.tensor([n for _, n in step], dtype=torch.int32)
    rows = several(counts, padding)
    shape = launch_as(Shape(parse("k4v4"), 64, 1, 1, 16, CPU), 16, 2, wave)
    plan = Plan(shape, len(step), rows.most, len(rows.owners))
    plan.update(lengths, several=rows)
    used = plan.bases + plan.spans[:, 1] * torch.tensor(counts)
    assert used.max() <= plan.partial.shape[0] == plan.lse.shape[0]
    assert (plan.spans.sum(1) <= plan.splits.shape[0]).all()
    plan = Plan(shape, len(step))
    plan.update(lengths)
    assert (plan.spans.sum(1) <= plan.partial.shape[0]).all()


def test_more_sequences_than_a_plan_has_are_refused_before_a_launch() -> None:
    shape, lengths = Shape(parse("k4v4"), 64, 1, 1, 16, CPU), torch.ones(3, dtype=torch.int32)
    latent = LatentPlan(LatentShape(parse_latent("mla4"), 4, 16, CPU), 2)
    for plan in (Plan(shape, 2), Plan(shape, 3, 4, 2), latent):
        with pytest.raises(BadInputError, match="seq_lens has 3 sequences"):
            plan.update(lengths)


@pytest.mark.parametrize("drafts", [0, 3])
def test_preflight_counts_the_memory_of_a_plan(drafts: int) -> None:
    group = Group(Kind.FULL, 32, 8, 128, 128)
    model = Architecture("llama", ("LlamaForCausalLM",), (group,), heads=32)
    asked = Request("model", others=("--max-num-seqs=1024", "--spec-method=ngram", f"--spec-tokens={drafts}"))
    plan = Plan(Shape(parse("k4v4"), 128, 8, 4, 64, CPU), 1024, 1 + drafts)
    taken = sum(x.nbytes for x in vars(plan).values() if isinstance(x, torch.Tensor))
    assert 0.8 * taken <= step_buffers(parse("k4v4"), model, asked, 0) <= 1.05 * taken
    assert step_buffers(parse("k4v4"), model, asked, 80 * 2**30) > 80 * 2**30 * asked.memory_fraction / 200
    assert step_buffers(parse("fp8"), model, asked, 80 * 2**30) == 0


def test_preflight_counts_the_memory_of_a_plan_for_latents() -> None:
    model = Architecture("deepseek_v3", ("DeepseekV3ForCausalLM",), (), heads=128, latent=576)
    plan = LatentPlan(LatentShape(parse_latent("mla4"), 128, 64, CPU), 1024)
    taken = sum(x.nbytes for x in vars(plan).values() if isinstance(x, torch.Tensor))
    asked = Request("model", others=("--max-num-seqs=1024",))
    assert 0.8 * taken <= step_buffers(parse_latent("mla4"), model, asked, 80 * 2**30) <= 1.05 * taken


def test_thousands_of_sequences_are_split_by_the_same_rules_as_a_few() -> None:
    """A program counts only some of the sequences, so sums take several rounds and many programs."""
    lengths = [(i * 37) % 400 for i in range(2500)]
    splits, spans = cut(lengths, 16, 700)
    used = 0
    for i, (first, number) in enumerate(spans.tolist()):
        assert first == used
        mine = splits[first : first + number].tolist()
        assert [owner for owner, *_ in mine] == [i] * number
        assert [start for _, start, *_ in mine] == [0, *(end for _, _, end, _ in mine[:-1])][:number]
        assert not mine or mine[-1][2] == lengths[i]
        used += number
    assert (splits[used:, 0] == -1).all()


def test_the_reserved_plan_is_as_large_as_the_final_one() -> None:
    """vLLM sets torch's default dtype to that of the model while it loads weights."""
    shapes = Shape(parse("k4v4"), 128, 2, 4, 64, CPU), LatentShape(parse_latent("mla4"), 16, 64, CPU)

    def buffers() -> list[dict[str, torch.dtype]]:
        plans = Plan(shapes[0], 4, tokens=2), LatentPlan(shapes[1], 4)
        return [{name: x.dtype for name, x in vars(plan).items() if torch.is_tensor(x)} for plan in plans]

    serving = buffers()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert buffers() == serving
    finally:
        torch.set_default_dtype(torch.float32)
