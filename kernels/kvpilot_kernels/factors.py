"""Static per-channel factors of one layer: what calibration knows about a model's keys and values.

A token is stored as

    k' = ((k - key_mean) * key_scale) H        v' = ((v - value_mean) * value_scale) H

and read back with the inverse. `key_mean` costs nothing at decode: q . key_mean is the same for every token, and the
softmax does not notice it. `key_scale` divides the query, `value_scale` and `value_mean` touch only the output, since
the probabilities sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Factors:
    """Each float32 [kv_heads, head_dim]; scales are positive."""

    key_mean: torch.Tensor
    key_scale: torch.Tensor
    value_mean: torch.Tensor
    value_scale: torch.Tensor

    @classmethod
    def identity(cls, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> Factors:
        """Factors that change nothing: what a model without calibration gets."""
        zero = torch.zeros(kv_heads, head_dim, device=device)
        return cls(zero, zero + 1, zero.clone(), zero + 1)

    def of(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and scale of keys (`side="key"`) or values (`"value"`)."""
        return (self.key_mean, self.key_scale) if side == "key" else (self.value_mean, self.value_scale)

    def to(self, device: torch.device | str) -> Factors:
        """The same factors on another device."""
        return Factors(*(x.to(device) for x in (self.key_mean, self.key_scale, self.value_mean, self.value_scale)))

    def copy_(self, other: Factors) -> None:
        """Take over the numbers of others of the same shape, in place."""
        for name in ("key_mean", "key_scale", "value_mean", "value_scale"):
            getattr(self, name).copy_(getattr(other, name))
