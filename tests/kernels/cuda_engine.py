"""Run one layer of the CUDA backend on a CPU, step by step: real metadata and kernels, FlashAttention in plain torch.

FlashAttention, and vLLM's kernel that merges partial results, run only on GPUs. Their stand-ins also multiply the rows
after the last token by zero, so that a NaN in the padding shows.
"""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import pages, tuning
from kvpilot_kernels.gpu.launch.tuning import Block, Choice
from kvpilot_kernels.reference.attention import attend, decode_reference, round_trip
from kvpilot_runtime.vllm_api.compat import backend_class
from support.gpu_batch import PAST_THE_END, generator, poisoned
from support.prefill_reference import prefill_reference

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 64


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
                    causal: bool, softcap: float, fa_version: int, out: torch.Tensor | None = None,
                    return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """Compute attention of sequences of any lengths, causal up to the last key. Without keys return 0 and -inf."""
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
        # The GPU reads the last tile beyond the sequence's end, so do the same, at most to the end of the tensor.
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
    """Merge two partial results by their log-sums. One of them may be empty."""
    both = torch.logaddexp(one_lse, two_lse)
    weights = [(lse - both).exp().T[..., None] for lse in (one_lse, two_lse)]
    out.copy_(one * weights[0] + two * weights[1])
    if out_lse is not None:
        out_lse.copy_(both)


