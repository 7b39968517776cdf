"""Fits a layer's static factors to what a model shows on calibration text: the least expected damage of quantization.

With gradients (`Moments`, `fit`; `kvpilot calibrate`)
------------------------------------------------------
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

From a forward pass alone (`Sums`; what an engine does by itself at start)
--------------------------------------------------------------------------
Without gradients, what a key's error costs is told by the queries: channel c of it is multiplied by q_c. With the first
tokens left out, which are unlike all others,

    m = E[k]        s_c = (mean over the group's query heads of E[q_c^2] / var(k_c))^(1/4)

for keys, and s_c = (1 / var(v_c))^(1/4) without a mean for values.

RoPE turns a channel's mean with the position, and one static mean has to serve all of them. A token at position p
counts 1 / (1 + p / HALF): up to HALF all tokens count about alike, and beyond it every doubling of the context does.
"""

from __future__ import annotations

import torch

from kvpilot_kernels.factors import Factors

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


SINKS = 4
"""Tokens at the start of a sequence that `Sums` leaves out: attention sinks, unlike all others."""

HALF = 1024
"""The position at which a token counts half of what the first ones do in `Sums`."""


class Sums:
    """Weighted sums over tokens of q^2, k, k^2, v and v^2 for one layer, float64 [kv_heads, D] each."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(5, kv_heads, head_dim, dtype=torch.float64, device=device)
        self._weight = 0.0

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Count the tokens of one sequence from its start, as attention sees them (after RoPE).

        Args:
            query: [tokens, heads, D], any float dtype; heads is a multiple of kv_heads, grouped as in attention.
            key, value: [tokens, kv_heads, D].

        Raises:
            ValueError: the shapes do not fit each other or this layer.
        """
        kv_heads, dim = self._sums.shape[1:]
        if key.shape != value.shape or key.shape[1:] != (kv_heads, dim) or query.shape[1] % kv_heads:
            raise ValueError(
                f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit a "
                f"layer of [tokens, {kv_heads}, {dim}]; give one layer's"
            )
        q, k, v = (x[SINKS:].double() for x in (query, key, value))
        positions = torch.arange(SINKS, SINKS + k.shape[0], dtype=torch.float64, device=k.device)
        weight = 1 / (1 + positions / HALF)

        def total(x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("t,thc->hc", weight, x)

        q2 = total(q.square()).view(kv_heads, -1, dim).mean(1)
        self._sums += torch.stack([q2, total(k), total(k.square()), total(v), total(v.square())])
        self._weight += float(weight.sum())

    def still(self) -> int:
        """Channels of keys and values that never moved: their scale is that of the floor."""
        _, k, k2, v, v2 = self._sums
        rounding = 1e-12 / max(self._weight, 1e-12)
        return sum(int((self._variance(x, x2) <= rounding * x2).sum()) for x, x2 in ((k, k2), (v, v2)))

    def factors(self) -> Factors:
        """The layer's factors, float32; scales have the geometric mean 1 per head.

        Raises:
            ValueError: a sum is not finite, or nothing was counted.
        """
        if not self._weight:
            raise ValueError(f"no token after the first {SINKS} was counted; give longer text")
        for name, x in zip(("queries", "keys", "keys", "values", "values"), self._sums, strict=True):
            if not x.isfinite().all():
                raise ValueError(f"{name} are not finite in {int((~x.isfinite()).sum())} channels")
        q2, k, k2, v, v2 = self._sums
        ones = torch.ones_like(q2)
        return Factors(
            (k / self._weight).float(), self._scale(q2 / self._weight, self._variance(k, k2)),
            torch.zeros_like(k).float(), self._scale(ones, self._variance(v, v2)),
        )  # fmt: skip

    def _variance(self, x: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        return x2 / self._weight - (x / self._weight).square()

    @staticmethod
    def _scale(weight: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """(weight / variance)^(1/4), each with a floor of its head's mean, so that a still channel counts too."""
        tiny = torch.finfo(torch.float64).tiny
        weight, variance = (
            x.clamp_min(0) + _FLOOR * x.clamp_min(0).mean(-1, keepdim=True) + tiny for x in (weight, variance)
        )
        log = (weight.log() - variance.log()) / 4
        log = log - log.mean(-1, keepdim=True)
        limit = float(torch.tensor(_LIMIT).log())
        return log.clamp(-limit, limit).exp().float()
