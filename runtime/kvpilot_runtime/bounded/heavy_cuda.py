"""Measurement of page masses on a GPU, without waiting for the device.

For sequences with a single new token, a kernel after decode measures the masses. Captured graphs contain this kernel,
and in steps without a measurement it returns at once. Chunks of prompts are measured together, in a few launches per
layer. Their keys are dequantized piece by piece, by the kernel and into the workspace that prefill uses for contexts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvpilot_kernels.gpu.h2o import weigh as kernel
from kvpilot_kernels.gpu.h2o.weigh import stretch
from kvpilot_kernels.gpu.launch.pages import GpuPages
from kvpilot_kernels.places import stored_slots
from kvpilot_runtime.backends.cuda import CudaImpl
from kvpilot_runtime.backends.cuda_steps import CudaBuilder, Metadata
from kvpilot_runtime.bounded.heavy_mass import Singles, Weighing, masses, scores


@dataclass
class Piece:
    """Pages [first, last) of each sequence in a group, whose keys are in the workspace together.

    Attributes:
        slots: int64 [tokens], from `places.stored_slots`.
        ordinals: int32 [tokens], from the same function.
    """

    first: int
    last: int
    slots: torch.Tensor
    ordinals: torch.Tensor


@dataclass
class Group:
    """Sequences of a step that are measured together.

    Attributes:
        at: int64 [sequences], each sequence's row in `Weighing.total`.
        rows: int64 [sequences, rows], measured rows (query tokens) of the batch.
        table: int32 [sequences, pages], held pages.
        lens: int32 [sequences], tokens in the held pages.
        weights: float64 [sequences, 1], weight of each query.
        pieces: parts of the pages, whose keys are read one after another.
    """

    at: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    weights: torch.Tensor
    pieces: list[Piece]


def groups(weighing: Weighing, page: int, room: int) -> Iterator[Group]:
    """Group a step's sequences by their number of measured rows. Cut pages into pieces of at most `room` tokens."""
    device, every = weighing.table.device, weighing.sequences

    def upload(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    rows = [one.rows.stop - one.rows.start for one in every]
    left = sorted(range(len(every)), key=lambda i: (rows[i], -len(every[i].pages)))
    while left:
        pages = len(every[left[0]].pages)
        most = max(room // (pages * page), 1)
        taken = [i for i in left[:most] if rows[i] == rows[left[0]]]
        left = left[len(taken) :]
        of, step = [every[i] for i in taken], max(room // (len(taken) * page), 1)
        table = weighing.table[upload([one.row for one in of], torch.int64), :pages]
        pieces = []
        for first in range(0, pages, step):
            last = min(first + step, pages)
            begins = torch.full((len(taken),), first * page, dtype=torch.int32, device=device)
            tokens = (last - first) * page
            starts = torch.arange(len(taken) + 1, dtype=torch.int32, device=device) * tokens
            pieces.append(Piece(first, last, *stored_slots(table, starts, begins, len(taken) * tokens, page)))
        yield Group(
            at=upload(taken, torch.int64),
            rows=upload([[*range(one.rows.start, one.rows.stop)] for one in of], torch.int64),
            table=table,
            lens=upload([one.length for one in of], torch.int32),
            weights=upload([[one.weight] for one in of], torch.float64),
            pieces=pieces,
        )


def singles(builder: CudaBuilder, page: int, most: int, sequences: int) -> Singles:
    """Return buffers to measure up to `sequences` sequences with a single new token and up to `most` pages each."""
    shape = builder.shape
    per_page = page // stretch(shape)
    return Singles(
        torch.zeros(1, dtype=torch.int32, device=shape.device),
        torch.zeros(shape.kv_heads, sequences, most * per_page, device=shape.device), per_page,
    )  # fmt: skip


def weigher(layer: Any) -> Callable[[torch.Tensor, Any, Weighing | None, Singles], None]:
    """Return a function that adds a layer's attention to a step's page masses, as `heavy.weigher` needs it."""
    impl: CudaImpl = layer.impl
    page = layer.kv_cache.shape[2]

    def weigh(query: torch.Tensor, metadata: Metadata, weighing: Weighing | None, alone: Singles) -> None:
        pages = impl.pages_of(layer, layer.kv_cache, metadata.plan.shape)
        if metadata.decodes:
            kernel.weigh(
                pages, metadata.block_table, metadata.seq_lens, metadata.plan, alone.wanted, alone.total
            )  # fmt: skip
        if weighing is None:
            return
        room = impl.workspace_tokens
        if room not in weighing.groups:  # the step's first layer prepares the groups for all layers
            weighing.groups[room] = list(groups(weighing, page, room))
        workspace = impl.workspace(query.device, query.dtype)
        for group in weighing.groups[room]:
            asked = query[group.rows]
            parts = [scores(asked, keys(pages, group, piece, workspace), impl.scale) for piece in group.pieces]
            score = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            mass = masses(score, page, impl.softcap, impl.sinks, group.lens) * group.weights
            weighing.total[:, : mass.shape[1]].index_add_(0, group.at, mass)

    return weigh


def keys(pages: GpuPages, group: Group, piece: Piece, workspace: torch.Tensor) -> torch.Tensor:
    """Dequantize a piece's keys into the workspace. Return a view of them, [sequences, kv_heads, head_dim, tokens]."""
    sequences, tokens = len(group.lens), (piece.last - piece.first) * pages.shape.block_size
    found, values = (side[: sequences * tokens] for side in workspace)
    pages.gather(piece.slots, piece.ordinals, found, values)
    read: torch.Tensor = found.view(sequences, tokens, *found.shape[1:]).permute(0, 2, 3, 1)
    return read
