"""KVarN in plain torch (arXiv 2606.03458): Hadamard rotation, then variance normalisation along both axes of a tile.

A tile X is 128 tokens of one head, rotated over head_dim. Its rows and columns are brought to equal standard deviation
by alternating divisions, in the manner of Sinkhorn (scales are kept as logarithms)::

    c_j <- c_j * std_i(X_ij / (r_i c_j))        r_i <- r_i * std_j(X_ij / (r_i c_j))        16 times

The pair (r, c) with the least imbalance is kept. Imbalance is max std / min std, summed over both axes. X / (r c) is
quantized by asymmetric round-to-nearest. Keys have one step and minimum per channel of the tile, values one per token.
At head_dim 128, the cache stores three float16 numbers per 128 elements: the step and the minimum, both multiplied by
the scale of their own axis, and the scale of the other axis.

The original keeps the first tile of a sequence, and the unfinished tile, in 16 bits in a pool next to the cache.
`exact_ends` does the same. Without it the unfinished tile is quantized as a short tile.
"""

import torch

from benchmarks.accuracy.codec import Codec, half, min_max
from kvpilot_kernels.reference.hadamard import hadamard

TILE = 128
_ROUNDS = 16
_STD = (1e-3, 1e3)
_LOG_SCALE = (-0.3, 10.0)  # limits of the original; the quantizer's own step handles scales below 0.74


def kvarn(key_bits: int, value_bits: int, *, exact_ends: bool = False) -> Codec:
    """Return the codec of KVarN with tiles of 128 tokens. `kvarn(4, 2)` is the original's k4v2_g128."""
    name = f"kvarn_k{key_bits}v{value_bits}" + ("+exact" if exact_ends else "")
    return Codec(
        name,
        lambda x: _tiles(x, key_bits, over_tokens=True),
        lambda x: _tiles(x, value_bits, over_tokens=False),
        lambda dim: key_bits + 32 / TILE + 16 / dim,
        lambda dim: value_bits + 32 / dim + 16 / TILE,
        tile=TILE,
        exact_ends=exact_ends,
    )


def _tiles(x: torch.Tensor, bits: int, *, over_tokens: bool) -> torch.Tensor:
    rotation = hadamard(x.shape[-1])
    rotated = (x.float() @ rotation).transpose(0, 1)  # [H, tokens, D]
    whole = x.shape[0] - x.shape[0] % TILE
    parts = [rotated[:, :whole].reshape(x.shape[1], -1, TILE, x.shape[2])] if whole else []
    if whole < x.shape[0]:
        parts.append(rotated[:, None, whole:])
    back = [_tile(part, bits, -2 if over_tokens else -1).flatten(1, 2) for part in parts]
    return torch.cat(back, 1).transpose(0, 1) @ rotation.T


def _tile(tile: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Quantize tiles [..., tokens, D], with one step and minimum per line along `axis`, and return decoded values."""
    rows, columns = normalise(tile)
    own, other = (columns, rows) if axis == -2 else (rows, columns)
    codes, step, low = min_max(tile / rows / columns, bits, axis)
    return (codes * half(own * step) + half(own * low)) * half(other)


def normalise(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of rows [..., rows, 1] and columns [..., 1, columns] that balance a tile [..., rows, columns]."""
    log_rows = torch.zeros_like(tile[..., :1])
    log_columns = torch.zeros_like(tile[..., :1, :])
    best = (log_rows, log_columns)
    by_row, by_column = _std(tile, -1), _std(tile, -2)
    least = _spread(by_row) + _spread(by_column)
    for _ in range(_ROUNDS):
        log_columns = _divide(log_columns, by_column)
        log_rows = _divide(log_rows, _std(_over(tile, log_rows, log_columns), -1))
        now = _over(tile, log_rows, log_columns)
        by_row, by_column = _std(now, -1), _std(now, -2)
        imbalance = _spread(by_row) + _spread(by_column)
        better = imbalance <= least
        best = (torch.where(better, log_rows, best[0]), torch.where(better, log_columns, best[1]))
        least = torch.minimum(imbalance, least)
    return best[0].exp(), best[1].exp()


def _over(tile: torch.Tensor, log_rows: torch.Tensor, log_columns: torch.Tensor) -> torch.Tensor:
    return tile * (-log_rows).exp() * (-log_columns).exp()


def _divide(log_scale: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    return (log_scale + deviation.clamp(*_STD).log()).clamp(*_LOG_SCALE)


def _spread(deviation: torch.Tensor) -> torch.Tensor:
    """Return the largest standard deviation of a tile divided by its smallest, [..., 1, 1]."""
    return deviation.amax((-2, -1), keepdim=True) / deviation.amin((-2, -1), keepdim=True).clamp_min(1e-8)


def _std(tile: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the standard deviation over `axis`. For a single element it is 0."""
    count = tile.shape[axis]
    off = tile - tile.mean(axis, keepdim=True)
    return (off.square().sum(axis, keepdim=True) / max(1, count - 1)).sqrt()
