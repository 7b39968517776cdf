"""TurboQuant as vLLM ships it (arXiv 2504.19874; vllm-project/vllm pull request 38479), in plain torch.

Keys: the vector's norm n is stored in float16. A Hadamard matrix with random signs rotates the vector's direction,
after which a coordinate is close to N(0, 1/D). Each coordinate is replaced by the nearest of the 2^b Lloyd-Max
centroids of that distribution. With norm correction, the vector of centroids is scaled to length 1 before n multiplies
it.

Values: not rotated; asymmetric round-to-nearest with one float16 step and minimum per vector.

vLLM keeps the first two and the last two layers in 16 bits. Here all layers are quantized, and the number of bits
assumes this.
"""

import math
from functools import cache

import torch

from benchmarks.accuracy.codec import Codec, half, min_max
from kvpilot_kernels.reference.hadamard import hadamard


def turboquant(bits: int) -> Codec:
    """Return `turboquant_4bit_nc` or `turboquant_3bit_nc`, with the same number of bits for keys and values."""
    return Codec(
        f"turboquant_{bits}bit_nc",
        lambda x: _keys(x, bits),
        lambda x: _values(x, bits),
        lambda dim: bits + 16 / dim,
        lambda dim: bits + 32 / dim,
    )


def _keys(x: torch.Tensor, bits: int) -> torch.Tensor:
    dim = x.shape[-1]
    rotation = signs(dim)[:, None] * hadamard(dim)
    norm = x.float().norm(dim=-1, keepdim=True)
    centroids = lloyd_max(bits)
    edges = (centroids[1:] + centroids[:-1]) / 2
    direction = (x.float() / norm.clamp_min(1e-8)) @ rotation * dim**0.5
    chosen = centroids[torch.bucketize(direction, edges)]
    return half(norm) * torch.nn.functional.normalize(chosen, dim=-1) @ rotation.T


def _values(x: torch.Tensor, bits: int) -> torch.Tensor:
    codes, step, low = min_max(x.float(), bits, -1)
    return codes * half(step) + half(low)


@cache
def signs(dim: int) -> torch.Tensor:
    """Return a fixed random sign per channel, float32 [dim], so that a Hadamard rotation has no preferred input."""
    return torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(0)).mul(2).sub(1).float()


@cache
def lloyd_max(bits: int) -> torch.Tensor:
    """Return the 2^bits centroids with the least mean squared error for N(0, 1), ascending, float32.

    By Lloyd (1957) and Max (1960), an edge lies midway between two centroids, and a centroid is the mean of its cell.
    For edges a < b of a normal variable that mean is (pdf(a) - pdf(b)) / (cdf(b) - cdf(a)).
    """
    count = 1 << bits
    centroids = torch.linspace(-2.5, 2.5, count, dtype=torch.float64)
    infinity = torch.tensor([torch.inf], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat([-infinity, (centroids[1:] + centroids[:-1]) / 2, infinity])
        pdf = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi)
        cdf = torch.special.ndtr(edges)
        centroids = (pdf[:-1] - pdf[1:]) / (cdf[1:] - cdf[:-1])
    return centroids.float()
