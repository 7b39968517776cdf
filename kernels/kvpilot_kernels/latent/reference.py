"""Multi-head latent attention over stored tokens in float64, straight from its definition: what kernels are held to.

In the absorbed form heads share a token's entry e = (latent, rope), and values are its latent:

    o_h = sum_t softmax_t(scale * q_h . e_t) latent_t        q_h = (q_nope_h W_UK_h, q_rope_h)

with e read back from its format and rotated back. No paging, no tricks.
"""

from __future__ import annotations

import torch

from kvpilot_formats.latent import RANK, ROPE, ROPE_BITS, LatentFormat
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.reference.hadamard import hadamard
from kvpilot_kernels.reference.quantize import decode, encode


def round_trip(entries: torch.Tensor, fmt: LatentFormat, factors: LatentFactors | None = None) -> torch.Tensor:
    """What the cache gives back for entries [..., 576]: float64 in the same shape."""
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
    """Causal attention in the absorbed form, aligned to the end of the entries.

    Args:
        query: [tokens, heads, 576], absorbed part first. entries: [context + tokens, 576] as they are read back.
        scale: factor on the scores.

    Returns:
        float64 [tokens, heads, 512], in latent space.
    """
    entries = entries.double()
    scores = torch.einsum("ihd,td->hit", query.double(), entries) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(entries.shape[0] - query.shape[0] + 1)
    return torch.einsum("hit,td->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), entries[:, :RANK])


def decode_reference(
    query: torch.Tensor, entries: torch.Tensor, fmt: LatentFormat, scale: float, factors: LatentFactors | None = None
) -> torch.Tensor:
    """One query token over all stored tokens of one sequence.

    Args:
        query: [heads, 576]. entries: [tokens, 576] before quantization, the query's own token included.
        fmt, factors: what they are stored with. scale: factor on the scores.

    Returns:
        float64 [heads, 512], in latent space.
    """
    return attend(query[None], round_trip(entries, fmt, factors), scale)[0]


def unabsorbed(
    query: torch.Tensor, entries: torch.Tensor, up_key: torch.Tensor, up_value: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same attention as the model defines it: keys and values of each head made of the latents.

    Args:
        query: [tokens, heads, nope + 64], before it is absorbed. entries: [context + tokens, 576].
        up_key: [heads, nope, 512], W_UK. up_value: [heads, 512, value], W_UV. scale: factor on the scores.

    Returns:
        float64 [tokens, heads, value].
    """
    latent, rope = entries[:, :RANK].double(), entries[:, RANK:].double()
    nope, q_rope = query[..., :-ROPE].double(), query[..., -ROPE:].double()
    key = torch.einsum("td,hnd->htn", latent, up_key.double())
    value = torch.einsum("td,hdv->htv", latent, up_value.double())
    scores = (torch.einsum("ihn,htn->hit", nope, key) + torch.einsum("ihr,tr->hit", q_rope, rope)) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(entries.shape[0] - query.shape[0] + 1)
    return torch.einsum("hit,htv->ihv", scores.masked_fill(future, -torch.inf).softmax(-1), value)
