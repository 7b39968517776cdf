"""Reference in float64 for the attention of one prefill chunk."""

from collections.abc import Sequence

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import attend, round_trip


def prefill_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: int,
    fmt: Format,
    scale: float,
    factors: Factors | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Return the attention of an exact chunk after `context` tokens that are read from the cache.

    Args:
        query: [tokens, heads, D].
        key, value: [context + tokens, kv_heads, D] before quantization.
        context: number of tokens stored before the chunk.
        fmt, scale, factors: as in `decode_reference`.
        softcap, sinks, spans: as in `attend`.

    Returns:
        float64 [tokens, heads, D].
    """
    key, value = (
        torch.cat([round_trip(x[:context], fmt, side, factors), x[context:].double()])
        for x, side in ((key, "key"), (value, "value"))
    )
    return attend(query, key, value, scale, softcap, sinks, spans)
