"""Fits a layer's static factors to what a model shows on calibration text: the least expected damage of quantization.

Let x_t be a token's key (or value), g_t the gradient of the model's log-likelihood with respect to it, m the mean and
s the scale to be found, per channel. Rotated by a Hadamard matrix, (x_t - m) s has its energy spread evenly over the
coordinates, and the quantizer leaves in each of them an error of variance proportional to

    v_t = sum_c' s_c'^2 (x_tc' - m_c')^2 / D

which comes back as an error of variance v_t / s_c^2 in channel c. To second order, an error e_t costs (g_t . e_t)^2 / 2
nats of KL divergence when the gradient is taken at labels drawn from the model itself (the Fisher information). So

    damage(m, s) ~ sum_t (sum_c g_tc^2 / s_c^2) (sum_c' s_c'^2 (x_tc' - m_c')^2)

which is minimised in turns, each in closed form: m_c' is the mean of x_tc' weighted by sum_c g_tc^2 / s_c^2, and for
M_cc' = sum_t g_tc^2 (x_tc' - m_c')^2 the scale obeys s_c^4 = (sum_c' M_cc' s_c'^2) / (sum_c' M_c'c / s_c'^2).

Weighting the mean matters: the first token of a text is an attention sink whose key and value are far from all others'
and which most queries look at; an unweighted mean of values doubles its error.
"""

from __future__ import annotations

import torch

_ROUNDS = 60
_LIMIT = 16.0  # a scale is at most this far from the geometric mean of its head
_FLOOR = 1e-3  # of the mean entry of M, added to all: what a channel that calibration never saw move counts


class Moments:
    """Sums over tokens of g^2, g^2 x and g^2 x^2 for one layer and side, float64 [kv_heads, D (, D)]."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.weight = zeros(kv_heads, head_dim)
        self.first = zeros(kv_heads, head_dim, head_dim)
        self.second = zeros(kv_heads, head_dim, head_dim)
        self.tokens = 0

    def add(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Count tokens: keys (or values) and their gradients, both [tokens, kv_heads, D] of any float dtype.

        Raises:
            ValueError: the shapes differ from each other or from this layer's, or a number is not finite.
        """
        if x.shape != gradient.shape or x.shape[1:] != self.weight.shape:
            raise ValueError(
                f"tokens {tuple(x.shape)} with gradients {tuple(gradient.shape)} do not fit moments of "
                f"[tokens, {self.weight.shape[0]}, {self.weight.shape[1]}]; give one layer's keys or values"
            )
        x, g2 = x.double(), gradient.double().square()
        weight = g2.sum(0)
        second = torch.einsum("thc,thd->hcd", g2, x.square())
        if not (weight.isfinite().all() and second.isfinite().all()):
            raise ValueError("keys, values or gradients are not finite; calibrate in float32 or bfloat16")
        self.weight += weight
        self.first += torch.einsum("thc,thd->hcd", g2, x)
        self.second += second
        self.tokens += x.shape[0]


def fit(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the scale of least damage, float32 [kv_heads, D] each; scales have the geometric mean 1 per head."""
    squared = torch.ones_like(moments.weight)  # s^2
    mean = torch.zeros_like(squared)
    for _ in range(_ROUNDS):
        mean = _mean(moments, squared)
        damage = (
            moments.second - 2 * mean[:, None] * moments.first + mean.square()[:, None] * moments.weight[..., None]
        ).clamp_min(0)
        damage = damage + _FLOOR * damage.mean((1, 2), keepdim=True) + torch.finfo(torch.float64).tiny
        out = torch.einsum("hcd,hd->hc", damage, squared)
        back = torch.einsum("hdc,hd->hc", damage, 1 / squared)
        # The geometric mean of the old and the new value: the plain step oscillates.
        squared = (squared * (out / back).sqrt()).sqrt()
        squared = squared / squared.log().mean(-1, keepdim=True).exp()
        squared = squared.clamp(_LIMIT**-2, _LIMIT**2)
    return _mean(moments, squared).float(), squared.sqrt().float()


def _mean(moments: Moments, squared: torch.Tensor) -> torch.Tensor:
    total = (moments.weight / squared).sum(-1, keepdim=True)
    return torch.einsum("hcd,hc->hd", moments.first, 1 / squared) / total.clamp_min(torch.finfo(torch.float64).tiny)
