"""Facts about a model's architecture that determine its memory."""

from dataclasses import dataclass
from typing import Literal

from kvpilot_formats.models import Architecture, Group, Kind

Published = Literal["bfloat16", "fp8", "int4", "mxfp4"]


class PlanError(ValueError):
    """Error for a request that cannot be planned. The message names the field, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class Model:
    """Facts about the architecture of one model. Sizes are in elements.

    Attributes:
      name: the model's name at its publisher, or the folder that it was read from.
      layers: decoder layers with their own KV cache.
      parameters: number of parameters with embeddings, or None if config.json does not determine it.
      max_positions: longest context in tokens, or None if unknown.
      sliding_layers: layers that attend to the last `window` tokens or, if `chunked`, to a chunk of `window` tokens.
      window_kv_heads, window_head_dim: KV heads and head_dim of sliding layers, or 0 if they equal those of other
        layers.
      state_layers, shared_layers: layers with a state of fixed size, and layers that use another layer's cache.
      experts, experts_per_token: experts in a layer (0 for a dense model), and experts that a token uses.
      expert_intermediate, dense_layers: hidden size of an expert, and number of first layers without experts.
      latent_dim: elements that a token caches under multi-head latent attention (0 for other attention).
      alibi: True for ALiBi, which engines refuse.
      value_dim: elements of a value, or 0 if a value has as many as a key.
      auto: KV-cache dtype that the checkpoint selects for `auto`, or `auto` if it selects none.
      published: format of the published weights.
      weight_bytes: bytes of the weight files beside config.json, or None.
      uncounted: the reason why `parameters` is None, unless the architecture is the reason.
      doubt: text about facts that may be wrong, shown to users.
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
        """Return the KV-cache dtype that serves if `dtype` is requested: the same, or the checkpoint's for `auto`."""
        return self.auto if dtype == "auto" else dtype

    @property
    def architecture(self) -> Architecture:
        """Return the facts about the KV cache as an `Architecture` of the formats package."""
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
            latent=self.latent_dim,
            alibi=self.alibi,
            auto=self.auto,
        )

    @property
    def embedding_parameters(self) -> int:
        """Return the elements of the input embedding and, if not tied, the output projection.

        Weight quantizers keep these in 16 bits.
        """
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def expert_parameters(self) -> int:
        """Return the elements of all experts. Each expert has three matrices."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert_intermediate
