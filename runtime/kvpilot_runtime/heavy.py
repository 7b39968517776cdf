"""Heavy hitters in a worker: attention over the pages that the scheduler says are held, and what these pages weigh.

A page's mass is the attention that its tokens get, summed over query heads and layers. It is measured beside a layer's
attention, of one query in `EVERY`, each of which counts for so many: decode kernels stay as they are, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from kvpilot_runtime import retention
from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError
from kvpilot_runtime.heavy_spec import KEPT, MASSES, Kept, Masses
from kvpilot_runtime.retention import HeavyHitters

EVERY = 32
"""One query in so many is measured: of a sequence that decodes each such token, of a chunk its last ones."""
MOST = 8
"""Queries of a chunk that are measured, at most."""
MARK = "kvpilot_measured"
"""Attribute of a batch's metadata: what of it is measured."""


@dataclass
class Measured:
    """A sequence of a step whose last queries are measured.

    Attributes:
        request: its id. pages: those it holds, in the order of `table`, int64 [pages] of their blocks.
        length: tokens in these. rows: of the batch, the last tokens. weight: what each counts for.
        mass: float64 [pages], the sum so far.
    """

    request: str
    pages: tuple[int, ...]
    table: torch.Tensor
    length: int
    rows: slice
    weight: float
    mass: torch.Tensor


@dataclass
class Step:
    """What a worker was told of the step that runs, by the block that a sequence's last token goes into."""

    kept: dict[int, Kept] | None = None
    measured: list[Measured] = field(default_factory=list)

    def masses(self) -> list[Masses]:
        """For the scheduler."""
        return [(one.request, one.pages, one.mass.tolist()) for one in self.measured]


STEP = Step()
"""Of this process's engine; one runs at a time."""


