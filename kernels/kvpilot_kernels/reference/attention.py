"""Reference implementation of attention over stored tokens, in float64, straight from the definition.

    o_i = sum_t softmax_t(cap(scale * q_i . k_t)) v_t    over the tokens t that query i attends to

with cap(x) = softcap * tanh(x / softcap), or x without a cap. An attention sink here is one logit of a head, not a
token: it adds exp(logit) to the sum that softmax divides by, and has no value. k and v are read back from the group
format (`quantize`) and rotated back (`hadamard`). There is no paging and no optimization.
"""

from collections.abc import Sequence

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.hadamard import rotation
from kvpilot_kernels.reference.quantize import decode, encode
from kvpilot_kernels.reference.residual import decode_residual, encode_residual


def round_trip(
    x: torch.Tensor, fmt: Format, side: str, factors: Factors | None = None, recent: bool = False, begin: int = 0
) -> torch.Tensor:
    """Return keys (`side="key"`) or values (`"value"`) as the cache reads them back.

    Args:
        x: [..., D], or [..., tokens, kv_heads, D] with `factors`.
        fmt: the format.
        factors: the layer's factors, applied before quantization and undone after it; None for none.
        recent: True to add residuals, as in the recent window.
        begin: position of the first token.

    Returns:
        float64 in the shape of x.
    """
    dim, bits = x.shape[-1], (fmt.key if side == "key" else fmt.value).bits
    x = x.float()
    mean, scale = factors.of(side) if factors else (None, None)
    if factors is not None and mean is not None and scale is not None:
        if side == "key" and begin == 0 and x.shape[-3]:
            first = (torch.arange(x.shape[-3], device=x.device) == 0)[:, None, None]
            mean = torch.where(first, factors.key_first, mean)
        x = (x - mean) * scale
    x = x @ rotation(dim).to(x.device)
    codes, meta = encode(x, bits, fmt.group_size(dim))
    back = decode(codes, meta, bits)
    if recent and bits < 8:
        back = back + decode_residual(*encode_residual(x, codes, meta, bits), meta, bits)
    back = back.double() @ rotation(dim, torch.float64).to(x.device).T
    return back if mean is None or scale is None else back / scale.double() + mean.double()


def decode_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fmt: Format,
    scale: float,
    factors: Factors | None = None,
    fine: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of one query token to all stored tokens of its sequence.

    Args:
        query: [heads, D].
        key, value: [tokens, kv_heads, D] before quantization, including the query's own token.
        fmt: the format of the cache.
        scale: factor on the scores.
        factors: factors of the layer, or None.
        fine: bool [tokens], True for tokens that are read with residuals (recent window); None for no token.
        softcap, sinks: as in `attend`.

    Returns:
        float64 [heads, D].
    """

    def read(recent: bool) -> list[torch.Tensor]:
        return [round_trip(x, fmt, side, factors, recent) for x, side in ((key, "key"), (value, "value"))]

    stored = read(recent=False)
    if fine is not None:
        refined = read(recent=True)
        stored = [torch.where(fine[:, None, None], x, y) for x, y in zip(refined, stored, strict=True)]
    return attend(query[None], stored[0], stored[1], scale, softcap, sinks)[0]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Return causal attention, float64 [tokens, heads, D]. The last query attends to all keys.

    Args:
        query: [tokens, heads, D].
        key, value: [context + tokens, kv_heads, D], as read back from the cache.
        scale: factor on the scores.
        softcap: 0 for none.
        sinks: [heads], a logit per head; None without sinks.
        spans: ranges [begin, end) of query tokens that attend to each other in both directions.
    """
    tokens, heads, _ = query.shape
    repeat = heads // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,thd->hit", query.double(), key) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    last = torch.arange(tokens)  # index of the last token that each query attends to
    for begin, end in spans:
        last[begin:end] = end - 1
    future = torch.arange(key.shape[0]) - (key.shape[0] - tokens) > last[:, None]
    scores = scores.masked_fill(future, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, tokens, 1)], -1)
    return torch.einsum("hit,thd->ihd", scores.softmax(-1)[..., : key.shape[0]], value)
