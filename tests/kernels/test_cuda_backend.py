"""The CUDA backend's steps on a CPU: real metadata, our kernels interpreted, and FlashAttention in plain torch."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_kernels.gpu.launch.pages import GpuPages, Shape
from kvpilot_kernels.gpu.launch.tuning import Taken
from support.gluon_eager import EagerKernel

pytest.importorskip("vllm.v1.attention.backends.fa_utils")

from cuda_engine import BLOCK, DIM, HEADS, KV_HEADS, Engine


@pytest.mark.parametrize(("name", "recent"), [("k4v4", 128), ("k2v2", 64)])
def test_a_step_of_one_token_reads_the_window_after_any_earlier_steps(cuda: Any, name: str, recent: int) -> None:
    engine = Engine(cuda, name, blocks=40, recent=recent)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 30, "c": 150}, padding=3)
    engine.step({"c": 1, "a": 1, "b": 1}, padding=5)
    engine.step({"b": 1, "c": 44, "a": 2}, padding=0)
    engine.step({"a": 1, "c": 1, "b": 1}, padding=2)


@pytest.mark.parametrize(("name", "drafts"), [("int8", 0), ("k4v4", 3)])
def test_a_layer_with_chunked_attention_attends_to_no_earlier_chunk(cuda: Any, name: str, drafts: int) -> None:
    engine = Engine(cuda, name, blocks=24, width=7, drafts=drafts, chunk=2 * BLOCK)
    engine.step({"a": BLOCK}, padding=3)
    engine.step({"a": 2 * BLOCK - 1, "b": 4 * BLOCK + 7}, padding=0)  # This step has three chunks of b.
    engine.step({"a": 1, "b": 1}, padding=2)
    engine.step({"a": 1, "b": 2 * BLOCK - 9, "c": 2 * BLOCK + 1}, padding=2)
    engine.step({"b": 2, "a": 1, "c": 1}, padding=2)  # The next token of b is in its next chunk.


def test_more_pieces_of_prompt_chunks_than_decode_has_room_for_are_prefilled(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", blocks=24, chunk=BLOCK)
    most, names = engine.builder.plan.sequences, "abcdefgh"
    for name in names:
        engine.step({name: BLOCK - 1}, padding=0)
    assert 2 * len(names) > most
    engine.step(dict.fromkeys(names, 2), padding=0)  # A chunk ends between the two tokens of each sequence.


@pytest.mark.parametrize(("name", "recent"), [("k4v4", 0), ("k2v2", 64)])
def test_a_step_with_drafts_equals_steps_of_single_tokens_after_rejected_drafts(
    cuda: Any, name: str, recent: int
) -> None:
    engine = Engine(cuda, name, blocks=40, recent=recent, drafts=3)
    engine.step({"a": 70}, padding=0)
    engine.step({"a": 4, "b": 60}, padding=9, wrong={"a": 3})
    engine.step({"a": 4, "b": 4}, padding=4, wrong={"a": 2, "b": 3})
    engine.step({"b": 4, "a": 4}, padding=0, wrong={"b": 3})  # All have 4 tokens, as in captured graphs.
    engine.step({"b": 3, "a": 1, "c": 30}, padding=3, wrong={"b": 1})
    engine.step({"a": 1, "b": 1, "c": 1}, padding=5)
    engine.step({"a": 2, "c": 4, "b": 1}, padding=2, wrong={"c": 1})
    # The new tokens of a are outside its prompt. Only the GPU knows how long a is, because drafts may be rejected.
    engine.step({"b": 4, "c": 1, "a": 9}, padding=2, wrong={"b": 2}, resumed=True)


@pytest.mark.parametrize("drafts", [0, 3])
def test_buffers_that_a_captured_graph_reads_keep_their_address(cuda: Any, drafts: int) -> None:
    engine = Engine(cuda, "k4v4", blocks=24, recent=64, drafts=drafts)
    describe, decoded, places = engine.builder.describe, [], []

    def watch(common: Any) -> Any:
        found = describe(common)
        pairs = [(found.block_table, common.block_table_tensor), (found.seq_lens, common.seq_lens)]
        if (several := found.plan.several) is not None:
            pairs.append((several.starts, common.query_start_loc))
            places.append((several.owners.data_ptr(), found.ordinals.data_ptr()))
        assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)
        decoded.append(found.decodes)
        return found

    engine.builder.describe = watch
    engine.step({"a": 1, "b": 1}, padding=0)
    engine.step({"a": 1, "b": 1}, padding=2)
    assert decoded == [2, 2]
    assert not places
    if drafts:
        engine.step({"a": 1 + drafts, "b": 1 + drafts}, padding=0)
        engine.step({"b": 1 + drafts, "a": 2}, padding=2)
        assert decoded[2:] == [2 * (1 + drafts), 2 * (1 + drafts)]
        assert len(set(places)) == 1


@pytest.mark.parametrize(("name", "dim"), [("k8v4", 64), ("k4v4", 80), ("k4v2", 160), ("k4v4", 192)])
def test_prompts_in_chunks_decodes_and_mixed_steps_equal_the_reference(cuda: Any, name: str, dim: int) -> None:
    engine = Engine(cuda, name, dim=dim)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 30, "c": 20}, padding=3)
    engine.step({"a": 1, "d": 1, "b": 1, "c": 44}, padding=20)  # The prompt of d has one token.
    engine.step({"a": 1, "d": 1}, padding=0)
    engine.step({"a": 1, "b": 1, "c": 1}, padding=5)
    engine.step({"c": 1, "d": 30}, padding=2)  # The workspace holds context and new tokens of d together.


@pytest.mark.parametrize(
    ("read_back", "sinks"),
    [(True, None), (False, torch.tensor([1.0, -1.0, 3.0, 0.5])), (True, torch.tensor([1.0, -1.0, 3.0, 0.5]))],
    ids=["pages", "sinks", "both"],
)
def test_tokens_of_an_image_attend_to_each_other_in_any_mixed_step(
    cuda: Any, read_back: bool, sinks: torch.Tensor | None
) -> None:
    engine = Engine(cuda, "k4v4", sinks=sinks)
    if read_back:
        engine.impl.read_back = engine.builder.read_back = True
    engine.step({"a": 50}, padding=0, images={"a": [(3, 20), (30, 45)]})
    # b has another image of one token. Of its next image some tokens are already cached, as after a prefix hit.
    engine.step({"a": 1, "b": 40}, padding=9, images={"b": [(0, 9), (12, 12), (30, 70)]})
    engine.step({"a": 1, "c": 20, "b": 60}, padding=3, images={"b": [(0, 9), (30, 70), (90, 99)], "a": [(3, 20)]})
    engine.step({"b": 1, "a": 1, "c": 1}, padding=0, images={"b": [(90, 99)]})


def test_a_layer_that_reads_another_layers_cache_attends_in_images_both_ways(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", shared=True)
    engine.step({"a": 50}, padding=0, images={"a": [(3, 20), (30, 45)]})
    engine.step({"a": 1, "b": 40}, padding=5, images={"b": [(10, 39)]})


def test_the_last_tokens_of_an_image_are_not_treated_as_drafts(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", drafts=3)
    engine.step({"a": 40, "b": 30}, padding=0)
    engine.step({"a": 4, "b": 3, "c": 20}, padding=2, wrong={"a": 2}, images={"b": [(20, 32)]})


def test_a_model_may_turn_off_bidirectional_image_attention_for_a_group_of_layers(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4")
    build = engine.builder.build

    def without(*args: Any) -> Any:
        found = build(*args)
        assert found.mm_prefix_range is not None
        found.mm_prefix_range = None  # Gemma 4 does the same.
        images.clear()
        return found

    engine.builder.build = without
    engine.step({"a": 50}, padding=0, images=(images := {"a": [(3, 20)]}))


@pytest.mark.parametrize(("recent", "shared"), [(64, False), (0, True)])
def test_heads_of_512_elements_need_no_flash_attention(
    cuda: Any, recent: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get_flash_attn_version", "flash_attn_varlen_func"):
        monkeypatch.delattr(cuda, name)
    room = 8 * cuda.workspace_bytes(0.9)  # The workspace has room for as many tokens as with narrow heads.
    monkeypatch.setattr(cuda, "workspace_bytes", lambda _part: room)
    engine = Engine(cuda, "k4v4", recent=recent, shared=shared, dim=512)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"b": 30, "a": 1}, padding=3)
    engine.step({"a": 1, "b": 1}, padding=2)


def test_contexts_longer_than_the_workspace_are_read_in_full_chunks(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(cuda, "k4v4")
    engine.step({"a": 3, "b": 150}, padding=0)
    seen: list[list[int]] = []
    gather = GpuPages.gather

    def watch(pages: GpuPages, slots: torch.Tensor, ordinals: torch.Tensor, *rest: torch.Tensor) -> None:
        seen.append(ordinals.tolist())
        gather(pages, slots, ordinals, *rest)

    monkeypatch.setattr(GpuPages, "gather", watch)
    engine.step({"a": 12, "b": 12}, padding=4)
    assert seen == [[1, 2, 3, *range(1, 62)], [*range(62, 126)], [*range(126, 151)]]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 100))
def test_every_context_token_is_in_one_chunk_and_all_chunks_but_the_last_are_full(
    lengths: list[int], room: int
) -> None:
    from kvpilot_runtime.backends.cuda_steps import packed

    chunks = [(begins.tolist(), counts.tolist()) for begins, counts in packed(torch.tensor(lengths), room)]
    assert [sum(counts) for _, counts in chunks[:-1]] == [room] * max(0, len(chunks) - 1)
    assert all(0 < sum(counts) <= room for _, counts in chunks)
    for i, length in enumerate(lengths):
        read = [range(begins[i], begins[i] + counts[i]) for begins, counts in chunks]
        assert [token for part in read for token in part] == list(range(length))


def test_decode_overlaps_with_store_in_a_step_without_prefills(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4")
    asked: list[bool] = []
    update = engine.builder.plan.update
    engine.builder.plan.update = lambda lens, overlap, several: (asked.append(overlap), update(lens, overlap, several))
    engine.step({"a": 5}, padding=0)
    engine.step({"a": 1, "b": 6}, padding=0)
    engine.step({"a": 1, "b": 1}, padding=0)
    assert asked == [False, False, True]


def test_decode_does_not_overlap_with_store_in_a_step_with_drafts(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", drafts=2)
    asked: list[bool] = []
    update = engine.builder.plan.update
    engine.builder.plan.update = lambda lens, overlap, several: (asked.append(overlap), update(lens, overlap, several))
    engine.step({"a": 5}, padding=0)
    engine.step({"a": 2, "b": 1}, padding=0, wrong={"a": 1})
    engine.step({"a": 1, "b": 1}, padding=0)
    assert asked == [False, False, True]


class Launches:
    """Wrapper of a kernel that records which variants Triton would compile."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        # Our stand-in runs Gluon's kernels, and Triton's interpreter runs its own.
        if isinstance(self.kernel, EagerKernel):
            function = vars(self.kernel.module)[self.kernel.kernel]
            name, plain = self.kernel.kernel, [p.name for p in function.params if p.do_not_specialize]
            anywhere = [p.name for p in function.params if p.do_not_specialize_on_alignment]
        else:
            function = self.kernel
            name, plain = function.fn.__name__, function.kwargs["do_not_specialize"] or ()
            anywhere = function.kwargs["do_not_specialize_on_alignment"] or ()

        def launch(*args: Any, **constants: Any) -> None:
            given = zip(function.arg_names, args, strict=False)
            kinds = tuple(self.kind(value, arg not in anywhere) for arg, value in given if arg not in plain)
            self.seen.add((name, kinds, tuple(sorted((key, str(value)) for key, value in constants.items()))))
            self.kernel[grid](*args, **constants)

        return launch

    @staticmethod
    def kind(value: Any, aligned: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, aligned and value.data_ptr() % 16 == 0
        return type(value), *([aligned and value % 16 == 0, value == 1] if isinstance(value, int) else [])


@pytest.mark.parametrize(("drafts", "recent"), [(0, 0), (3, 64)])
def test_launch_parameters_are_computed_at_start_for_every_kind_of_step(
    cuda: Any, drafts: int, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: dict[int, Taken] = {}
    attend, taken = GpuPages.attend, Taken(200, 17664)
    monkeypatch.setattr(GpuPages, "attend", lambda *args: attend(*args) or taken)
    monkeypatch.setattr(Shape, "settle", lambda _, tokens, found: settled.update({tokens: found}))
    engine = Engine(cuda, "k4v4", recent=recent, drafts=drafts)
    assert settled == dict.fromkeys(range(1, drafts + 2), taken)
    settled.clear()
    engine.step({"a": 20}, padding=0)
    engine.step({"a": 1 + drafts}, padding=0)
    assert not settled  # A captured graph has a fixed grid.


@pytest.mark.parametrize(
    ("width", "recent", "drafts"),
    [(1, 0, 0), (4, 64, 0), (4, 0, 3), (16, 64, 3)],
)
def test_no_step_launches_a_variant_that_was_not_compiled_at_start(
    cuda: Any, width: int, recent: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpilot_kernels.gpu.decode import schedule as plan
    from kvpilot_kernels.gpu.launch import pages

    seen: set[Any] = set()
    monkeypatch.setattr(plan, "plan_kernel", Launches(plan.plan_kernel, seen))
    for name in ("store_kernel", "decode_kernel", "reduce_kernel", "gather_kernel"):
        monkeypatch.setattr(pages, name, Launches(getattr(pages, name), seen))
    engine = Engine(cuda, "k4v4", width=width, recent=recent, drafts=drafts)
    at_start = set(seen)
    seen.clear()
    steps = [{"a": 9}, {"a": 1, "b": 20}, {"a": 12, "b": 11}, {"a": 1, "b": 1, "c": 14}, {"a": 1, "b": 1, "c": 1}]
    if drafts:
        steps += [{"a": 4, "b": 3, "c": 1}, {"a": 4, "b": 4}, {"a": 2, "b": 1, "c": 6}, {"a": 3, "b": 3}, {"a": 2}]
    for new in steps:
        engine.step(new, padding=2)
    assert len({name for name, *_ in seen}) == 5
    assert seen <= at_start, seen - at_start


@pytest.mark.parametrize(("name", "recent"), [("k8v4", 0), ("k4v4", 64)])
def test_a_layer_that_reads_another_layers_cache_stores_nothing(cuda: Any, name: str, recent: int) -> None:
    engine = Engine(cuda, name, blocks=24, recent=recent, shared=True)
    engine.step({"a": 20}, padding=0)
    engine.step({"a": 20}, padding=0)
    engine.step({"a": 1, "d": 10}, padding=2)
    engine.step({"a": 1, "d": 20}, padding=2)  # The workspace holds context and new tokens of d together.
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 1}, padding=2)
    engine.step({"a": 1, "b": 60, "c": 100}, padding=3)  # Contexts are read in several chunks.
    engine.step({"c": 1, "a": 1, "b": 1}, padding=0)


def test_attention_sinks_take_their_weight_in_prefill_and_decode(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", blocks=24, sinks=torch.tensor([3.0, -2.0, 0.5, 6.0], dtype=torch.bfloat16))
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 60, "c": 100}, padding=3)
    engine.step({"c": 1, "a": 1, "b": 1}, padding=2)


