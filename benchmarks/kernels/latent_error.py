"""Measure the error of a latent cache, by bits and by elements per scale: `python -m benchmarks.kernels.latent_error`.

Cached vectors are random, but similar to a model's. The latent looks like the output of an RMSNorm with a learned
weight, in which some channels are 8 times as large as the others. The RoPE part also has large channels, but is not
normalised. A query attends mainly to about 100 of 4,096 tokens.

The program prints a Markdown table:

- bytes per token, and capacity relative to 16 bits,
- squared error of latents and of RoPE parts, relative to their power,
- error of attention's output, relative to the output's norm: median and worst of 64 heads.
"""

from collections.abc import Callable
from functools import partial

import torch

from kvpilot_formats.latent import ENTRY, RANK, ROPE, names, parse
from kvpilot_kernels.latent.reference import attend, round_trip
from kvpilot_kernels.reference.hadamard import hadamard
from kvpilot_kernels.reference.quantize import decode, encode

TOKENS, HEADS = 4096, 64


def entries(rng: torch.Generator) -> torch.Tensor:
    """Return random latents with their RoPE parts, as a cache would hold them, float32 [TOKENS, 576]."""
    weight = torch.rand(ENTRY, generator=rng) + 0.5
    weight[torch.randperm(ENTRY, generator=rng)[:12]] *= 8
    x = torch.randn(TOKENS, ENTRY, generator=rng)
    x[:, :RANK] /= x[:, :RANK].square().mean(-1, keepdim=True).sqrt()
    return x * weight


def grouped(x: torch.Tensor, bits: int, group: int, turned: bool = True) -> torch.Tensor:
    """Quantize and dequantize latents in groups with a 16-bit scale and zero point, and RoPE parts with 8 bits.

    If `turned` is True, quantize after a Hadamard rotation, and rotate back.
    """
    parts = []
    for part, width, size in ((x[:, :RANK], bits, group), (x[:, RANK:], 8, ROPE)):
        turn = hadamard(part.shape[1]) if turned else torch.eye(part.shape[1])
        parts.append(decode(*encode(part @ turn, width, size), width) @ turn.T)
    return torch.cat(parts, -1)


def float8(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with a scale of 1, as vLLM does."""
    return x.to(torch.float8_e4m3fn).float()


def main() -> None:
    """Compute the errors of all formats, and print the table."""
    rng = torch.Generator().manual_seed(0)
    x, query = entries(rng), torch.randn(HEADS, 1, ENTRY, generator=rng)
    # Scale scores to a standard deviation of 2.5, so that queries attend to some tokens more than to others.
    scale = 2.5 / float((query[:, 0] @ x.T).std())
    exact = torch.cat([attend(q[None], x, scale) for q in query])
    print("| | bytes a token | capacity | latent error | RoPE error | output error, median | worst |")
    print("|---|---|---|---|---|---|---|")

    def tell(name: str, row_bytes: int, codec: Callable[[torch.Tensor], torch.Tensor]) -> None:
        back = codec(x).double()
        lost = [float((back - x)[:, s].square().sum() / x[:, s].double().square().sum())
                for s in (slice(RANK), slice(RANK, None))]  # fmt: skip
        off = (torch.cat([attend(q[None], back, scale) for q in query]) - exact).norm(dim=-1) / exact.norm(dim=-1)
        print(f"| {name} | {row_bytes} | {2 * ENTRY / row_bytes:.2f}x | {lost[0]:.2e} | {lost[1]:.2e} "
              f"| {float(off.median()):.4f} | {float(off.max()):.4f} |")  # fmt: skip

    tell("bfloat16", 2 * ENTRY, lambda y: y.bfloat16().float())
    tell("fp8 (e4m3)", ENTRY, float8)
    for name in names():
        fmt = parse(name)
        tell(f"`{name}`", fmt.row_bytes, partial(round_trip, fmt=fmt))
        for group in (128, 64, 32):
            size = RANK * fmt.bits // 8 + 2 * RANK // group + ROPE + 2
            tell(f"{fmt.bits} bits, a scale for {group}", size, partial(grouped, bits=fmt.bits, group=group))
    tell("4 bits, a scale for 64, not rotated", 338, lambda y: grouped(y, 4, 64, turned=False))


if __name__ == "__main__":
    main()
