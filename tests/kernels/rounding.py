"""Allowed error of a decode step in float16, derived from its rounding, so that no random input exceeds it.

Decode rounds twice. All other errors come from float32 and are far smaller.

- It rounds the elements q_i of a rotated query to 2^-14 of the largest element. Let e_i be the error of element i, p
  the probabilities, and k' the rotated keys as read back. Then the output o moves by

      sum_i e_i scale sum_t p_t k'_ti (v_t - o)

- It rounds each token's weight p_t s of the value's codes to float16. The error is at most 2^-11 of the token's
  contribution, independently for each group. A group's codes span less than twice its largest element.

Rounding errors are independent and uniform, so the mean of their squares is a third of the largest square. The root of
the summed squares is one standard deviation. No input reaches `DEVIATIONS` of them: of 5,657 heads in 300 random
batches, the furthest was off by 1.4, and half by less than 0.25.
"""

import torch

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.hadamard import rotation

HALF = 2.0**-11
DIGITS = 2.0**-14
DEVIATIONS = 6


def assert_within_rounding(
    out: torch.Tensor,
    wanted: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    factors: Factors,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Compare one sequence's output [heads, dim] with the reference.

    Args:
        query: [heads, dim].
        key, value: all visible tokens as read back, float64 [tokens, kv_heads, dim].
        factors: factors of the cache.
        scale, softcap: scale and soft cap of the scores.
    """
    heads, dim = query.shape
    ratio = heads // key.shape[1]
    mean = factors.key_mean.double().expand_as(key).clone()
    mean[0] = factors.key_first.double()
    turn = rotation(dim, torch.float64)
    rows = [((key - mean) * factors.key_scale) @ turn, ((value - factors.value_mean) * factors.value_scale) @ turn]
    wide = [
        x.double().repeat_interleave(ratio, -2) for x in (*rows, key, value, factors.key_scale, factors.value_scale)
    ]
    key_rows, value_rows, key, value, key_scale, value_scale = wide

    scores = torch.einsum("hd,thd->ht", query.double(), key) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.softmax(-1)
    mean_value = torch.einsum("ht,thd->hd", weights, value)
    rotated = query.double() / key_scale @ turn
    moved = torch.einsum("ht,thi,thd->hid", weights, key_rows, value - mean_value)
    step = DIGITS * rotated.abs().amax(-1) * scale
    of_query = step**2 * moved.square().sum((1, 2))
    largest = value_rows.abs().amax(-1)
    of_weights = torch.einsum("ht,th->h", weights**2, largest**2) * HALF**2 * value_scale.pow(-2).sum(-1)

    off = (out.double() - wanted).norm(dim=-1)
    limit = DEVIATIONS * ((of_query + of_weights) / 3).sqrt()
    assert (off <= limit).all(), f"off by {off.tolist()}, where rounding explains {limit.tolist()}"
