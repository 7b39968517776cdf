"""The CUDA backend's steps on a CPU: real metadata, our kernels in the interpreter, and FlashAttention in plain torch.

FlashAttention and the merge of its parts run on GPUs only. What stands in for them here does what they do to rows
behind the last token, too: multiplies them by zero, so that NaN in padding shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu import tuning
from kvpilot_kernels.gpu.pages import GpuPages
from kvpilot_kernels.gpu.tuning import Choice
from kvpilot_kernels.reference.attention import attend, decode_reference, prefill_reference, round_trip
from kvpilot_runtime.compat import backend_class
from support.gluon_eager import EagerKernel
from support.gpu_batch import PAST_THE_END, generator, poisoned

fa_utils = pytest.importorskip("vllm.v1.attention.backends.fa_utils")

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 64


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
                    causal: bool, softcap: float, fa_version: int, out: torch.Tensor | None = None,
                    return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """Variable-length attention, causal at the bottom right; a sequence without keys gets zeros and -inf."""
    assert fa_version == 3
    assert softcap == 0
    result = torch.full_like(query, torch.nan) if out is None else out
    lse = torch.full((query.shape[1], query.shape[0]), -torch.inf)
    for i in range(len(cu_seqlens_q) - 1):
        q = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        k = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        new, old = q.stop - q.start, k.stop - k.start
        assert new <= max_seqlen_q
        assert old <= max_seqlen_k
        # The last tile goes past the sequence's end, as far as the tensor does.
        tile = slice(k.start, min(k.start + -(-old // 128) * 128, key.shape[0]))
        keys, values = (x[tile].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("ihd,thd->hit", query[q], keys) * softmax_scale
        hidden = torch.arange(keys.shape[0]) >= old
        if causal:
            hidden = hidden | (torch.arange(keys.shape[0])[None] > torch.arange(new)[:, None] + old - new)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, q] = scores.logsumexp(-1)
        p = (scores - lse[:, q, None]).exp().nan_to_num(0.0)
        result[q] = torch.einsum("hit,thd->ihd", p, values)
    return (result, lse) if return_softmax_lse else result


def merge(out: torch.Tensor, one: torch.Tensor, one_lse: torch.Tensor, two: torch.Tensor, two_lse: torch.Tensor,
          out_lse: torch.Tensor | None = None) -> None:  # fmt: skip
    """Partial results by their log-sums; one of two may be empty."""
    both = torch.logaddexp(one_lse, two_lse)
    weights = [(lse - both).exp().T[..., None] for lse in (one_lse, two_lse)]
    out.copy_(one * weights[0] + two * weights[1])
    if out_lse is not None:
        out_lse.copy_(both)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module, with stand-ins for what only a GPU has."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    from kvpilot_runtime import backend
    from kvpilot_runtime import cuda as module

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256))
    monkeypatch.setattr(backend, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(backend, "calibration_of", lambda _config: None)
    # Small tiles, and a wave of 2 programs a KV head.
    monkeypatch.setattr(tuning, "choose", lambda *_: Choice(16, 2, 4))
    monkeypatch.setattr(tuning, "FEW_TOKENS", 4)  # steps meet both of `store`'s blocks
    monkeypatch.setattr(module, "flash_attn_varlen_func", flash_attention)
    monkeypatch.setattr(module, "merge_attn_states", merge)
    monkeypatch.setattr(module, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 4 * KV_HEADS * DIM * 64)  # contexts come in many chunks
    monkeypatch.setattr(module.CudaImpl, "_workspace", {})
    monkeypatch.setattr(module.CudaBuilder, "_upload", lambda _self, x: x)
    monkeypatch.setattr(backend, "get_forward_context", lambda: STEP)
    return module


STEP = SimpleNamespace(attn_metadata=None)
"""vLLM's forward context of the step that runs."""


