"""Fit a layer's static factors to calibration text, so that quantization changes attention outputs least.

Let x_t be the key (or value) of token t, with D channels c, and g_tc^2 the cost of an error in channel c. We look for a
mean m_c and a scale s_c for each channel. A Hadamard rotation spreads the energy of (x_t - m) s evenly over the D
coordinates. In each of them the quantizer leaves an error with a variance proportional to

    v_t = sum_c' s_c'^2 (x_tc' - m_c')^2 / D

When the token is read back, this becomes an error of variance v_t / s_c^2 in channel c. So

    damage(m, s) ~ sum_t (sum_c g_tc^2 / s_c^2) (sum_c' s_c'^2 (x_tc' - m_c')^2)

We minimise the damage alternately for m and for s, each in closed form. m_c' is the mean of x_tc' over t, with the
weights sum_c g_tc^2 / s_c^2. With M_cc' = sum_t g_tc^2 (x_tc' - m_c')^2,

    s_c^4 = (sum_c' M_cc' s_c'^2) / (sum_c' M_c'c / s_c'^2)

The costs follow from attention itself. Let p_it be the probability that query q_i gives to token t, V_t the token's
value, and o_i the output of the query. An error e of the key of token t changes the score by q_i . e, and o_i by
p_it (V_t - o_i) times that. An error e of the value changes o_i by p_it e. If errors in all
directions of the output cost the same,

    g_tc^2 ~ sum_i p_it^2 |V_t - o_i|^2 q_ic^2   for keys         g_tc^2 ~ sum_i p_it^2   for values

The sum is over the queries at least RECENT tokens after token t, which read it from its page. Nearer queries read it
with 8 bits, because it is in their recent window.

The costs matter: the value of the first token is far from all others, and most queries attend to it. With a mean that
ignores costs, its error would double. The first key of a sequence has its own mean (`factors`), so the fit leaves it
out.
"""

import torch

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.softmax import softmax

_ROUNDS = 60
_LIMIT = 16.0  # largest ratio of a scale to the geometric mean of all scales of its head
# This share of the mean entry of M is added to all entries, so that channels without variance get a finite scale.
_FLOOR = 1e-3


class Moments:
    """Sums over the tokens of one layer, in float64. The symbols x, g and c are those of this module's docstring.

    Attributes:
        weight: [kv_heads, D], sum of g_c^2.
        first: [kv_heads, D, D], sum of g_c^2 x_c'.
        second: [kv_heads, D, D], sum of g_c^2 x_c'^2.
        tokens: number of added tokens.
    """

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.weight = zeros(kv_heads, head_dim)
        self.first = zeros(kv_heads, head_dim, head_dim)
        self.second = zeros(kv_heads, head_dim, head_dim)
        self.tokens = 0

    def add(self, x: torch.Tensor, squared: torch.Tensor) -> None:
        """Add tokens: keys (or values) and the costs g^2 of their errors, both [tokens, kv_heads, D], any float dtype.

        Raises:
            ValueError: the shapes differ from each other or from this layer's, or a number is not finite.
        """
        if x.shape != squared.shape or x.shape[1:] != self.weight.shape:
            raise ValueError(
                f"tokens {tuple(x.shape)} with costs {tuple(squared.shape)} do not fit moments of "
                f"[tokens, {self.weight.shape[0]}, {self.weight.shape[1]}]; give one layer's keys or values"
            )
        x, g2 = x.double(), squared.double()
        weight = g2.sum(0)
        second = torch.einsum("thc,thd->hcd", g2, x.square())
        if not (weight.isfinite().all() and second.isfinite().all()):
            raise ValueError("keys, values or costs are not finite; calibrate in float32 or bfloat16")
        self.weight += weight
        self.first += torch.einsum("thc,thd->hcd", g2, x)
        self.second += second
        self.tokens += x.shape[0]