def test_more_than_16_query_heads_may_share_a_kv_head(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", blocks=24, recent=64, drafts=1, heads=2 * 19)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=3)
    engine.step({"a": 2, "b": 2}, padding=2, wrong={"a": 1})
    engine.step({"a": 1, "b": 1}, padding=0)


def test_the_first_layer_holds_a_steps_buffers_until_the_builder_makes_its_own(cuda: Any) -> None:
    engine, cpu = Engine(cuda, "k4v4", shared=True), torch.device("cpu")
    builder, config = engine.builder, engine.builder.vllm_config
    config.device_config = SimpleNamespace(device=cpu)
    for one in engine.layers:
        one.impl._config = config
        one.impl.process_weights_after_loading(torch.float32)
    first, second = (one.impl for one in engine.layers)
    assert second.reserved is None
    for name in ("partial", "lse", "rotated", "sums", "splits"):
        assert getattr(first.reserved, name).shape == getattr(builder.plan, name).shape
    type(builder)(builder.kv_cache_spec, ["x"], config, cpu)
    assert first.reserved is None
    first.process_weights_after_loading(torch.float32)  # vLLM calls this again when it reloads weights.
    assert first.reserved is None


def test_layers_share_a_workspace_that_is_freed_with_them(cuda: Any) -> None:
    cpu, kept = torch.device("cpu"), []
    for _ in range(2):
        layers = [cuda.CudaImpl(HEADS, dim, 0.125, KV_HEADS, None, None, "k4v4") for dim in (DIM, 128)]
        context = {str(i): SimpleNamespace(impl=impl) for i, impl in enumerate(layers)}
        for impl in layers:
            impl._config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        spaces = [impl.workspace(cpu, torch.bfloat16) for impl in layers]
        assert [space.shape[3] for space in spaces] == [DIM, 128]
        assert len({space.untyped_storage().data_ptr() for space in spaces}) == 1
        kept.append(weakref.ref(layers[0].workspaces[cpu]))
    assert kept[1]() is not None
    del layers, context, impl, spaces
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_the_workspace_grows_with_the_engines_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpilot_runtime.backends.cuda import workspace_bytes

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 2**30))
    assert workspace_bytes(0.5) == 80 * 2**30 // 400
