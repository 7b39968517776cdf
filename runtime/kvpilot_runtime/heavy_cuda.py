"""How pages are weighed on a GPU: sequences together, and the context piece by piece, all left on the device.

A layer's share of a step is a handful of launches however many sequences are measured, and nothing waits for it. Keys
of our dtypes are read back by the kernel that reads contexts for prompts, into the same workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvpilot_runtime import retention
from kvpilot_runtime.cuda import WORKSPACE_BYTES, CudaImpl
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.heavy_mass import Weighing, key_places, masses, scores, softcap_of


@dataclass
class Piece:
    """Pages [first, last) of a group's sequences, whose keys are read at a time.

    Attributes:
        begins: int32 [sequences], the first token. rows: int32 [sequences + 1], where each one's are in the workspace.
    """

    first: int
    last: int
    begins: torch.Tensor
    rows: torch.Tensor


@dataclass
class Group:
    """Sequences of a step that are weighed together.

    Attributes:
        at: int64 [sequences], rows of the step's total. rows: int64 [sequences, rows], of the batch.
        table: int32 [sequences, pages]. lens: int32 [sequences]. weights: float64 [sequences, 1].
    """

    at: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    weights: torch.Tensor
    pieces: list[Piece]


def groups(weighing: Weighing, page: int, room: int) -> Iterator[Group]:
    """Cut a step's sequences by how many rows are measured of each; keys of `room` tokens are read at a time."""
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
        step = max(room // (len(taken) * page), 1)
        pieces = []
        for first in range(0, pages, step):
            last = min(first + step, pages)
            begins = torch.full((len(taken),), first * page, dtype=torch.int32, device=device)
            starts = torch.arange(len(taken) + 1, dtype=torch.int32, device=device) * ((last - first) * page)
            pieces.append(Piece(first, last, begins, starts))
        of = [every[i] for i in taken]
        yield Group(
            at=upload(taken, torch.int64),
            rows=upload([[*range(one.rows.start, one.rows.stop)] for one in of], torch.int64),
            table=weighing.table[upload([one.row for one in of], torch.int64), :pages],
            lens=upload([one.length for one in of], torch.int32),
            weights=upload([[one.weight] for one in of], torch.float64),
            pieces=pieces,
        )


Keys = Callable[[Group, Piece, torch.Tensor, Any], torch.Tensor]
"""Reads a piece's keys, [sequences, kv_heads, head_dim, tokens], by the layer's queries and metadata of the step."""


def weigher(layer: Any) -> Callable[[torch.Tensor, Any, Weighing], None]:
    """Adds a layer's share to a step's masses (`heavy.weigher`).

    Raises:
        UnsupportedModelError: where the layer's backend keeps its keys is not known.
    """
    impl, page = layer.impl, layer.kv_cache.shape[2]
    softcap, sinks = softcap_of(impl), getattr(impl, "sinks", None)
    if isinstance(impl, CudaImpl):
        keys, room = _packed(layer), impl.workspace_tokens
    else:
        keys, room = _stock(layer), WORKSPACE_BYTES // (4 * impl.num_kv_heads * impl.head_size)

    def weigh(query: torch.Tensor, metadata: Any, weighing: Weighing) -> None:
        if room not in weighing.groups:  # once for all layers
            weighing.groups[room] = list(groups(weighing, page, room))
        for group in weighing.groups[room]:
            asked = query[group.rows]
            parts = [scores(asked, keys(group, piece, query, metadata), impl.scale) for piece in group.pieces]
            score = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            mass = masses(score, page, softcap, sinks, group.lens) * group.weights
            weighing.total[:, : mass.shape[1]].index_add_(0, group.at, mass)

    return weigh


def _packed(layer: Any) -> Keys:
    impl: CudaImpl = layer.impl

    def keys(group: Group, piece: Piece, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        workspace = impl.workspace(query.device, query.dtype)
        sequences, tokens = len(group.lens), (piece.last - piece.first) * layer.kv_cache.shape[2]
        found, values = (side[: sequences * tokens] for side in workspace)
        pages = impl.pages_of(layer, layer.kv_cache, metadata.plan.shape)
        pages.gather(group.table, piece.rows, piece.begins, tokens, found, values)
        read: torch.Tensor = found.view(sequences, tokens, *found.shape[1:]).permute(0, 2, 3, 1)
        return read

    return keys


def _stock(layer: Any) -> Keys:
    """Of a backend of vLLM's that keeps a token's key before its value."""
    cache = layer.kv_cache
    tokens, width = cache.shape[2:]
    expected = torch.arange(tokens)[:, None] * width + torch.arange(width // 2)
    if not torch.equal(key_places(layer), expected):
        raise UnsupportedModelError(
            f"{type(layer.impl).__name__} does not keep a token's key before its value, so pages cannot be weighed: "
            f"{retention.VARIABLE} needs another policy, or a KV-cache dtype of kvpilot"
        )

    def keys(group: Group, piece: Piece, _: torch.Tensor, __: Any) -> torch.Tensor:
        held: torch.Tensor = layer.kv_cache[..., : width // 2][group.table[:, piece.first : piece.last].long()]
        return held.permute(0, 2, 4, 1, 3).flatten(3)

    return keys