def fit(moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and scale that minimise damage, float32 [kv_heads, D]. A head's scales have geometric mean 1."""
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
        # Use the geometric mean of the old and the new value, because the plain iteration oscillates.
        squared = (squared * (out / back).sqrt()).sqrt()
        squared = squared / squared.log().mean(-1, keepdim=True).exp()
        squared = squared.clamp(_LIMIT**-2, _LIMIT**2)
    return _mean(moments, squared).float(), squared.sqrt().float()


def _mean(moments: Moments, squared: torch.Tensor) -> torch.Tensor:
    total = (moments.weight / squared).sum(-1, keepdim=True)
    return torch.einsum("hcd,hc->hd", moments.first, 1 / squared) / total.clamp_min(torch.finfo(torch.float64).tiny)


RECENT = 64
"""Distance in tokens below which `Observed` ignores a query, because the query reads the key from its recent window.

It is the smallest default window of all dtypes. It is the same for all dtypes, so that a model has one set of factors.
"""

_SCORES = 2**24  # number of float32 scores in memory at once: 64 MiB in each of a few arrays


class Observed:
    """Statistics of a layer's attention in one forward pass. The method `factors` fits the layer's factors to them."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self._key, self._value = (Moments(kv_heads, head_dim, device) for _ in range(2))
        self._first = torch.zeros(kv_heads, head_dim, dtype=torch.float64, device=device)
        self._sequences = 0
        self._broken = ""

    def add_first(self, key: torch.Tensor) -> None:
        """Add keys at position 0 of sequences: [sequences, kv_heads, D], any float dtype."""
        self._note_broken(("keys", key))
        self._first += key.double().sum(0)
        self._sequences += key.shape[0]

    def add(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float = 0.0,
        sliding_window: int | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add one sequence with causal attention. Leave out its first key, which has its own mean.

        Args:
            query: [tokens, heads, D], after RoPE, any float dtype; heads is a multiple of kv_heads.
            key, value: [tokens, kv_heads, D], keys after RoPE.
            scale: factor on the scores.
            softcap: 0 for none.
            sliding_window: number of last tokens that a query attends to; None for all.
            sinks: [heads], logits of attention sinks, which take part of the softmax weight but have no value; None
                without sinks.

        Raises:
            ValueError: the shapes do not fit each other or this layer.
        """
        kv_heads, dim = self._key.weight.shape
        if key.shape != value.shape or key.shape[1:] != (kv_heads, dim) or query.shape[1] % kv_heads:
            raise ValueError(
                f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit a "
                f"layer of [tokens, {kv_heads}, {dim}]; give the queries, keys and values of one layer"
            )
        self._note_broken(("queries", query), ("keys", key), ("values", value))
        if self._broken:
            return
        group = query.shape[1] // kv_heads
        weights = [
            _information(query[:, i * group : (i + 1) * group].float(), key[:, i].float(), value[:, i].float(), scale,
                         softcap, sliding_window, None if sinks is None else sinks[i * group : (i + 1) * group].float())
            for i in range(kv_heads)
        ]  # fmt: skip
        self._key.add(key[1:], torch.stack([k for k, _ in weights], 1)[1:])
        self._value.add(value, torch.stack([v for _, v in weights], 1)[..., None].expand(value.shape))

    @property
    def tokens(self) -> int:
        """Number of added tokens, without the first token of each sequence."""
        return self._key.tokens

    def factors(self) -> Factors:
        """Return the layer's factors, float32. A head's scales have geometric mean 1.

        Without a call of `add_first`, `key_first` is the mean of the other keys.

        Raises:
            ValueError: queries, keys or values were not finite, or nothing was added.
        """
        if self._broken:
            raise ValueError(self._broken)
        if not self._key.tokens:
            raise ValueError("no token was counted; give text")
        key = fit(self._key)
        first = (self._first / self._sequences).float() if self._sequences else key[0].clone()
        return Factors(*key, *fit(self._value), first)

    def _note_broken(self, *read: tuple[str, torch.Tensor]) -> None:
        for name, x in read:
            if not self._broken and not x.isfinite().all():
                self._broken = f"{name} are not finite in {int((~x.isfinite()).any(0).sum())} channels"


def _information(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return g^2, as the module's docstring defines it, of one KV head's keys, [tokens, D], and values, [tokens].

    `query` is [tokens, query heads of the KV head, D].
    """
    tokens = key.shape[0]
    recent = min(RECENT, tokens // 8)
    for_key, for_value = torch.zeros_like(key), torch.zeros_like(key[:, 0])
    rows = max(1, _SCORES // (tokens * query.shape[1]))
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        q, k, v = query[start:end].transpose(0, 1), key[:end], value[:end]
        ago = torch.arange(start, end, device=key.device)[:, None] - torch.arange(end, device=key.device)
        scores = q @ k.T * scale
        slope: torch.Tensor | float = 1.0
        if softcap:
            capped = (scores / softcap).tanh()
            scores, slope = capped * softcap, (1 - capped.square()).square()
        hidden = ago < 0 if window is None else (ago < 0) | (ago >= window)
        p = softmax(scores.masked_fill(hidden, -torch.inf), None if sinks is None else sinks[:, None, None])
        out = p @ v
        p2 = p.square().masked_fill(ago < recent, 0)
        for_value[:end] += p2.sum((0, 1))
        off = out.square().sum(-1, keepdim=True) + v.square().sum(-1) - 2 * out @ v.T
        for_key[:end] += torch.einsum("hit,hic->tc", p2 * off.clamp_min(0) * slope, q.square())
    return for_key, for_value
