"""Static per-channel factors of one layer's latent: a mean that all tokens share, and a scale.

A token is stored as x' = ((x - mean) * scale) H and read back with the inverse. Latent and RoPE part each have their
own Hadamard matrix H. The mean costs nothing at decode: q . mean is the same for every token, so the softmax ignores
it. An output contains the mean once, because probabilities sum to one. Queries and outputs are divided by the scale.
"""

from dataclasses import dataclass

import torch

from kvpilot_formats.latent import ENTRY


@dataclass(frozen=True)
class LatentFactors:
    """Mean and (positive) scale, each float32 [576]: 512 channels of the latent, then 64 of the RoPE part.

    Raises:
        ValueError: a tensor has another shape.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("mean", "scale"):
            if getattr(self, name).shape != (ENTRY,):
                raise ValueError(f"{name} is {tuple(getattr(self, name).shape)}; give one number for {ENTRY} channels")

    @classmethod
    def identity(cls, device: torch.device | str = "cpu") -> "LatentFactors":
        """Return identity factors: mean 0, scale 1."""
        return cls(torch.zeros(ENTRY, device=device), torch.ones(ENTRY, device=device))

    def to(self, device: torch.device | str) -> "LatentFactors":
        """Return the same factors on another device."""
        return LatentFactors(self.mean.to(device), self.scale.to(device))