def measured_rows(new: int, length: int) -> tuple[int, float]:
    """How many of a sequence's last `new` tokens are measured, and what each counts for; `length`: its tokens."""
    if new == 1:
        return (0 if length % EVERY else 1), EVERY
    rows = min(max(new // EVERY, 1), MOST)
    return rows, new / rows


def page_mass(
    query: torch.Tensor, keys: torch.Tensor, page: int, scale: float, softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention that each page gets from the last tokens, summed over them and their heads.

    Args:
        query: [rows, heads, head_dim]. keys: [kv_heads, head_dim, tokens]; the last row is that of the last token.
        page: tokens of a page. scale, softcap, sinks: as attention has them.

    Returns:
        float64 [pages]; all together `rows * heads`, less what the sinks' logits took.
    """
    rows, heads, dim = query.shape
    kv_heads, _, tokens = keys.shape
    q = query.float().view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (q @ keys.float()).mul_(scale).view(heads, rows, tokens)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if rows > 1:
        later = torch.ones(rows, tokens, dtype=torch.bool).triu_(tokens - rows + 1)
        scores = scores.masked_fill_(later, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(heads, 1, 1).expand(heads, rows, 1)], -1)
    mass = scores.softmax(-1)[..., :tokens].sum((0, 1), dtype=torch.float64)
    return torch.nn.functional.pad(mass, (0, -tokens % page)).view(-1, page).sum(1)


def held_alone(common: Any, bound: HeavyHitters, page: int, step: Step) -> Any:
    """A batch (vLLM's `CommonAttentionMetadata`) with tables and lengths of held pages; `step` gets what is measured.

    Before the engine serves, there is nothing to know and the batch stays as it is.

    Raises:
        UnsupportedModelError: its tokens are to attend to later ones.
        UnsupportedEngineError: a sequence that the scheduler did not tell of.
    """
    if common.causal is not True:
        raise UnsupportedModelError(
            f"attention to later tokens (causal=False) is not supported with {retention.VARIABLE}={bound}; leave it out"
        )
    if step.kept is None:
        return common
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    lens = common.seq_lens_cpu_upper_bound
    lens = (common.seq_lens.cpu() if lens is None else lens)[: common.num_reqs].clone()
    table, columns = common.block_table_tensor, []
    step.measured = []
    for row, length in enumerate(lens.tolist()):
        new, last = starts[row + 1] - starts[row], (length - 1) // page
        if not new:
            columns.append((0,))
            continue
        if (told := step.kept.get(int(table[row, last]))) is None:
            raise UnsupportedEngineError(
                f"{retention.VARIABLE}={bound}: the scheduler tells of no sequence that ends in block "
                f"{int(table[row, last])}; leave it out, and report this with the version of vllm"
            )
        request, kept, first = told
        pages = (*kept, *range(first, last + 1))
        lens[row] = length - (last + 1 - len(pages)) * page
        columns.append(pages)
        rows, weight = measured_rows(new, length)
        if rows:
            step.measured.append(
                Measured(request, pages, table[row, list(pages)].long(), int(lens[row]),
                         slice(starts[row + 1] - rows, starts[row + 1]), weight,
                         torch.zeros(len(pages), dtype=torch.float64))
            )  # fmt: skip
    width = max(len(pages) for pages in columns)
    at = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in columns])
    changes = {
        "seq_lens": lens.to(common.seq_lens), "seq_lens_cpu_upper_bound": lens, "max_seq_len": int(lens.max()),
        "block_table_tensor": table.gather(1, at),
        # What was worked out for the sequences.
        "req_idx": None, "_num_computed_tokens_cache": None, "_token_to_req_indices_cache": None,
    }  # fmt: skip
    known = {f.name for f in fields(common)}
    return replace(common, **{name: value for name, value in changes.items() if name in known})


def attach(worker: Any, bound: HeavyHitters) -> None:
    """In a worker that has its KV cache: measure every layer, and tell each step's masses.

    Raises:
        UnsupportedModelError: keys that cannot be read, or what nobody has seen right beside heavy hitters.
    """
    config, runner = worker.vllm_config, worker.model_runner
    parallel = config.parallel_config
    found = (
        (parallel.tensor_parallel_size > 1, "tensor parallelism"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (bool(config.scheduler_config.async_scheduling), "asynchronous scheduling"),
        (len(runner.kv_cache_config.kv_cache_groups) != 1, "layers with pages of several kinds"),
        (str(config.cache_config.cache_dtype).startswith("fp8"), f"kv-cache dtype {config.cache_config.cache_dtype!r}"),
    )
    if what := next((what for on, what in found if on), None):
        raise UnsupportedModelError(
            f"{what} is not supported with {retention.VARIABLE}={bound}; leave one of the two out"
        )
    context = config.compilation_config.static_forward_context
    for name in runner.kv_cache_config.kv_cache_groups[0].layer_names:
        _measure(context[name])
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        STEP.kept, STEP.measured = getattr(scheduled, KEPT, None), []
        return execute(scheduled, *args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if STEP.measured:
            setattr(output, MASSES, STEP.masses())
        STEP.kept, STEP.measured = None, []
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _measure(layer: Any) -> None:
    """Let a layer's attention add to the masses of a step's pages."""
    impl, keys = layer.impl, _reader(layer)
    forward, page = impl.forward, layer.kv_cache.shape[2]
    softcap = float(getattr(impl, "softcap", 0.0) or getattr(impl, "logits_soft_cap", 0.0) or 0.0)

    def measured(of: Any, query: torch.Tensor, key: Any, value: Any, cache: Any, metadata: Any, **kwargs: Any) -> Any:
        output = forward(of, query, key, value, cache, metadata, **kwargs)
        for one in getattr(metadata, MARK, ()):
            found = keys(one.table, one.length)
            one.mass += page_mass(query[one.rows], found, page, impl.scale, softcap, impl.sinks) * one.weight
        return output

    impl.forward = measured


def _reader(layer: Any) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Reads a layer's keys by a table of blocks and a length: float [kv_heads, head_dim, tokens]."""
    from kvpilot_runtime.cpu import CpuImpl

    if isinstance(impl := layer.impl, CpuImpl):
        return lambda table, length: impl.pages_of(layer, layer.kv_cache).keys(table, length).permute(1, 2, 0)
    at = key_places(layer).T.contiguous()
    straight = torch.equal(at.flatten(), torch.arange(at.numel()))

    def keys(table: torch.Tensor, length: int) -> torch.Tensor:
        blocks = layer.kv_cache.flatten(2)[table]
        pages = blocks[..., : at.numel()].unflatten(2, at.shape) if straight else blocks[..., at]
        tokens: torch.Tensor = pages.permute(1, 2, 0, 3).flatten(2)
        return tokens[..., :length]

    return keys


def key_places(layer: Any) -> torch.Tensor:
    """Where a backend of vLLM's keeps the keys of a block, found by writing one: int64 [tokens, head_dim].

    In which order is a matter of the CPU's instructions. Numbers up to 256 are exact in every dtype of a cache.

    Raises:
        UnsupportedModelError: a key is not found as it was written.
    """
    cache, impl = layer.kv_cache, layer.impl
    _, heads, tokens, width = cache.shape
    dim = width // 2

    def written(keys: torch.Tensor) -> torch.Tensor:
        block = torch.zeros_like(cache[:1])
        given = keys.to(cache.dtype)[:, None].expand(tokens, heads, dim).contiguous()
        impl.do_kv_cache_update(layer, given, torch.full_like(given, -1), block, torch.arange(tokens))
        stored: torch.Tensor = block[0].flatten(1)
        return stored

    token, element = torch.meshgrid(torch.arange(tokens), torch.arange(dim), indexing="ij")
    # Of blocks with more tokens than a dtype tells apart, by two digits.
    low, high, which = written(token % 128 + 1), written(token // 128 + 1), written(element)
    order = torch.full((tokens, dim), -1)
    place = (low[0] > 0).nonzero().flatten()
    row = (low[0, place].long() - 1) + 128 * (high[0, place].long() - 1)
    order[row.clamp(0, tokens - 1), which[0, place].long().clamp(0, dim - 1)] = place
    numbers = torch.randn(tokens, dim).to(cache.dtype)
    if (order < 0).any() or not all(torch.equal(one[order], numbers) for one in written(numbers)):
        raise UnsupportedModelError(
            f"the keys that {type(impl).__name__} stores cannot be read, so pages cannot be weighed: "
            f"{retention.VARIABLE} needs another policy, or a KV-cache dtype of kvpilot"
        )
    return order
