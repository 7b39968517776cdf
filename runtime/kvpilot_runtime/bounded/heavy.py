"""Heavy hitters in a worker: attend to the pages that the scheduler has kept, and measure their masses.

A page's mass is the attention that its tokens receive, summed over query heads and layers. It is measured after the
layer's attention, by other kernels, so decode kernels stay unchanged. To save time, about one query in `EVERY` is
measured, and counts `EVERY` times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from kvpilot_formats.arguments import rules
from kvpilot_runtime.bounded import heavy_mass
from kvpilot_runtime.bounded.heavy_mass import Measured, Singles, Weighing
from kvpilot_runtime.bounded.heavy_spec import EVERY, KEPT, MASSES, NOTHING, Kept
from kvpilot_runtime.config import retention
from kvpilot_runtime.config.retention import HeavyHitters
from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError

MOST = 8
"""Largest number of measured queries per chunk of a prompt."""
ORDER = "gather_batch_req_state"
"""Method of vLLM's newer runner that puts a step's requests into the order of the batch."""
MARK = "kvpilot_measured"
"""Attribute of a batch's metadata: a pair of its `Weighing` and its `Singles`, each of which may be None."""


@dataclass
class Step:
    """State of the current step in a worker.

    Attributes:
        kept: held pages by request; None before the engine serves.
        alone: True if sequences with a single new token are measured in this step.
        requests: function that returns the ids of the batch's requests, in order.
        weighing: measurement of prompt chunks; None if the step measures none.
        singles: measurements of sequences with a single new token, one per shape of layers.
    """

    kept: dict[str, Kept] | None = None
    alone: bool = False
    requests: Callable[[], Sequence[str]] = tuple
    weighing: Weighing | None = None
    singles: list[Singles] = field(default_factory=list)


STEP = Step()
"""State of this process's engine, which runs one step at a time."""


