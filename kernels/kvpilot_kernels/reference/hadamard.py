"""Orthonormal Hadamard matrices for the head dimensions that kvpilot supports.

A rotation by H spreads an outlier channel over the whole head. Each coordinate of the rotated vector mixes all
channels, so it is close to Gaussian, which suits a uniform quantizer with one scale per group. H is orthogonal, so
q . k = (q H) . (k H): queries are rotated like keys, and outputs are rotated back like values.

Sources: Sylvester (1867) for powers of two, H_2n = H_2 (x) H_n; Paley (1933), construction I with the quadratic
residues mod 11, for H_12; their Kronecker product for D = 96 = 12 * 8 and 192 = 12 * 16.
"""

from functools import cache

import torch

from kvpilot_formats.formats import SERVED, stored_dim


@cache
def hadamard(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrix H, [dim, dim], with H H^T = I. Rotate rows by ``x @ H`` and back by ``y @ H.T``.

    The tensor is cached, so do not write to it.

    Raises:
        ValueError: dim is neither a power of two nor 12 times one.
    """
    base, power = (_paley_12(), dim // 12) if dim % 12 == 0 else (torch.ones(1, 1, dtype=torch.float64), dim)
    if power < 1 or power & (power - 1):
        raise ValueError(f"dim {dim} has no Hadamard matrix here; use a power of two, or 12 times one")
    h2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = base
    while matrix.shape[0] < dim:
        # From 96 on, double as the kernels do: they rotate both halves, and then add and subtract them.
        matrix = torch.kron(h2, matrix) if matrix.shape[0] >= 96 else torch.kron(matrix, h2)
    return matrix.div(dim**0.5).to(dtype)


@cache
def rotation(head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return R, the first `head_dim` rows of `hadamard(stored_dim(head_dim))`. R R^T = I.

    ``x @ R`` equals padding x with zeros and then rotating it by H. Rotate back by ``y @ R.T``.

    Raises:
        ValueError: heads of this dimension are not stored.
    """
    wide = stored_dim(head_dim)
    if wide is None:
        raise ValueError(f"head_dim {head_dim} has no rows here; use {SERVED}")
    return hadamard(wide, dtype)[:head_dim]


def _paley_12() -> torch.Tensor:
    """Return H_12 = I + S, where the skew matrix S has the quadratic character chi(i - j) mod 11.

    Signs of rows are chosen so that the first column is 1. Then, as with Sylvester's matrices, the rotation of a
    constant row is nonzero only in the first coordinate.
    """
    residues = {i * i % 11 for i in range(1, 11)}
    chi = [0.0] + [1.0 if i in residues else -1.0 for i in range(1, 11)]
    s = torch.zeros(12, 12, dtype=torch.float64)
    s[0, 1:], s[1:, 0] = 1.0, -1.0
    for i in range(11):
        for j in range(11):
            s[i + 1, j + 1] = chi[(i - j) % 11]
    matrix = s + torch.eye(12, dtype=torch.float64)
    return matrix * matrix[:, :1]
