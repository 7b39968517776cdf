"""Measure error and size of group formats on Gaussian rows: `python -m benchmarks.kernels.codec_error`.

A row is close to Gaussian after a Hadamard rotation, and the formats are designed for this error. The program prints a
Markdown table of the mean squared error (signal power 1) and the bits per element with metadata.

`--head-dims 64 80 96` prints each dtype's error in heads of these sizes instead. The heads are rotated as the cache
stores them, and padded with zeros if their size has no layout. The table then has the error's norm, relative to the
head's norm, and the bits. In heads with outliers, some channels are eight times as large as the others.
"""

import argparse

import torch

from kvpilot_formats import formats
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_kernels.reference.quantize import decode, encode

ROWS, DIM = 20_000, 128


def ours(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Quantize and dequantize `x` in kvpilot's group format."""
    return decode(*encode(x, bits, group), bits)


def minmax(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Quantize and dequantize with levels from each group's minimum to its maximum.

    Scale and zero point are exact, but count as two 16-bit numbers.
    """
    y = x.view(-1, DIM // group, group)
    lo, hi = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = (hi - lo) / (2**bits - 1)
    return (((y - lo) / scale).round() * scale + lo).view(x.shape)


def symmetric(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Quantize and dequantize symmetrically around 0. A group's scale is exact, but counts as one 16-bit number."""
    y = x.view(-1, DIM // group, group)
    top = 2 ** (bits - 1) - 1
    scale = y.abs().amax(-1, keepdim=True) / top
    return ((y / scale).round().clamp(-top - 1, top) * scale).view(x.shape)


def groups() -> None:
    """Print the group formats as a table: bits per element, and mean squared error on rows of variance 1."""
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    print("| codes | group | metadata | bits an element | mean squared error |\n|---|---|---|---|---|")
    for bits in (4, 2):
        for name, codec, group, metadata in (
            ("scale and zero point in 16 bits (ours)", ours, 128, 16),
            ("scale and zero point in 16 bits (ours)", ours, 64, 16),
            ("scale and zero point in 16 bits (ours)", ours, 32, 16),
            ("min and max, two 16-bit numbers", minmax, 128, 32),
            ("min and max, two 16-bit numbers", minmax, 64, 32),
            ("symmetric, one 16-bit number", symmetric, 64, 16),
        ):
            error = (codec(x, bits, group) - x).square().mean().item()
            print(f"| {bits} | {group} | {name} | {bits + metadata / group:.3f} | {error:.5f} |")


def heads(dims: list[int]) -> None:
    """Print a table of the relative error of keys and values, and bits per element, by head_dim and dtype."""
    names = formats.own_names()
    print(f"| head_dim | stored as | data | {' | '.join(names)} |\n|---|---|---|{'---|' * len(names)}")
    for dim in dims:
        plain = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(dim))
        channels = torch.ones(dim)
        channels[:: dim // 4] = 8
        for data, x in (("Gaussian", plain), ("with outliers", plain * channels)):
            told = []
            for fmt in map(formats.parse, names):
                off = [float((round_trip(x, fmt, side) - x).norm() / x.norm()) for side in ("key", "value")]
                told.append(f"{off[0]:.2%}, {off[1]:.2%}; {fmt.bits_per_element(dim):.2f}")
            print(f"| {dim} | {formats.stored_dim(dim)} | {data} | {' | '.join(told)} |")


def main() -> None:
    """Print the tables that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[])
    options = parser.parse_args()
    if options.head_dims:
        heads(options.head_dims)
    else:
        groups()


if __name__ == "__main__":
    main()
