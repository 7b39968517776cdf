"""Static per-channel factors of one layer, from calibration.

A token's key k and value v are stored as

    k' = ((k - key_mean) * key_scale) H        v' = ((v - value_mean) * value_scale) H

with a Hadamard matrix H, and read back with the inverse. Decode divides the query q by `key_scale`. It divides the
output by `value_scale` and adds `value_mean`, because probabilities sum to one. With a learned sink logit
(`kvpilot_kernels.softmax`) they sum to less than one, and `value_mean` is multiplied by their sum. `key_mean` costs
nothing: q . key_mean is the same for every token, so the softmax ignores it. Scores include it only with a soft cap or
a sink logit.

The first token of a sequence gets much attention in any text. Its key is far from all others, and in most layers about
the same in every text. So the key at position 0 has its own mean, `key_first`, in place of `key_mean`. A decode step
adds q . (key_first - key_mean) to the score of this token.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Factors:
    """Means and (positive) scales, each float32 [kv_heads, head_dim]. `key_first` defaults to `key_mean`."""

    key_mean: torch.Tensor
    key_scale: torch.Tensor
    value_mean: torch.Tensor
    value_scale: torch.Tensor
    key_first: torch.Tensor = None  # type: ignore[assignment]  # never None after __post_init__

    def __post_init__(self) -> None:
        if self.key_first is None:
            object.__setattr__(self, "key_first", self.key_mean.clone())

    @classmethod
    def identity(cls, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> "Factors":
        """Return identity factors (mean 0, scale 1), for a model without calibration."""
        zero = torch.zeros(kv_heads, head_dim, device=device)
        return cls(zero, zero + 1, zero.clone(), zero + 1)

    def of(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and scale of keys (`side="key"`) or values (`"value"`). Position 0 has the mean `key_first`."""
        return (self.key_mean, self.key_scale) if side == "key" else (self.value_mean, self.value_scale)

    def to(self, device: torch.device | str) -> "Factors":
        """Return the same factors on another device."""
        return Factors(*(getattr(self, f.name).to(device) for f in fields(self)))

    def copy_(self, other: "Factors") -> None:
        """Overwrite these factors in place with others of the same shape."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))
