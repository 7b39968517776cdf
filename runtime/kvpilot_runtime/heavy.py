"""Heavy hitters in a worker: attention over the pages that the scheduler says are held, and what these pages weigh.

A page's mass is the attention that its tokens get, summed over query heads and layers. It is measured beside a layer's
attention, of one query in `EVERY`, each of which counts for so many: decode kernels stay as they are, and cost nothing.
Steps in which single tokens are measured are none of a CUDA graph's; the others may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvpilot_runtime import heavy_mass, retention
from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError
from kvpilot_runtime.heavy_mass import Measured, Weighing
from kvpilot_runtime.heavy_spec import EVERY, KEPT, MASSES, Kept
from kvpilot_runtime.retention import HeavyHitters

MOST = 8
"""Queries of a chunk that are measured, at most."""
UNIFORM = "gather_batch_req_state"
"""Method of vLLM's newer runner for GPUs that says whether a step has as many tokens of each sequence."""
MARK = "kvpilot_measured"
"""Attribute of a batch's metadata: its `Weighing`, None where nothing is measured."""


@dataclass
class Step:
    """What a worker was told of the step that runs.

    Attributes:
        kept: by the block that a sequence's last token goes into; None before the engine serves. alone: single tokens
            are measured. weighing: what is, once the batch is known.
    """

    kept: dict[int, Kept] | None = None
    alone: bool = False
    weighing: Weighing | None = None


STEP = Step()
"""Of this process's engine; one runs at a time."""


def measured_rows(new: int, alone: bool = False) -> tuple[int, float]:
    """How many of a sequence's `new` tokens, the last ones, are measured, and what each counts for; a single one where
    the step says so (`alone`)."""
    if new == 1:
        return int(alone), EVERY
    rows = min(max(new // EVERY, 1), MOST)
    return rows, new / rows


class HeldTables:
    """Tables and lengths of held pages for steps in which each sequence has one new token, in buffers that captured
    graphs read: then a sequence holds its budget and the page of that token at most."""

    def __init__(self, bound: HeavyHitters, page: int, sequences: int, device: torch.device) -> None:
        self.page = page
        self.table = torch.zeros(sequences, bound.pages(page) + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(sequences, dtype=torch.int32, device=device)

    def put(self, common: Any) -> Any:
        """The batch, whose tables and lengths are those of held pages, with the same in the buffers."""
        count, most = common.num_reqs, self.table.shape[1]
        table = common.block_table_tensor[:count, :most]
        self.table[:count, : table.shape[1]] = table
        # Where graphs are captured, lengths are those of a context that nothing was freed of.
        torch.clamp(common.seq_lens[:count], max=most * self.page, out=self.lens[:count])
        host, longest = common.seq_lens_cpu_upper_bound, most * self.page
        return replace(
            common, block_table_tensor=self.table[:count], seq_lens=self.lens[:count],
            max_seq_len=min(common.max_seq_len, longest),
            seq_lens_cpu_upper_bound=None if host is None else host.clamp(max=longest),
        )  # fmt: skip


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
    table, columns, measured = common.block_table_tensor, [], []
    ends = ((lens.long() - 1).clamp(min=0) // page).to(table.device)
    last_blocks = table[: common.num_reqs].gather(1, ends[:, None])[:, 0].tolist()
    for row, length in enumerate(lens.tolist()):
        new, last = starts[row + 1] - starts[row], (length - 1) // page
        if not new:
            columns.append((0,))
            continue
        if (told := step.kept.get(last_blocks[row])) is None:
            raise UnsupportedEngineError(
                f"{retention.VARIABLE}={bound}: the scheduler tells of no sequence that ends in block "
                f"{last_blocks[row]}; leave it out, and report this with the version of vllm"
            )
        request, kept, first = told
        pages = (*kept, *range(first, last + 1))
        lens[row] = length - (last + 1 - len(pages)) * page
        columns.append(pages)
        rows, weight = measured_rows(new, step.alone)
        if rows:
            here = slice(starts[row + 1] - rows, starts[row + 1])
            measured.append(Measured(request, pages, row, int(lens[row]), here, weight))
    width = max(len(pages) for pages in columns)
    # Past a sequence's end its first page, which is never freed.
    at = torch.tensor([[*pages, *pages[:1] * (width - len(pages))] for pages in columns]).to(table.device)
    held = table.gather(1, at)
    if measured and step.weighing is None:  # layers of another shape have the same step
        total = torch.zeros(len(measured), width, dtype=torch.float64, device=table.device)
        step.weighing = Weighing(measured, held, total)
    changes = {
        "seq_lens": lens.to(common.seq_lens), "seq_lens_cpu_upper_bound": lens, "max_seq_len": int(lens.max()),
        "block_table_tensor": held,
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
        (
            bool(config.scheduler_config.async_scheduling),
            "asynchronous scheduling (which --no-async-scheduling switches off)",
        ),
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
        (STEP.kept, STEP.alone), STEP.weighing = getattr(scheduled, KEPT, (None, False)), None
        return execute(scheduled, *args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if STEP.weighing is not None and output is not None:
            # The runner of GPUs gives what it has not read yet around what is sent.
            setattr(getattr(output, "model_runner_output", output), MASSES, STEP.weighing.masses())
        STEP.kept, STEP.alone, STEP.weighing = None, False, None
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    if hasattr(runner, UNIFORM):
        setattr(runner, UNIFORM, apart_from_graphs(getattr(runner, UNIFORM)))


def apart_from_graphs(uniform: Callable[..., Any]) -> Callable[..., Any]:
    """Of a runner: a step whose single tokens are measured is not one of those that were captured whole."""

    def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
        state, tokens_of_each = uniform(*args, **kwargs)
        return state, None if STEP.alone else tokens_of_each

    return gather_batch_req_state


def _measure(layer: Any) -> None:
    """Let a layer's attention add to the masses of a step's pages."""
    forward, weigh = layer.impl.forward, weigher(layer)

    def measured(of: Any, query: torch.Tensor, key: Any, value: Any, cache: Any, metadata: Any, **kwargs: Any) -> Any:
        output = forward(of, query, key, value, cache, metadata, **kwargs)
        if (weighing := getattr(metadata, MARK, None)) is not None:
            weigh(query, metadata, weighing)
        return output

    layer.impl.forward = measured


def weigher(layer: Any) -> Callable[[torch.Tensor, Any, Weighing], None]:
    """Adds to the masses of a step, of a layer's queries [tokens, heads, head_dim] and its metadata of the step.

    Raises:
        UnsupportedModelError: where the layer's backend keeps its keys is not known.
    """
    if layer.kv_cache.device.type == "cpu":
        return heavy_mass.on_cpu(layer)
    from kvpilot_runtime import heavy_cuda

    return heavy_cuda.weigher(layer)