def cuda_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the CUDA backend's module, with stand-ins for GPU-only parts."""
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    from kvpilot_runtime.backends import cuda as module
    from kvpilot_runtime.backends import cuda_steps, packed

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
    monkeypatch.setattr(packed, "window", lambda _config: 0)
    # Use small tiles and a wave of 2 programs per KV head.
    monkeypatch.setattr(tuning, "choose", lambda *_: Choice(16, 2, 4))
    monkeypatch.setattr(tuning, "FEW_TOKENS", 4)  # With this setting, steps use all block sizes of `store`.
    # The interpreter takes as long for a program of 8 tokens as for one of 64.
    stores = {dim: (few, Block(64, many.warps)) for dim, (few, many) in tuning.STORES.items()}
    monkeypatch.setattr(tuning, "STORES", stores)
    monkeypatch.setattr(tuning, "GATHERS", {dim: Block(64, one.warps) for dim, one in tuning.GATHERS.items()})
    monkeypatch.setattr(module, "flash_attn_varlen_func", flash_attention)
    monkeypatch.setattr(module, "merge_attn_states", merge)
    monkeypatch.setattr(module, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(
        module, "workspace_bytes", lambda _part: 4 * KV_HEADS * DIM * 64
    )  # A small workspace, so that contexts come in many chunks.
    whole = cuda_steps.CudaBuilder.warm_up
    monkeypatch.setattr(cuda_steps.CudaBuilder, "warm_up", lambda builder: warm_up(builder, whole))
    return module


def warm_up(builder: Any, whole: Callable[[Any], None]) -> None:
    """Launch every variant as the backend does, but run only the first program of a launch. Nobody reads the results.

    All programs would take most of the time of these tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("store_kernel", "decode_kernel", "reduce_kernel"):
            patch.setattr(pages, name, FirstProgram(getattr(pages, name)))
        whole(builder)


class FirstProgram:
    """A kernel that runs only the first program of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return self.kernel[1, 1, 1]


class Engine:
    """Sequences that grow step by step in one layer of the backend. A reference implementation checks every output."""

    def __init__(
        self, module: Any, name: str, blocks: int = 12, width: int = 4, recent: int = 0, drafts: int = 0,
        chunk: int = 0, heads: int = HEADS, sinks: torch.Tensor | None = None, shared: bool = False, dim: int = DIM,
    ) -> None:  # fmt: skip
        """Create the layer. `shared` adds a layer that reads the first one's cache, and checks the output of that
        layer.
        """
        from kvpilot_runtime.backends import packed

        self.dim, self.width, self.drafts, self.chunk = dim, width, drafts, chunk
        speculation = SimpleNamespace(method="ngram", num_speculative_tokens=drafts) if drafts else None
        known = vars(packed)["get_current_vllm_config"]()
        known.speculative_config = speculation
        self.fmt, self.rng = formats.parse(name), generator(11)
        self.heads, self.sinks = heads, sinks
        self.impl = module.CudaImpl(heads, self.dim, self.dim**-0.5, KV_HEADS, None, None, name, sinks=sinks)
        self.impl.recent = recent
        layer = SimpleNamespace(impl=self.impl, layer_name="model.layers.0.self_attn.attn")
        layers = {"x": layer}
        if shared:
            other = module.CudaImpl(
                heads,
                self.dim,
                self.dim**-0.5,
                KV_HEADS,
                None,
                None,
                name,
                kv_sharing_target_layer_name=layer.layer_name,
            )
            other.recent = recent
            layers["y"] = SimpleNamespace(impl=other, layer_name="model.layers.1.self_attn.attn")
        known.compilation_config.static_forward_context = layers
        self.layers = list(layers.values())
        # Only the first key has its own mean, so every step must know where position 0 is.
        self.factors = Factors.identity(KV_HEADS, self.dim)
        self.factors.key_first.copy_(torch.arange(self.dim).cos())
        for one in self.layers:
            one.impl.set_factors(one, self.factors)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers, max_cudagraph_capture_size=8),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256),
            cache_config=SimpleNamespace(cache_dtype=name),
            model_config=SimpleNamespace(dtype=torch.float32, max_model_len=width * BLOCK),
            speculative_config=speculation, kv_transfer_config=None,
            parallel_config=SimpleNamespace(enable_dbo=False, ubatch_size=0),
        )  # fmt: skip
        kind = getattr(module, backend_class(name))
        if chunk:  # vLLM creates the backend of a layer with chunked attention in this way.
            made = pytest.importorskip("vllm.model_executor.layers.attention.chunked_local_attention")
            kind = made.create_chunked_local_attention_backend(kind, chunk)
        spec = SimpleNamespace(block_size=BLOCK)
        self.builder = kind.get_builder_cls()(spec, list(layers), config, torch.device("cpu"))
        assert self.builder.shape.cut().wave in (1, 2)
        self.cache = poisoned(blocks, KV_HEADS, BLOCK, self.fmt, self.dim)
        self.free = list(range(1, blocks))
        self.tables: dict[str, list[int]] = {}
        self.residuals = self.impl.residuals(self.cache)
        self.keys: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}

    def step(
        self, new: dict[str, int], padding: int, wrong: dict[str, int] | None = None, resumed: bool = False,
        images: dict[str, list[tuple[int, int]]] | None = None,
    ) -> None:  # fmt: skip
        """Run one step with `new` tokens for each sequence, decodes first, and check every output row.

        NaN rows of padding follow the tokens. The last `wrong` tokens of a sequence are rejected afterwards. Sequences
        with more tokens than a decode step are prefilled, unless they are `resumed`. The tokens of each range in
        `images` (first to last) attend to each other in both directions.
        """
        images = images or {}
        counts = list(new.values())
        total = sum(counts)
        query, fresh_k, fresh_v = (
            torch.cat(
                [
                    torch.randn(total, heads, self.dim, generator=self.rng),
                    torch.full((padding, heads, self.dim), torch.nan),
                ]
            )
            for heads in (self.heads, KV_HEADS, KV_HEADS)
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
                self.refine(blocks[-1])
            table[i, : len(blocks)] = torch.tensor(blocks)
            places = range(before[name], before[name] + count)
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in places]
            at += count
        lens = torch.tensor([len(self.keys[name]) for name in new], dtype=torch.int32)
        prompts = (torch.tensor(counts) > 1 + self.drafts) & (not resumed)
        prompts |= torch.tensor([name in images for name in new])
        common = SimpleNamespace(
            num_reqs=len(new), causal=True, max_query_len=max(counts), num_actual_tokens=total + padding, seq_lens=lens,
            query_start_loc_cpu=(starts := torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)),
            query_start_loc=starts,
            # This is the upper bound: the lengths if all earlier drafts had been accepted. Prompts have no drafts.
            seq_lens_cpu_upper_bound=torch.where(prompts, lens, lens + self.drafts), is_prefilling=prompts,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
            mm_req_doc_ranges={i: images.get(name, []) for i, name in enumerate(new)},
        )  # fmt: skip
        out = torch.full((total + padding, self.heads * self.dim), torch.nan)
        meta = self.builder.build(0, common)
        new_tokens: tuple[torch.Tensor | None, ...] = fresh_k, fresh_v
        for one in self.layers:  # only the last layer's output is checked
            one.impl.forward(one, query, *new_tokens, self.cache, meta, out.fill_(torch.nan).view(query.shape))
            new_tokens = None, None
        at = 0
        for name, seen, first, end, decodes in self.pieces(new, before, images):
            count, scale = end - first, self.dim**-0.5
            cut = [(max(a - first, 0), min(z + 1 - first, count)) for a, z in images.get(name, [])]
            spans = [(a, z) for a, z in cut if a < z]
            these = slice(at, at + count)
            keys, values = self.keys[name][seen:end], self.values[name][seen:end]
            if decodes:
                ends = range(first + 1 - seen, end + 1 - seen)
                each = [(query[at + i], keys[:end], values[:end]) for i, end in enumerate(ends)]
                wanted = torch.stack([
                    decode_reference(*one, self.fmt, scale, self.factors, sinks=self.sinks) if self.residuals is None
                    else self.with_window(name, *one)
                    for one in each
                ])  # fmt: skip
            elif len(self.layers) > 1:
                old = [round_trip(x, self.fmt, s, self.factors) for x, s in ((keys, "key"), (values, "value"))]
                wanted = attend(query[these], old[0], old[1], scale, spans=spans)
            else:
                stored = len(keys) if self.impl.read_back else first - seen
                wanted = prefill_reference(
                    query[these], keys, values, stored, self.fmt, scale, self.factors, sinks=self.sinks, spans=spans
                )
            found = out[these].view(count, self.heads, self.dim)
            assert ((found - wanted).norm(dim=-1) < 2e-3 * wanted.norm(dim=-1)).all(), name
            at += count
        for name, count in (wrong or {}).items():
            self.keys[name], self.values[name] = self.keys[name][:-count], self.values[name][:-count]

    def pieces(
        self, new: dict[str, int], before: dict[str, int], images: dict[str, Any]
    ) -> Iterator[tuple[str, int, int, int, bool]]:
        """Yield parts of the new tokens: sequence, first visible token, first token, end, and True for a decode."""
        number, decodes = itertools.count(1), True
        for name, count in new.items():
            first, last = before[name], before[name] + count
            while first < last:
                seen = first - first % self.chunk if self.chunk else 0
                end = min(last, seen + self.chunk) if self.chunk else last
                decodes &= end - first <= 1 + self.drafts and next(number) <= self.builder.plan.sequences
                decodes &= end - first == 1 or not images.get(name)
                yield name, seen, first, end, decodes
                first = end

    def refine(self, block: int) -> None:
        """Give a new block residual pages, from the same pool. Leave out every third block of the cache."""
        if self.residuals is not None and block % 3:
            pages = self.residuals.pages[block]
            pages.copy_(torch.tensor([self.free.pop() for _ in pages]))

    def with_window(self, name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Compute one query's attention. The newest blocks are read with residuals if they have residual pages."""
        block = torch.arange(len(keys)) // BLOCK
        near = block >= -(-len(self.keys[name]) // BLOCK) - int(self.residuals.newest)
        near = (near & (self.residuals.pages[torch.tensor(self.tables[name])[block], 0] > 0))[:, None, None]

        def read(x: torch.Tensor, side: str) -> torch.Tensor:
            fine, coarse = (round_trip(x, self.fmt, side, self.factors, recent) for recent in (True, False))
            return torch.where(near, fine, coarse)

        return attend(query[None], read(keys, "key"), read(values, "value"), self.dim**-0.5)[0]
