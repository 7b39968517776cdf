"""Attention over a bounded cache, with any backend of vLLM: give it block tables that list only the kept pages.

Stored keys already include their positions (RoPE), and causal attention depends only on the order of tokens. So a block
table can list the sinks' pages and then the window's pages, with a sequence length that counts only their tokens. Any
causal backend then attends to exactly the sinks and the window, and never reads freed pages. If the new tokens of a
sequence attend to different pages, the sequence is cut into several causal sequences (`pieces`).
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from kvpilot_formats.arguments import rules
from kvpilot_runtime.config import options, retention
from kvpilot_runtime.config.retention import SinksAndWindow
from kvpilot_runtime.errors import UnsupportedModelError


@dataclass
class Pieces:
    """A batch's new tokens, cut into pieces whose tokens attend to the same pages. All tensors are on the host.

    Attributes:
        owner: int64 [pieces], each piece's sequence.
        starts: int32 [pieces + 1], each piece's first row in the batch.
        lens: int32 [pieces], kept tokens up to and including the piece's last one.
        columns: int64 [pieces, blocks], kept columns of the owner's block table; those past `lens` are arbitrary.
    """

    owner: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    columns: torch.Tensor


def pieces(bound: SinksAndWindow, page: int, starts: torch.Tensor, seq_lens: torch.Tensor) -> Pieces:
    """Cut a batch's new tokens into pieces. A sequence without new tokens gets no piece.

    Args:
        page: tokens of a block.
        starts: int [sequences + 1], each sequence's first row.
        seq_lens: int [sequences], stored tokens after this step.
    """
    starts, seq_lens = starts.long(), seq_lens.long()
    new = starts[1:] - starts[:-1]
    token_owner = torch.repeat_interleave(torch.arange(len(new)), new)
    position = torch.arange(len(token_owner)) + (seq_lens - starts[1:])[token_owner]
    sinks = bound.sink_pages(page)
    first = ((position - bound.window + 1) // page).clamp(min=sinks)
    changes = torch.ones_like(first, dtype=torch.bool)
    changes[1:] = (first[1:] != first[:-1]) | (token_owner[1:] != token_owner[:-1])
    begins = changes.nonzero().flatten()
    ends = torch.cat([begins[1:], torch.tensor([len(first)])])
    gap = first[begins] - sinks
    columns = torch.arange(-(-bound.kept(page) // page)).repeat(len(begins), 1)
    columns = torch.where(columns < sinks, columns, columns + gap[:, None])
    lens = position[ends - 1] + 1 - gap * page
    return Pieces(token_owner[begins], torch.cat([begins, ends[-1:]]).int(), lens.int(), columns)


def kept_alone(common: Any, bound: SinksAndWindow, page: int) -> Any:
    """Return a batch (vLLM's `CommonAttentionMetadata`) whose sequences are the pieces, with tables of kept pages.

    `max_query_len` stays unchanged: backends conclude from it whether tokens attend to other tokens of the same step.
    """
    if common.causal is not True:
        raise UnsupportedModelError(
            f"attention to later tokens (causal=False) is not supported with {retention.VARIABLE}={bound}; leave it out"
        )
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    if not int(starts[-1]):
        return common
    # The host's lengths are exact, because bounded caches refuse speculation.
    lens = common.seq_lens_cpu_upper_bound
    lens = (common.seq_lens.cpu() if lens is None else lens)[: common.num_reqs]
    cut, device = pieces(bound, page, starts, lens), common.seq_lens.device
    table = common.block_table_tensor
    owner = cut.owner.to(device, non_blocking=True)
    columns = cut.columns.clamp(max=table.shape[1] - 1).to(device, non_blocking=True)
    changes = {
        "query_start_loc_cpu": cut.starts, "query_start_loc": cut.starts.to(device, non_blocking=True),
        "seq_lens": cut.lens.to(device, non_blocking=True), "seq_lens_cpu_upper_bound": cut.lens,
        "num_reqs": len(cut.lens), "max_seq_len": int(cut.lens.max()),
        "block_table_tensor": table[owner[:, None], columns],
        "is_prefilling": None if common.is_prefilling is None else common.is_prefilling[cut.owner],
        # Reset what vLLM has computed for whole sequences, so that it computes these for the pieces.
        "req_idx": None, "_num_computed_tokens_cache": None, "_token_to_req_indices_cache": None,
    }  # fmt: skip
    known = {f.name for f in fields(common)}
    return replace(common, **{name: value for name, value in changes.items() if name in known})


class KeptTables:
    """Tables of kept pages for steps with one new token per sequence, in buffers that captured graphs read."""

    def __init__(self, bound: SinksAndWindow, page: int, sequences: int, device: torch.device) -> None:
        self.bound, self.page = bound, page
        self.columns = torch.arange(-(-bound.kept(page) // page), device=device)
        self.table = torch.zeros(sequences, len(self.columns), dtype=torch.int32, device=device)
        self.lens = torch.zeros(sequences, dtype=torch.int32, device=device)

    def alone(self, common: Any) -> Any:
        """Return the same batch as `kept_alone`, without waiting for the device. Padded sequences keep length 0."""
        count, sinks, table = common.num_reqs, self.bound.sink_pages(self.page), common.block_table_tensor
        gap = self.gap(common.seq_lens[:count])
        columns = torch.where(self.columns < sinks, self.columns, self.columns + gap[:, None])
        torch.gather(table[:count], 1, columns.clamp(max=table.shape[1] - 1), out=self.table[:count])
        self.lens[:count] = common.seq_lens[:count] - gap * self.page
        host = common.seq_lens_cpu_upper_bound
        changes = {
            "seq_lens": self.lens[:count], "block_table_tensor": self.table[:count],
            "max_seq_len": min(common.max_seq_len, self.bound.kept(self.page)),
            "seq_lens_cpu_upper_bound": None if host is None else host - self.gap(host) * self.page,
            "_num_computed_tokens_cache": None,
        }  # fmt: skip
        known = {f.name for f in fields(common)}
        return replace(common, **{name: value for name, value in changes.items() if name in known})

    def gap(self, lens: torch.Tensor) -> torch.Tensor:
        """Return how many pages between sinks and window tables leave out, for sequences of `lens` tokens each."""
        return ((lens - self.bound.window) // self.page - self.bound.sink_pages(self.page)).clamp(min=0)


@cache
def bounded_backend(stock: Any) -> Any:
    """Return a subclass of vLLM's backend `stock` whose builder gets tables of kept pages only."""

    class Builder(stock.get_builder_cls()):  # type: ignore[misc]
        # vLLM would reuse this metadata with another KV-cache group's block table, which lists all pages.
        supports_update_block_table = False

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            sequences = max(vllm_config.scheduler_config.max_num_seqs, graphs)
            self.kept = KeptTables(kv_cache_spec.bound, kv_cache_spec.block_size, sequences, device)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
            """Limit full CUDA graphs to steps with one new token per sequence: only these steps use fixed buffers."""
            stock = super().get_cudagraph_support(vllm_config, kv_cache_spec)
            return min(stock, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda support: support.value)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            """Return the metadata of a batch, with tables of kept pages only."""
            common = common_attn_metadata
            if common.causal is True and common.max_query_len == 1:
                common = self.kept.alone(common)
            else:
                common = kept_alone(common, self.kv_cache_spec.bound, self.kv_cache_spec.block_size)
            return super().build(0, common, fast_build)

    body = {"get_builder_cls": staticmethod(lambda: Builder), "__module__": stock.__module__}
    return type(f"Bounded{stock.__name__}", (stock,), body)


def backend_of(layer: Any, stock: Any) -> Any:
    """Return the bounded backend of a layer, or vLLM's backend `stock` if the layer cannot have a bounded cache."""
    return stock if _unlike(layer) else bounded_backend(stock)


def spec_of(layer: Any, stock: Any, vllm_config: Any) -> Any:
    """Return the bounded KV-cache spec of a layer, or vLLM's spec `stock` if the cache keeps all tokens."""
    from kvpilot_runtime.bounded.spec import BoundedSpec

    if (bound := retention.asked()) is None:
        return stock
    refuse_unsupported(vllm_config, bound)
    same = {f.name: getattr(stock, f.name) for f in fields(BoundedSpec) if f.init and hasattr(stock, f.name)}
    return BoundedSpec(**same | {"sinks": bound.sinks, "sliding_window": bound.window})


def refuse_unsupported(vllm_config: Any, bound: SinksAndWindow) -> None:
    """Raise UnsupportedModelError if a layer or an option does not support bounded caches.

    The preflight of kvpilot-serve refuses the same, but engines may start without it.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    every = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    unlike = (f"{_unlike(layer)} ({name})" for name, layer in every.items() if _unlike(layer))
    switch = rules.first_set(vllm_config, rules.BESIDE_BOUNDED)
    skipped = set(vllm_config.cache_config.kv_cache_dtype_skip_layers or ())
    switched = (
        (bool(skipped - {options.SLIDING}), "--kv-cache-dtype-skip-layers"),
        (switch is not None, f"{switch[1]} ({switch[0]})" if switch is not None else ""),
    )
    found = next(unlike, None) or next((what for on, what in switched if on), None)
    if found is not None:
        raise UnsupportedModelError(
            f"{found} is not supported with {retention.VARIABLE}={bound}; leave one of the two out"
        )


def _unlike(layer: Any) -> str:
    """Name the property of a layer that bounded caches do not support, or return an empty string."""
    from vllm.model_executor.layers.attention import Attention

    if type(layer) is not Attention:
        return f"a layer of {type(layer).__name__}"
    found = (
        (layer.attn_type != AttentionType.DECODER, f"{layer.attn_type} attention"),
        (layer.sliding_window is not None, "a sliding-window layer"),
        (layer.kv_sharing_target_layer_name is not None, "a layer that uses another layer's KV cache"),
        (getattr(layer.impl, "alibi_slopes", None) is not None, "a model with ALiBi"),
    )
    return next((what for present, what in found if present), "")
