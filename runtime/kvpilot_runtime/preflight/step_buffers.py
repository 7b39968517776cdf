"""GPU memory that our backends take beside weights and pages: the buffers of a step, and the workspace of contexts."""

from __future__ import annotations

from kvpilot_formats import formats, models
from kvpilot_formats.latent import ENTRY, RANK, LatentFormat
from kvpilot_runtime.config import options
from kvpilot_runtime.preflight.request import Request

SEQUENCES, LARGE_GPU = (256, 1024), 70 * 2**30
"""vLLM's own `--max-num-seqs` on a smaller and on a large GPU (0.32), and the bytes from which a GPU is large."""

RESULTS = 3
"""Partial results of a sequence in a step of single tokens, at most; those of a wave of programs are not counted."""


def size(fmt: formats.Format | LatentFormat, config: models.Architecture, request: Request, total: int) -> int:
    """Return about how many bytes of a GPU of `total` bytes our backends take; 0 for a dtype of vLLM's own."""
    asked = [value for _, value in options.given(request.others, "--max-num-seqs") if value and value.isdecimal()]
    sequences = int(asked[-1]) if asked else SEQUENCES[total >= LARGE_GPU]
    heads = -(-config.heads // request.tensor_parallel)
    if isinstance(fmt, LatentFormat):
        return sequences * heads * (4 * RANK + 2 * ENTRY)
    if not fmt.ours:
        return 0
    tokens, dim = 1 + options.drafts(request.others), formats.stored_dim(config.head_dim) or config.head_dim
    plan = sequences * heads * dim * (4 * max(RESULTS, tokens) + 2 * tokens)
    return plan + int(total * request.memory_fraction) // options.WORKSPACE_SHARE
