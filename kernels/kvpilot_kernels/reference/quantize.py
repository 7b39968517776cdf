"""kvpilot's group format in plain torch: encode, pack, unpack, decode.

For a group of g elements x with the range [lo, hi], and codes of b bits (qmax = 2^b - 1)::

    scale = (hi - lo) / qmax with lo <= 0 <= hi
    z = zero_code * qmax / 30 with zero_code = round(-lo / scale * 30 / qmax)
    code = clamp(round(x / scale + z), 0, qmax)        x' = scale * (code - z)

[lo, hi] starts as the group's range, widened to include 0. The encoder tries a few factors (`layouts.SHRINK`), and
shrinks the range by the factor with the smallest squared error. With few codes, it is better to clip the tails than to
use the coarser scale that covers them. `kvpilot_formats.layouts` describes the scale metadata.

At 2 bits, the decoded x' is too short along x: the inner product <x, x'> is about 0.89 <x, x>. A sum over tokens does
not average this error out, because all tokens have it. So at 2 bits the stored scale becomes

    scale * min(<x, x> / <x, x'>, GAIN_LIMIT)

and the codes stay the same. Then <x, x'> = <x, x>, at the cost of a little more squared error per token
(`docs/decisions/0002`).
"""

import torch

from kvpilot_formats.layouts import CUT_BITS, GAIN_BITS, GAIN_LIMIT, SHRINK, ZERO_BITS, ZERO_STEPS, Region

_INF = 0x7C00 >> CUT_BITS  # bits of a stored scale that is float16's infinity or NaN
_NAN = 0x7E00 >> CUT_BITS


def encode(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last dimension in groups.

    Args:
        x: [..., D], any float dtype; already rotated.
        bits: 2, 4 or 8.
        group: elements per group; divides D.

    Returns:
        codes, uint8 [..., D], and scale metadata, int16 [..., D / group] (bits of an unsigned number). A group with a
        NaN decodes to NaN. Values beyond float16's range saturate.
    """
    qmax = (1 << bits) - 1
    x = split(x.float(), x.shape[-1] // group)
    lo = x.amin(-1, keepdim=True).clamp(max=0)
    hi = x.amax(-1, keepdim=True).clamp(min=0)
    factors = SHRINK[bits]
    codes, meta, scale, zero = encode_range(x, lo * factors[0], hi * factors[0], qmax)
    least = _error(x, codes, scale, zero) if len(factors) > 1 else scale
    for factor in factors[1:]:
        codes2, meta2, scale, zero = encode_range(x, lo * factor, hi * factor, qmax)
        error = _error(x, codes2, scale, zero)
        better = error < least
        codes, meta = torch.where(better, codes2, codes), torch.where(better, meta2, meta)
        least = torch.minimum(error, least)
    if bits <= GAIN_BITS:
        meta = _stretched(x, codes, meta, bits)
    return codes.to(torch.uint8).flatten(-2), meta.to(torch.int16).squeeze(-1)


def _stretched(x: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `meta`, [..., 1], with each scale multiplied by <x, x> / <x, x'>, but at most by GAIN_LIMIT.

    x' is what `codes` and `meta` decode to. So with the new scales, <x, x'> is <x, x> up to rounding.
    """
    scale, zero = scale_and_zero(meta, bits)
    along = (codes - zero).mul_(scale).mul_(x).sum(-1, keepdim=True)
    gain = (x.square().sum(-1, keepdim=True) / along).clamp(max=GAIN_LIMIT)
    wanted = (scale * gain).clamp(max=65504.0)
    high = (wanted.half().view(torch.int16).to(torch.int32) + (1 << CUT_BITS - 1)) >> CUT_BITS  # round to the nearest
    stretched = (high.clamp(max=_INF - 1) << ZERO_BITS) | (meta & ((1 << ZERO_BITS) - 1))
    return torch.where((along > 0) & (along < torch.inf) & (gain > 0), stretched, meta)


def _error(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each group, [..., 1]."""
    return (codes.sub(zero).mul_(scale).sub_(x)).square_().sum(-1, keepdim=True)


def split(x: torch.Tensor, parts: int) -> torch.Tensor:
    """View the last dimension in `parts` equal parts: [..., n] as [..., parts, n / parts]."""
    return x.view(*x.shape[:-1], parts, x.shape[-1] // parts)


def view_region(pages: torch.Tensor, region: Region) -> torch.Tensor:
    """View a region of flat pages, uint8 [..., bytes], as [..., rows, row_bytes]."""
    end = region.offset + region.rows * region.row_bytes
    return split(pages[..., region.offset : end], region.rows)


def encode_range(
    x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, qmax: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize groups, float32 [..., g], to codes up to `qmax`, for given ranges [lo, hi], [..., 1], that include 0.

    Returns:
        Codes, float [..., g].
        Scale metadata, int32 [..., 1].
        Scales and zero points, float32 [..., 1] each.
    """
    wanted = ((hi - lo) / qmax).clamp(max=65504.0)
    # Round the scale up, so that both ends of the range have a code.
    high = (wanted.half().view(torch.int16).to(torch.int32) + (1 << CUT_BITS) - 1) >> CUT_BITS
    high = torch.where(wanted.isnan(), _NAN, high.clamp(max=_INF - 1))
    scale = _scale(high)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    zero_code = (lo * inverse * (-ZERO_STEPS / qmax)).round_().clamp_(0, ZERO_STEPS).nan_to_num_(0.0)
    zero = zero_code * (qmax / ZERO_STEPS)
    codes = (x * inverse + zero).round_().clamp_(0, qmax).nan_to_num_(0.0)
    return codes, (high << ZERO_BITS) | zero_code.to(torch.int32), scale, zero


def _scale(bits: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale that the stored bits of a scale stand for."""
    return (bits << CUT_BITS).to(torch.int16).view(torch.float16).float()


def scale_and_zero(meta: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points, float32 in the shape of `meta` (int16 scale metadata)."""
    wide = meta.to(torch.int32) & 0xFFFF
    zero_code = wide & ((1 << ZERO_BITS) - 1)
    return _scale(wide >> ZERO_BITS), zero_code * (((1 << bits) - 1) / ZERO_STEPS)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 [..., D] into n = D * bits / 8 bytes, [..., n]. Byte j holds elements j, j + n, j + 2n, ..."""
    if bits == 8:
        return codes
    planes = split(codes, 8 // bits).unbind(-2)
    packed = planes[0].clone()
    for i, plane in enumerate(planes[1:], start=1):
        packed |= plane << (bits * i)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `pack`: bytes [..., D * bits / 8] to codes uint8 [..., D]."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1)


def decode(codes: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Decode codes uint8 [..., D] and scale metadata int16 [..., groups] to float32 [..., D], without rotating back."""
    scale, zero = scale_and_zero(meta, bits)
    grouped = split(codes.float(), meta.shape[-1])
    return grouped.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(-2)
