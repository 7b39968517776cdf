"""Find rows whose bytes do not depend on the order of float32 sums, so that all implementations must agree.

Two results of a group depend on sums even if its elements are exact: which range has the least squared error, and which
stored value is nearest to a stretched scale. Of 1,440 rows of one to four groups, 21 were too close to a tie.
"""

import torch

from kvpilot_formats.layouts import CUT_BITS, GAIN_BITS, GAIN_LIMIT, SHRINK
from kvpilot_kernels.reference.quantize import encode_range, split

SUMS = 1e-4
"""Relative margin between squared errors, far above the error of float32 sums of 64 elements."""


def decided(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Return True for rows whose codes do not depend on the order of sums.

    `x` is float32 [..., D], quantized in groups of `group` elements to `bits` bits.
    """
    x = split(x, x.shape[-1] // group)
    lo, hi = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    tried = [encode_range(x, lo * factor, hi * factor, (1 << bits) - 1) for factor in SHRINK[bits]]
    codes, meta, scale, zero = (torch.stack(parts) for parts in zip(*tried, strict=True))
    read = (codes - zero.double()) * scale.double()
    errors = (read - x.double()).square().sum(-1, keepdim=True)
    least, best = errors.min(0, keepdim=True)
    meta_of_best, codes_of_best = meta.gather(0, best), codes.gather(0, best.expand(1, *x.shape))
    same = (meta == meta_of_best) & (codes == codes_of_best).all(-1, keepdim=True)
    told = (same | (errors > least * (1 + SUMS))).all(0)
    if bits <= GAIN_BITS:
        along = (read.gather(0, best.expand(1, *x.shape))[0] * x).sum(-1, keepdim=True)
        gain = (x.double().square().sum(-1, keepdim=True) / along).clamp(max=GAIN_LIMIT)
        wanted = scale.gather(0, best)[0].double() * gain
        low, high = (_nearest(wanted * (1 + off)) for off in (-SUMS, SUMS))
        told &= (low == high) | ~(along > 0)
    return told.all(-1).all(-1)


def _nearest(scale: torch.Tensor) -> torch.Tensor:
    """Return a stretched scale as it is stored, int32."""
    return (scale.clamp(max=65504.0).half().view(torch.int16).int() + (1 << CUT_BITS - 1)) >> CUT_BITS
