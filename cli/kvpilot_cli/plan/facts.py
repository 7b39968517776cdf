"""Architecture facts that decide the memory of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpilot_formats.models import Architecture, Group, Kind

Published = Literal["bfloat16", "fp8", "int4", "mxfp4"]


class PlanError(ValueError):
    """A request that cannot be planned. The message names the field, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class Model:
    """Architecture facts of one model; sizes in elements.

    Attributes:
      name: the model's name at its publisher, or the folder it was read from.
      layers: decoder layers with their own KV cache.
      parameters: number of parameters with embeddings, or None if config.json does not determine it.
      max_positions: longest context in tokens, or None if unknown.
      sliding_layers: layers that attend to the last `window` tokens or, if `chunked`, to a chunk of `window` tokens.
      window_kv_heads, window_head_dim: values of sliding layers, or 0 if they equal those of the other layers.
      state_layers, shared_layers: layers with a state of fixed size, and layers that read another layer's cache.
      experts, experts_per_token: experts in a layer (0: dense), and those that a token uses.
      expert_intermediate, dense_layers: hidden size of an expert, and number of first layers without experts.
      latent_dim: elements of a token's compressed entry under multi-head latent attention (0: plain attention).
      alibi, other_layers: biases by distance, and layers with an unknown cache. kvpilot serves neither.
      value_dim: elements of a value, or 0 if a value has as many as a key.
      auto: the KV-cache dtype that the checkpoint names for `auto`; else `auto`.
      published: format of the published weights.
      weight_bytes: bytes of the weights found beside a config.json, or None.
      uncounted: the reason why `parameters` is None, if it is not the architecture.
      doubt: uncertainty of these facts, for people.
      also: other names of models with exactly these facts.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool
    max_positions: int | None
    parameters: int | None
    source: str
    sliding_layers: int = 0
    window: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    latent_dim: int = 0
    alibi: bool = False
    auto: str = "auto"
    chunked: bool = False
    window_kv_heads: int = 0
    window_head_dim: int = 0
    value_dim: int = 0
    state_layers: int = 0
    shared_layers: int = 0
    other_layers: int = 0
    published: Published = "bfloat16"
    weight_bytes: int | None = None
    doubt: str = ""
    uncounted: str = ""
    also: tuple[str, ...] = ()

    @property
    def full_layers(self) -> int:
        """Return the number of layers that attend to the whole context."""
        return self.layers - self.sliding_layers

    def served(self, dtype: str) -> str:
        """Return the cache's dtype for a requested `dtype`. A checkpoint may define `auto`."""
        return self.auto if dtype == "auto" else dtype

    @property
    def architecture(self) -> Architecture:
        """Return the KV cache's facts as the shared package's Architecture."""
        full = Group(Kind.FULL, self.full_layers, self.kv_heads, self.head_dim, self.value_dim or self.head_dim)
        heads, dim = self.window_kv_heads or self.kv_heads, self.window_head_dim or self.head_dim
        kind = Kind.CHUNKED if self.chunked else Kind.WINDOW
        windows = Group(kind, self.sliding_layers, heads, dim, dim, self.window)
        return Architecture(
            model_type="",
            architectures=(),
            groups=tuple(group for group in (full, windows) if group.layers),
            heads=self.heads,
            state_layers=self.state_layers,
            shared_layers=self.shared_layers,
            other_layers=self.other_layers,
            latent=self.latent_dim,
            alibi=self.alibi,
            auto=self.auto,
        )

    @property
    def embedding_parameters(self) -> int:
        """Return the elements of the input embedding and, unless tied, the output projection. Quantizers keep both."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def expert_parameters(self) -> int:
        """Return the elements of all experts, with three matrices each."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert_intermediate
