"""Residuals in plain torch. They refine a token's codes to 8 bits.

Let c be the codes of b bits, s the scales and z the zero points of a row x (`quantize`), n = 2^(8 - b), and
h = (n - 1) / 2. Then r is the residual, and x' the refined row::

    r = clamp(round((x / s + z - c) * n / 2^e + h), 0, n - 1)        x' = s * (c - z) + s * 2^e / n * (r - h)

The largest |x / s + z - c| of a group determines its exponent e: 0, or 1 or 2 if the encoder has clipped large values.
`kvpilot_formats.layouts` describes the bytes of a residual page.
"""

import torch

from kvpilot_formats.layouts import RESIDUAL_REACH
from kvpilot_kernels.reference.quantize import pack, scale_and_zero, split, unpack


def half(bits: int) -> float:
    """Return h = (n - 1) / 2, the residual code that adds nothing; n is the number of values of a residual."""
    return ((1 << 8 - bits) - 1) / 2


def encode_residual(
    x: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual that refines `codes` to 8 bits.

    Args:
        x: [..., D], rotated.
        codes: uint8 [..., D], from `quantize.encode`.
        meta: int16 [..., groups], from `quantize.encode`.
        bits: 2 or 4.

    Returns:
        r, uint8 [..., D], and e, int32 [..., groups].
    """
    count = 1 << 8 - bits
    scale, zero = scale_and_zero(meta, bits)
    scale = scale.unsqueeze(-1)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    groups = meta.shape[-1]
    off = split(x.float(), groups) * inverse + zero.unsqueeze(-1) - split(codes.float(), groups)
    off = torch.where(scale > 0, off, 0.0).nan_to_num_(0.0)
    largest = off.abs().amax(-1)
    exponents = (largest > RESIDUAL_REACH).int() + (largest > 2 * RESIDUAL_REACH)
    r = (off * (count / exponents.float().exp2().unsqueeze(-1)) + half(bits)).round().clamp_(0, count - 1)
    return r.to(torch.uint8).flatten(-2), exponents


def decode_residual(r: torch.Tensor, exponents: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers that residuals r, uint8 [..., D], add to the decoded row of codes: float32 [..., D]."""
    fine = fine_scales(exponents, meta, bits)
    return ((split(r.float(), meta.shape[-1]) - half(bits)) * fine.unsqueeze(-1)).flatten(-2)


def fine_scales(exponents: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scale of each group's residuals, float32 in the shape of `meta`."""
    scale, _ = scale_and_zero(meta, bits)
    return scale * exponents.float().exp2() / (1 << 8 - bits)


def pack_digits(r: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack r, uint8 [..., D], as digits of `bits` bits, the highest first: uint8 [..., 8 / bits - 1, D * bits / 8]."""
    mask = (1 << bits) - 1
    return torch.stack([pack((r >> shift) & mask, bits) for shift in range(8 - 2 * bits, -1, -bits)], dim=-2)


def unpack_digits(digits: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `pack_digits`."""
    rows = unpack(digits, bits).unbind(-2)
    r = rows[0]
    for row in rows[1:]:
        r = r << bits | row
    return r
