"""Reference implementation of multi-head latent attention over stored tokens, in float64, straight from the definition.

In the absorbed form all heads share a token's entry e = (latent, rope), and its latent is also the value:

    o_h = sum_t softmax_t(scale * q_h . e_t) latent_t        q_h = (q_nope_h W_UK_h, q_rope_h)

Here q_nope_h and q_rope_h are the two parts of the query of head h, and W_UK_h is the head's key projection. As in the
cache, an entry is rotated by a Hadamard matrix (in addition to RoPE) and quantized. Then both are undone. There is no
paging and no optimization.
"""

import torch

from kvpilot_formats.latent import RANK, ROPE_BITS, LatentFormat
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.reference.hadamard import hadamard
from kvpilot_kernels.reference.quantize import decode, encode


def round_trip(entries: torch.Tensor, fmt: LatentFormat, factors: LatentFactors | None = None) -> torch.Tensor:
    """Return entries [..., 576] after quantization to this format and back, float64 in the same shape."""
    x = entries.float()
    if factors is not None:
        x = (x - factors.mean) * factors.scale
    parts = []
    for part, bits in ((x[..., :RANK], fmt.bits), (x[..., RANK:], ROPE_BITS)):
        dim = part.shape[-1]
        back = decode(*encode(part @ hadamard(dim), bits, dim), bits)
        parts.append(back.double() @ hadamard(dim, torch.float64).T)
    back = torch.cat(parts, -1)
    return back if factors is None else back / factors.scale.double() + factors.mean.double()


def attend(query: torch.Tensor, entries: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention in the absorbed form. The last query attends to all entries.

    Args:
        query: [tokens, heads, 576], absorbed part first.
        entries: [context + tokens, 576], as read back from the cache.
        scale: factor on the scores.

    Returns:
        float64 [tokens, heads, 512], in latent space.
    """
    entries = entries.double()
    scores = torch.einsum("ihd,td->hit", query.double(), entries) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(entries.shape[0] - query.shape[0] + 1)
    return torch.einsum("hit,td->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), entries[:, :RANK])
