"""Static per-channel factors of one layer: what calibration knows about a model's keys and values.

A token is stored as

    k' = ((k - key_mean) * key_scale) H        v' = ((v - value_mean) * value_scale) H

and read back with the inverse. `key_mean` costs nothing at decode: q . key_mean is the same for every token, and the
softmax does not notice it, unless scores have a cap or it has an attention sink: then it is added to them. `key_scale`
divides the query, `value_scale` and `value_mean` touch only the output, since the probabilities sum to one, or to what
a sink leaves of it, by which the mean is weighed.

The first token of a sequence, at position 0, is an attention sink: whatever it is, its key lies far from all others,
and in most layers at the same place. So its key has a mean of its own, `key_first`, in place of `key_mean`, and a
decode step adds q . (key_first - key_mean) to this one token's score.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Factors:
    """Each float32 [kv_heads, head_dim]; scales are positive. Without `key_first` it is a copy of `key_mean`."""

    key_mean: torch.Tensor
    key_scale: torch.Tensor
    value_mean: torch.Tensor
    value_scale: torch.Tensor
    key_first: torch.Tensor = None  # type: ignore[assignment]  # never None after __post_init__

    def __post_init__(self) -> None:
        if self.key_first is None:
            object.__setattr__(self, "key_first", self.key_mean.clone())

    @classmethod
    def identity(cls, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> Factors:
        """Factors that change nothing: what a model without calibration gets."""
        zero = torch.zeros(kv_heads, head_dim, device=device)
        return cls(zero, zero + 1, zero.clone(), zero + 1)

    def of(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and scale of keys (`side="key"`) or values (`"value"`), but for the key at position 0."""
        return (self.key_mean, self.key_scale) if side == "key" else (self.value_mean, self.value_scale)

    def to(self, device: torch.device | str) -> Factors:
        """The same factors on another device."""
        return Factors(*(getattr(self, f.name).to(device) for f in fields(self)))

    def copy_(self, other: Factors) -> None:
        """Take over the numbers of others of the same shape, in place."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))
