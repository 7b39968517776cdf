"""What a ring's row holds, in plain torch: the residual of a token's codes, and the checksum of its row in the page.

With n = 2^(8 - b), the codes c, steps s and zero points z of a row x (`quantize`), and h = (n - 1) / 2::

    r = clamp(round((x / s + z - c) * n / 2^e + h), 0, n - 1)        x' = s * (c - z) + s * 2^e / n * (r - h)

with e in 0..2 for each group, whichever gives the smallest squared error: the larger ones are for groups whose tails
were clipped. Everything here is the layout of `kvpilot_kernels.formats`.
"""

from __future__ import annotations

import torch

from kvpilot_kernels.formats import RING_EXPONENTS
from kvpilot_kernels.reference.quantize import pack, scale_and_zero, split, unpack

_MASK = 0xFFFFFFFF


def half(bits: int) -> float:
    """What a residual is counted from."""
    return ((1 << 8 - bits) - 1) / 2


def encode_residual(
    x: torch.Tensor, codes: torch.Tensor, words: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `codes` lack of 8 bits.

    Args:
        x: [..., D], rotated. codes: uint8 [..., D]; words: int16 [..., groups], what `quantize.encode` made of it.
        bits: 2 or 4.

    Returns:
        r, uint8 [..., D], and e, int32 [..., groups].
    """
    count = 1 << 8 - bits
    step, zero = scale_and_zero(words, bits)
    step = step.unsqueeze(-1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    groups = words.shape[-1]
    off = split(x.float(), groups) * inverse + zero.unsqueeze(-1) - split(codes.float(), groups)
    off = torch.where(step > 0, off, 0.0).nan_to_num_(0.0)
    tried = []
    for e in range(RING_EXPONENTS):
        r = (off * (count / 2**e) + half(bits)).round().clamp_(0, count - 1)
        tried.append((r, (off - (r - half(bits)) * (2**e / count)).square().sum(-1)))
    exponents = torch.stack([error for _, error in tried]).argmin(0)
    chosen = torch.stack([r for r, _ in tried]).gather(0, exponents[None, ..., None].expand(1, *off.shape))[0]
    return chosen.to(torch.uint8).flatten(-2), exponents.int()


def decode_residual(r: torch.Tensor, exponents: torch.Tensor, words: torch.Tensor, bits: int) -> torch.Tensor:
    """What r, uint8 [..., D], adds to the row that was read back, float32 [..., D]."""
    fine = fine_steps(exponents, words, bits)
    return ((split(r.float(), words.shape[-1]) - half(bits)) * fine.unsqueeze(-1)).flatten(-2)


def fine_steps(exponents: torch.Tensor, words: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps of residuals, float32 in the shape of `words`."""
    step, _ = scale_and_zero(words, bits)
    return step * exponents.float().exp2() / (1 << 8 - bits)


def pack_digits(r: torch.Tensor, bits: int) -> torch.Tensor:
    """r, uint8 [..., D], as digits of `bits` bits, the highest first: uint8 [..., 8 / bits - 1, D * bits / 8]."""
    mask = (1 << bits) - 1
    return torch.stack([pack((r >> shift) & mask, bits) for shift in range(8 - 2 * bits, -1, -bits)], dim=-2)


def unpack_digits(digits: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_digits`."""
    rows = unpack(digits, bits).unbind(-2)
    r = rows[0]
    for row in rows[1:]:
        r = r << bits | row
    return r


def checksum(packed: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """h of a side's row: packed codes, uint8 [..., bytes], and words, int16 [..., groups]; int64 [...] below 2^32."""
    codes = split(packed.long(), packed.shape[-1] // 2)
    values = torch.cat([codes[..., 0] | codes[..., 1] << 8, words.long() & 0xFFFF], dim=-1)
    a = (torch.arange(values.shape[-1], device=values.device) + 1) * 0x9E3779B1 & _MASK
    return (values * ((a ^ a >> 15) | 1) & _MASK).sum(-1) & _MASK


def ring_words(h: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """A row's words in the ring, int16 [..., groups], of checksums [...] and exponents [..., groups]."""
    return ((_parts(h, exponents.shape[-1]) << 2 | exponents.long()) & 0xFFFF).to(torch.int16)


def split_ring_words(words: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents, int64 [..., groups], and whether the words are of the row with checksum h, bool [...]."""
    wide = words.long() & 0xFFFF
    same = (wide >> 2 == _parts(h, words.shape[-1]))[..., :2].all(-1)
    return (wide & 3), same


def _parts(h: torch.Tensor, groups: int) -> torch.Tensor:
    """The 14 bits of a checksum that each group's word takes, int64 [..., groups]."""
    shift = torch.where(torch.arange(groups, device=h.device) % 2 == 0, 18, 4)
    return h.unsqueeze(-1) >> shift & 0x3FFF