def measured_rows(new: int, alone: bool = False) -> tuple[int, float]:
    """Return how many of a sequence's `new` tokens are measured (the last ones), and the weight of each.

    A sequence with a single new token is measured only if `alone` is True.
    """
    if new == 1:
        return int(alone), EVERY
    rows = min(max(new // EVERY, 1), MOST)
    return rows, new / rows


def most_pages(bound: HeavyHitters, page: int, scheduler: Any) -> int:
    """Return how many pages a sequence with one new token holds at most. `scheduler` is vLLM's configuration.

    These are the pages of the budget, of the new token, and of tokens in flight: with asynchronous scheduling, vLLM
    frees pages only once it knows the results of the step before.
    """
    ahead = scheduler.max_num_batched_tokens if scheduler.async_scheduling else 0
    return bound.pages(page) + 1 + -(-ahead // page)


class HeldTables:
    """Block tables and lengths of held pages, in buffers that captured graphs read.

    Steps with one new token per sequence use them. A table has at most `most` pages per sequence.
    """

    def __init__(self, page: int, most: int, sequences: int, device: torch.device) -> None:
        self.page = page
        self.table = torch.zeros(sequences, most, dtype=torch.int32, device=device)
        self.lens = torch.zeros(sequences, dtype=torch.int32, device=device)

    def put(self, common: Any) -> Any:
        """Return the batch with tables and lengths of held pages, in the buffers.

        During graph capture no page has been freed, so a table may be longer than its buffer. Then truncate the tables
        and lengths.
        """
        count, most = common.num_reqs, self.table.shape[1]
        table = common.block_table_tensor[:count, :most]
        self.table[:count, : table.shape[1]] = table
        torch.clamp(common.seq_lens[:count], max=most * self.page, out=self.lens[:count])
        host, longest = common.seq_lens_cpu_upper_bound, most * self.page
        return replace(
            common, block_table_tensor=self.table[:count], seq_lens=self.lens[:count],
            max_seq_len=min(common.max_seq_len, longest),
            seq_lens_cpu_upper_bound=None if host is None else host.clamp(max=longest),
        )  # fmt: skip


def held_alone(common: Any, bound: HeavyHitters, page: int, step: Step, singles: Singles | None = None) -> Any:
    """Return a batch (vLLM's `CommonAttentionMetadata`) with block tables and lengths of held pages only.

    Also set up the measurement of masses: in `singles` for sequences with a single new token, which come first in the
    batch, and in `step` for the others. Before the engine serves, return the batch unchanged. The host knows all
    lengths, so nothing waits for the device.
    """
    if common.causal is not True:
        raise UnsupportedModelError(
            f"attention to later tokens (causal=False) is not supported with {retention.VARIABLE}={bound}; leave it out"
        )
    if step.kept is None:
        return common
    count, table, requests = common.num_reqs, common.block_table_tensor, step.requests()
    starts = common.query_start_loc_cpu[: count + 1].numpy()
    lens = common.seq_lens_cpu_upper_bound
    lens = (common.seq_lens.cpu() if lens is None else lens)[:count].numpy().copy()
    # Sequences without new tokens are padding.
    live, told = np.flatnonzero(np.diff(starts)).tolist(), [NOTHING] * count
    for row in live:
        if row >= len(requests) or requests[row] not in step.kept:
            raise UnsupportedEngineError(
                f"{retention.VARIABLE}={bound}: the scheduler does not tell what the sequence in row {row} of a batch "
                "holds; leave it out, and report this with the version of vllm"
            )
        told[row] = step.kept[requests[row]]
    freed = np.array([first - len(pages) for pages, first in told], lens.dtype)
    lens -= freed * page
    held = -(-lens // page)
    width = max(int(held.max()), 1)
    if freed.any():
        table = table[:count].gather(1, upload(columns(told, held, width), table.device))
    else:
        table = table[:count, :width]
    ahead, chunks = list[Measured](), list[Measured]()
    for row in live:
        new = int(starts[row + 1] - starts[row])
        rows, weight = measured_rows(new, step.alone)
        if rows:
            here = slice(int(starts[row + 1]) - rows, int(starts[row + 1]))
            pages = tuple(columns(told[row : row + 1], held[row : row + 1], int(held[row]))[0].tolist())
            by_kernel = singles is not None and int(starts[row + 1]) == row + 1
            (ahead if by_kernel else chunks).append(
                Measured(requests[row], pages, row, int(lens[row]), here, weight)
            )  # fmt: skip
    if singles is not None:
        singles.begin(ahead)
        step.singles += [singles] * bool(ahead)
    if chunks and step.weighing is None:  # the builder for layers of another shape may have made it already
        total = torch.zeros(len(chunks), width, dtype=torch.float64, device=table.device)
        step.weighing = Weighing(chunks, table, total)
    changes = {
        "seq_lens": upload(lens, table.device).to(common.seq_lens), "seq_lens_cpu_upper_bound": torch.from_numpy(lens),
        "max_seq_len": int(lens.max()), "block_table_tensor": table,
        # Reset what vLLM has computed from the lengths of whole sequences, so that it computes these again.
        "req_idx": None, "_num_computed_tokens_cache": None, "_token_to_req_indices_cache": None,
    }  # fmt: skip
    known = {f.name for f in fields(common)}
    return replace(common, **{name: value for name, value in changes.items() if name in known})


def columns(told: Sequence[Kept], held: np.ndarray, width: int) -> np.ndarray:
    """Return for each sequence the columns of its whole block table that list held pages, int64 [sequences, width].

    Entries past a sequence's held pages repeat its first entry. That page is never freed.

    Args:
        told: held pages of each sequence, from the scheduler.
        held: int [sequences], number of held pages.
        width: number of columns.
    """
    at = np.zeros((len(told), width), np.int64)
    for row, ((pages, first), count) in enumerate(zip(told, held.tolist(), strict=True)):
        at[row, : len(pages)] = pages
        at[row, len(pages) : count] = np.arange(first, first + count - len(pages))
        at[row, count:] = at[row, 0]
    return at


def upload(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for it."""
    host = torch.from_numpy(x)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def singles(builder: Any, page: int, most: int, sequences: int) -> Singles | None:
    """Return buffers for the kernel that measures sequences with a single new token; None on a CPU, which has none.

    Args:
        builder: metadata builder of the KV-cache group.
        page: tokens of a page.
        most: largest number of pages of a sequence.
        sequences: largest number of sequences.
    """
    if builder.device.type == "cpu":
        return None
    from kvpilot_runtime.bounded import heavy_cuda

    return heavy_cuda.singles(builder, page, most, sequences)


def attach(worker: Any, bound: HeavyHitters) -> None:
    """Let a worker measure its layers and report masses to the scheduler. Call this once the KV cache exists.

    Raises:
        UnsupportedModelError: an option or the model's layers do not support heavy hitters.
    """
    config, runner = worker.vllm_config, worker.model_runner
    switch = rules.first_set(config, rules.BESIDE_HEAVY_HITTERS)
    found = (
        (switch is not None, switch[1] if switch else ""),
        (len(runner.kv_cache_config.kv_cache_groups) != 1, "layers with pages of several kinds"),
    )
    if what := next((what for on, what in found if on), None):
        raise UnsupportedModelError(
            f"{what} is not supported with {retention.VARIABLE}={bound}; leave one of the two out"
        )
    context = config.compilation_config.static_forward_context
    for name in runner.kv_cache_config.kv_cache_groups[0].layer_names:
        _measure(context[name])
    execute, sample = runner.execute_model, runner.sample_tokens
    if hasattr(runner, ORDER):
        setattr(runner, ORDER, noting_order(getattr(runner, ORDER)))
    else:
        STEP.requests = lambda: runner.input_batch.req_ids

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        (STEP.kept, STEP.alone), STEP.weighing, STEP.singles = getattr(scheduler_output, KEPT, (None, False)), None, []
        return execute(scheduler_output, *args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        measured = [one.masses() for one in (STEP.weighing, *STEP.singles) if one is not None]
        if measured and output is not None:
            # On a GPU the runner returns a wrapper of the output, so set the masses on the output in it.
            setattr(getattr(output, "model_runner_output", output), MASSES, [*chain.from_iterable(measured)])
        STEP.kept, STEP.alone, STEP.weighing, STEP.singles = None, False, None, []
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def noting_order(order: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a runner's method `ORDER`, so that `STEP.requests` returns the ids of a step's requests."""

    def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
        state, tokens_of_each = order(*args, **kwargs)
        requests = () if state is None else state.req_ids
        STEP.requests = lambda: requests
        return state, tokens_of_each

    return gather_batch_req_state


def _measure(layer: Any) -> None:
    """Wrap a layer's `forward`, so that it also adds the layer's attention to the step's page masses."""
    forward, weigh = layer.impl.forward, weigher(layer)

    def measured(
        of: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(of, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        if (mark := getattr(attn_metadata, MARK, None)) is not None:
            weigh(query, attn_metadata, *mark)
        return output

    layer.impl.forward = measured


def weigher(layer: Any) -> Callable[[torch.Tensor, Any, Weighing | None, Any], None]:
    """Return a function that adds a layer's attention to a step's page masses.

    The function takes the layer's queries, [tokens, heads, head_dim], the layer's metadata, and the pair in `MARK`.
    """
    if layer.kv_cache.device.type == "cpu":
        return heavy_mass.on_cpu(layer)
    from kvpilot_runtime.bounded import heavy_cuda

    return heavy_cuda.weigher(layer)
