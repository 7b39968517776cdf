"""Compute page masses: the attention that the tokens of each page receive. Also measure them on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpilot_runtime.bounded.heavy_spec import Masses


@dataclass
class Measured:
    """Sequence of a step whose last queries are measured.

    Attributes:
        request: id of the sequence's request.
        pages: held pages, in the order of the block table.
        row: the sequence's row in the step's block table.
        length: tokens in the held pages.
        rows: measured rows (query tokens) of the batch.
        weight: factor on the attention of each measured row.
    """

    request: str
    pages: tuple[int, ...]
    row: int
    length: int
    rows: slice
    weight: float


@dataclass
class Weighing:
    """Measurement of a step's prompt chunks, on the device that attends. All layers add their attention to `total`.

    Attributes:
        sequences: the measured sequences.
        table: int32 [sequences of the step, pages], the blocks that each sequence holds.
        total: float64 [measured sequences, pages], masses summed over layers.
        groups: cache of the results of `heavy_cuda.groups`, by workspace size.
    """

    sequences: list[Measured]
    table: torch.Tensor
    total: torch.Tensor
    groups: dict[int, Any] = field(default_factory=dict)

    def masses(self) -> list[Masses]:
        """Return the masses for the scheduler. This waits for the device, once for all layers."""
        found = self.total.tolist()
        return [(one.request, one.pages, row[: len(one.pages)]) for one, row in zip(self.sequences, found, strict=True)]


@dataclass
class Singles:
    """Measurement of sequences with one new token by a kernel, in buffers that captured graphs use.

    Attributes:
        wanted: int32 [1], 1 to measure in this step, 0 to let the kernel return at once.
        total: float32 [kv_heads, sequences, stretches], masses summed over layers, for each stretch of tokens.
        per_page: number of stretches of a page.
        sequences: the measured sequences; `Measured.row` is their row in `total`.
    """

    wanted: torch.Tensor
    total: torch.Tensor
    per_page: int
    sequences: list[Measured] = field(default_factory=list)

    def begin(self, sequences: list[Measured]) -> None:
        """Prepare the buffers for a step that measures these sequences. Call this before the step is launched."""
        if sequences:
            self.total.zero_()
        if bool(sequences) != bool(self.sequences):
            self.wanted.fill_(int(bool(sequences)))
        self.sequences = sequences

    def masses(self) -> list[Masses]:
        """Return the masses for the scheduler. This waits for the device."""
        if not self.sequences:
            return []
        heads, rows, _ = self.total.shape
        found = self.total.double().view(heads, rows, -1, self.per_page).sum((0, 3)).cpu()
        return [
            (one.request, one.pages, (found[one.row, : len(one.pages)] * one.weight).tolist()) for one in self.sequences
        ]


def scores(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention scores (logits), float32 [sequences, heads, rows, tokens].

    `query` is [sequences, rows, heads, head_dim], and `keys` are [sequences, kv_heads, head_dim, tokens].
    """
    sequences, rows, heads, dim = query.shape
    kv_heads, tokens = keys.shape[1], keys.shape[3]
    q = query.float().view(sequences, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return (q @ keys.float()).mul_(scale).view(sequences, heads, rows, tokens)


def masses(
    score: torch.Tensor, page: int, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the causal attention that each page gets from a sequence's last tokens, float64 [sequences, pages].

    Attention is summed over the page's tokens, over rows and over heads. So all pages of a sequence add up to
    `rows * heads`, less the weight of sink logits.

    Args:
        score: result of `scores`, which is overwritten; the last row is a sequence's last token.
        page: tokens of a page.
        softcap: the layer's cap on scores; 0 for none.
        sinks: [heads], the layer's sink logits; None without sinks.
        lens: int [sequences], tokens of each sequence, if `score` has padding; None without padding.
    """
    sequences, heads, rows, tokens = score.shape
    if softcap:
        score = score.div_(softcap).tanh_().mul_(softcap)
    if rows > 1 or lens is not None:
        ends = torch.arange(1 - rows, 1, device=score.device) + (tokens if lens is None else lens[:, None])
        later = torch.arange(tokens, device=score.device) >= ends[..., None]
        score = score.masked_fill_(later if lens is None else later[:, None], -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.float().view(1, heads, 1, 1).expand(sequences, heads, rows, 1)], -1)
    mass = score.softmax(-1)[..., :tokens].sum((1, 2), dtype=torch.float64)
    return torch.nn.functional.pad(mass, (0, -tokens % page)).view(sequences, -1, page).sum(2)


def page_mass(
    query: torch.Tensor, keys: torch.Tensor, page: int, scale: float, softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return `masses` for one sequence, float64 [pages].

    `query` is [rows, heads, head_dim], and `keys` are [kv_heads, head_dim, tokens].
    """
    return masses(scores(query[None], keys[None], scale), page, softcap, sinks)[0]


def on_cpu(layer: Any) -> Callable[[torch.Tensor, Any, Weighing | None, Singles | None], None]:
    """Return a function that adds a layer's attention to a step's masses, one sequence at a time (`heavy.weigher`)."""
    impl, page = layer.impl, layer.kv_cache.shape[2]

    def weigh(query: torch.Tensor, _: Any, weighing: Weighing | None, __: Singles | None) -> None:
        if weighing is None:
            return
        for total, one in zip(weighing.total, weighing.sequences, strict=True):
            pages = impl.pages_of(layer, layer.kv_cache)
            keys = pages.keys(weighing.table[one.row, : len(one.pages)].long(), one.length).permute(1, 2, 0)
            mass = page_mass(query[one.rows], keys, page, impl.scale, impl.softcap, impl.sinks)
            total[: len(one.pages)] += mass * one.weight

    return weigh