class Engine:
    """Sequences that grow by steps through one layer of the backend, and what each step should have given."""

    def __init__(
        self, module: Any, name: str, blocks: int = 12, width: int = 4, recent: int = 0, drafts: int = 0, chunk: int = 0
    ) -> None:  # fmt: skip
        from kvpilot_runtime import backend

        self.width, self.recent, self.drafts, self.chunk = width, recent, drafts, chunk
        speculation = SimpleNamespace(method="ngram", num_speculative_tokens=drafts) if drafts else None
        backend.get_current_vllm_config().speculative_config = speculation
        self.fmt, self.rng = formats.parse(name), generator(11)
        self.impl = module.CudaImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, name)
        self.impl.recent = recent
        layer = SimpleNamespace(impl=self.impl, layer_name="model.layers.0.self_attn.attn")
        # Keys at position 0 alone have a mean: every step must know which they are.
        self.factors = Factors.identity(KV_HEADS, DIM)
        self.factors.key_first.copy_(torch.arange(DIM).cos())
        self.impl.set_factors(layer, self.factors)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"x": layer}, max_cudagraph_capture_size=8),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256),
            cache_config=SimpleNamespace(cache_dtype=name),
            model_config=SimpleNamespace(dtype=torch.float32, max_model_len=width * BLOCK),
            speculative_config=speculation, kv_transfer_config=None,
        )  # fmt: skip
        self.layer = layer
        kind = getattr(module, backend_class(name))
        if chunk:  # as vLLM makes the backend of such a layer
            made = pytest.importorskip("vllm.model_executor.layers.attention.chunked_local_attention")
            kind = made.create_chunked_local_attention_backend(kind, chunk)
        self.builder = kind.get_builder_cls()(SimpleNamespace(block_size=BLOCK), ["x"], config, torch.device("cpu"))
        assert self.builder.shape.cut().wave == 2
        self.cache = poisoned(blocks, KV_HEADS, BLOCK, self.fmt, DIM)
        self.free = list(range(1, blocks))
        self.tables: dict[str, list[int]] = {}
        self.ring_tables: dict[str, list[int]] = {}
        if recent:
            # The rings are pages of the same pool.
            self.impl.ring = SimpleNamespace(kv_cache=self.cache, layer_name="ring")
            kept = recent + drafts
            spec = SimpleNamespace(kept=kept, ring_blocks=self.fmt.ring_blocks(kept, DIM, BLOCK),
                                   ring_tokens=self.fmt.ring_layout(DIM, BLOCK).tokens)  # fmt: skip
            self.ring_builder = module.CudaRingBuilder(spec, ["x"], config, torch.device("cpu"))
        self.keys: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}

    def step(
        self, new: dict[str, int], padding: int, wrong: dict[str, int] | None = None, resumed: bool = False,
    ) -> None:  # fmt: skip
        """New tokens by sequence, decodes first; rows of padding follow, all NaN. Checks the output of every row.

        Of a sequence's new tokens the last `wrong` are taken back. Sequences of many tokens are in their prompts,
        unless they are `resumed`.
        """
        counts = list(new.values())
        total = sum(counts)
        query, fresh_k, fresh_v = (
            torch.cat(
                [torch.randn(total, heads, DIM, generator=self.rng), torch.full((padding, heads, DIM), torch.nan)]
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        slots, at = [], 0
        table = torch.full((len(new), self.width), PAST_THE_END, dtype=torch.int32)
        before = {}
        for i, (name, count) in enumerate(new.items()):
            before[name] = len(self.keys.get(name, []))
            for kept, rows in ((self.keys, fresh_k), (self.values, fresh_v)):
                kept[name] = torch.cat([kept.get(name, rows[:0]), rows[at : at + count]])
            blocks = self.tables.setdefault(name, [])
            while len(blocks) * BLOCK < len(self.keys[name]):
                blocks.append(self.free.pop())
            table[i, : len(blocks)] = torch.tensor(blocks)
            places = range(before[name], before[name] + count)
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in places]
            at += count
        lens = torch.tensor([len(self.keys[name]) for name in new], dtype=torch.int32)
        prompts = (torch.tensor(counts) > 1 + self.drafts) & (not resumed)
        common = SimpleNamespace(
            num_reqs=len(new), causal=True, max_query_len=max(counts), num_actual_tokens=total + padding, seq_lens=lens,
            query_start_loc_cpu=(starts := torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)),
            query_start_loc=starts,
            # As if all that was drafted before had been accepted, but in a prompt.
            seq_lens_cpu_upper_bound=torch.where(prompts, lens, lens + self.drafts), is_prefilling=prompts,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )  # fmt: skip
        out = torch.full((total + padding, HEADS * DIM), torch.nan)
        meta = self.builder.build(0, common)
        STEP.attn_metadata = {"ring": self.rings(common, list(new))} if self.recent else None
        self.impl.forward(self.layer, query, fresh_k, fresh_v, self.cache, meta, out)
        at = 0
        for name, seen, first, end, decodes in self.pieces(new, before):
            count, scale = end - first, DIM**-0.5
            rows = slice(at, at + count)
            keys, values = self.keys[name][seen:end], self.values[name][seen:end]
            if decodes:
                ends = range(first + 1 - seen, end + 1 - seen)
                each = [(query[at + i], keys[:end], values[:end]) for i, end in enumerate(ends)]
                wanted = torch.stack([
                    self.with_window(*one) if self.recent else decode_reference(*one, self.fmt, scale, self.factors)
                    for one in each
                ])  # fmt: skip
            else:
                wanted = prefill_reference(query[rows], keys, values, first - seen, self.fmt, scale, self.factors)
            found = out[rows].view(count, HEADS, DIM)
            assert ((found - wanted).norm(dim=-1) < 2e-3 * wanted.norm(dim=-1)).all(), name
            at += count
        for name, count in (wrong or {}).items():
            self.keys[name], self.values[name] = self.keys[name][:-count], self.values[name][:-count]

    def pieces(self, new: dict[str, int], before: dict[str, int]) -> Iterator[tuple[str, int, int, int, bool]]:
        """New tokens [first, end) of a sequence that see it from `seen` on, and whether they decode."""
        number, decodes = itertools.count(1), True
        for name, count in new.items():
            first, last = before[name], before[name] + count
            while first < last:
                seen = first - first % self.chunk if self.chunk else 0
                end = min(last, seen + self.chunk) if self.chunk else last
                decodes &= end - first <= 1 + self.drafts and next(number) <= self.builder.plan.sequences
                yield name, seen, first, end, decodes
                first = end

    def rings(self, common: Any, names: list[str]) -> Any:
        """What the ring layers' builder makes of the step; pages as a sequence's tokens come to them."""
        blocks, tokens = self.ring_builder.kv_cache_spec.ring_blocks, self.ring_builder.kv_cache_spec.ring_tokens
        table = torch.zeros(len(names), max(self.width, blocks), dtype=torch.int32)
        for i, name in enumerate(names):
            own = self.ring_tables.setdefault(name, [])
            while len(own) < min(-(-len(self.keys[name]) // tokens), blocks):
                own.append(self.free.pop())
            table[i, : len(own)] = torch.tensor(own)
        return self.ring_builder.build(0, SimpleNamespace(**{**vars(common), "block_table_tensor": table}))

    def with_window(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of one query that reads the window's tokens finer."""
        near = (torch.arange(len(keys)) >= len(keys) - self.recent)[:, None, None]
        read = [
            torch.where(near, *(round_trip(x, self.fmt, side, self.factors, r) for r in (True, False)))
            for x, side in ((keys, "key"), (values, "value"))
        ]
        return attend(query[None], *read, DIM**-0.5)[0]


@pytest.mark.parametrize(("name", "recent"), [("k4v4", 64), ("k4v4", 128), ("k8v4", 64), ("k2v2", 64)])
def test_a_step_of_one_token_reads_the_window_whatever_came_before_it(cuda: Any, name: str, recent: int) -> None:
    engine = Engine(cuda, name, blocks=24, recent=recent)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 30, "c": 150}, padding=3)
    engine.step({"c": 1, "a": 1, "b": 1}, padding=5)
    engine.step({"b": 1, "c": 44, "a": 2}, padding=0)
    engine.step({"a": 1, "c": 1, "b": 1}, padding=2)


@pytest.mark.parametrize("name", ["int8", "k4v4"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_layer_that_attends_within_chunks_sees_none_before_its_own(cuda: Any, name: str, drafts: int) -> None:
    engine = Engine(cuda, name, blocks=24, width=7, drafts=drafts, chunk=2 * BLOCK)
    engine.step({"a": BLOCK}, padding=3)
    engine.step({"a": 2 * BLOCK - 1, "b": 4 * BLOCK + 7}, padding=0)  # three chunks of b at once
    engine.step({"a": 1, "b": 1}, padding=2)
    engine.step({"a": 1, "b": 2 * BLOCK - 9, "c": 2 * BLOCK + 1}, padding=2)
    engine.step({"b": 2, "a": 1, "c": 1}, padding=2)  # b goes into its next chunk


def test_more_pieces_of_chunks_than_sequences_may_decode_are_served_as_prompts_are(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", blocks=24, chunk=BLOCK)
    most, names = engine.builder.plan.sequences, "abcdefgh"
    for name in names:
        engine.step({name: BLOCK - 1}, padding=0)
    assert 2 * len(names) > most
    engine.step(dict.fromkeys(names, 2), padding=0)  # one token in a chunk, one in the next


@pytest.mark.parametrize(("name", "recent"), [("k4v4", 0), ("k4v4", 64), ("k2v2", 64)])
def test_a_step_with_drafts_is_one_of_single_tokens_whatever_was_taken_back_before(
    cuda: Any, name: str, recent: int
) -> None:
    engine = Engine(cuda, name, blocks=24, recent=recent, drafts=3)
    engine.step({"a": 70}, padding=0)
    engine.step({"a": 4, "b": 60}, padding=9, wrong={"a": 3})
    engine.step({"a": 4, "b": 4}, padding=4, wrong={"a": 2, "b": 3})
    engine.step({"b": 4, "a": 4}, padding=0, wrong={"b": 3})  # a uniform step, as captured graphs have
    engine.step({"b": 3, "a": 1, "c": 30}, padding=3, wrong={"b": 1})
    engine.step({"a": 1, "b": 1, "c": 1}, padding=5)
    engine.step({"a": 2, "c": 4, "b": 1}, padding=2, wrong={"c": 1})
    # Not in a prompt: only the GPU knows how long it is.
    engine.step({"b": 4, "c": 1, "a": 9}, padding=2, wrong={"b": 2}, resumed=True)


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_a_captured_graph_reads_lies_in_vllms_own_buffers_or_always_at_the_same_place(
    cuda: Any, drafts: int
) -> None:
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


@pytest.mark.parametrize("name", ["k4v4", "k8v4"])
def test_prompts_in_chunks_decodes_and_mixed_steps_equal_the_reference(cuda: Any, name: str) -> None:
    engine = Engine(cuda, name)
    engine.step({"a": 40}, padding=0)
    engine.step({"a": 1, "b": 70}, padding=9)
    engine.step({"a": 1, "b": 30, "c": 20}, padding=3)
    engine.step({"a": 1, "d": 1, "b": 1, "c": 44}, padding=20)  # d is a prompt of one token
    engine.step({"a": 1, "d": 1}, padding=0)
    engine.step({"a": 1, "b": 1, "c": 1}, padding=5)


def test_contexts_longer_than_the_workspace_come_in_full_chunks_however_unlike_they_are(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cuda, "k4v4")
    engine.step({"a": 3, "b": 150}, padding=0)
    seen: list[tuple[list[int], int]] = []
    gather = GpuPages.gather

    def watch(pages: GpuPages, table: Any, rows: torch.Tensor, begins: torch.Tensor, *rest: Any) -> None:
        seen.append((begins.tolist(), int(rows[-1])))
        gather(pages, table, rows, begins, *rest)

    monkeypatch.setattr(GpuPages, "gather", watch)
    engine.step({"a": 12, "b": 12}, padding=4)
    assert seen == [([0, 0], 64), ([3, 61], 64), ([3, 125], 25)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 100))
def test_every_token_of_every_context_is_in_one_chunk_and_only_the_last_has_room(lengths: list[int], room: int) -> None:
    from kvpilot_runtime.cuda_steps import packed

    chunks = [(begins.tolist(), counts.tolist()) for begins, counts in packed(torch.tensor(lengths), room)]
    assert [sum(counts) for _, counts in chunks[:-1]] == [room] * max(0, len(chunks) - 1)
    assert all(0 < sum(counts) <= room for _, counts in chunks)
    for i, length in enumerate(lengths):
        read = [range(begins[i], begins[i] + counts[i]) for begins, counts in chunks]
        assert [token for part in read for token in part] == list(range(length))


def test_a_step_of_decodes_alone_may_overlap_with_its_store(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4")
    asked: list[bool] = []
    update = engine.builder.plan.update
    engine.builder.plan.update = lambda lens, overlap, several: (asked.append(overlap), update(lens, overlap, several))
    engine.step({"a": 5}, padding=0)
    engine.step({"a": 1, "b": 6}, padding=0)
    engine.step({"a": 1, "b": 1}, padding=0)
    assert asked == [False, False, True]


def test_a_step_with_drafts_does_not_overlap_with_its_store(cuda: Any) -> None:
    engine = Engine(cuda, "k4v4", drafts=2)
    asked: list[bool] = []
    update = engine.builder.plan.update
    engine.builder.plan.update = lambda lens, overlap, several: (asked.append(overlap), update(lens, overlap, several))
    engine.step({"a": 5}, padding=0)
    engine.step({"a": 2, "b": 1}, padding=0, wrong={"a": 1})
    engine.step({"a": 1, "b": 1}, padding=0)
    assert asked == [False, False, True]


class Launches:
    """Stands before a kernel and notes what Triton would compile a variant for."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        # Gluon's kernels are run by a stand-in of ours, Triton's by its interpreter.
        if isinstance(self.kernel, EagerKernel):
            function = vars(self.kernel.module)[self.kernel.kernel]
            name, plain = self.kernel.kernel, [p.name for p in function.params if p.do_not_specialize]
        else:
            function = self.kernel
            name, plain = function.fn.__name__, function.kwargs["do_not_specialize"] or ()

        def launch(*args: Any, **constants: Any) -> None:
            given = zip(function.arg_names, args, strict=False)
            kinds = tuple(self.kind(value) for arg, value in given if arg not in plain)
            self.seen.add((name, kinds, tuple(sorted((key, str(value)) for key, value in constants.items()))))
            self.kernel[grid](*args, **constants)

        return launch

    @staticmethod
    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return type(value), *([value % 16 == 0, value == 1] if isinstance(value, int) else [])


@pytest.mark.parametrize(("recent", "drafts"), [(0, 0), (64, 0), (0, 3), (64, 3)])
@pytest.mark.parametrize("width", [4, 16, 1], ids=["odd", "aligned", "one"])
def test_no_step_launches_a_variant_that_was_not_compiled_at_start(
    cuda: Any, width: int, recent: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpilot_kernels.gpu import pages, plan, ring

    seen: set[Any] = set()
    monkeypatch.setattr(ring, "ring_slots_kernel", Launches(ring.ring_slots_kernel, seen))
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
    assert len({name for name, *_ in seen}) == 5 + (recent > 0)
    assert seen <= at_start, seen - at_start


def test_a_layer_that_uses_anothers_cache_is_refused(cuda: Any) -> None:
    with pytest.raises(cuda.UnsupportedModelError, match=r"another layer's KV cache is not supported with .*'k4v4'"):
        cuda.CudaImpl(HEADS, DIM, 1.0, KV_HEADS, None, None, "k4v4", kv_sharing_target_layer_name="model.layers.0")
