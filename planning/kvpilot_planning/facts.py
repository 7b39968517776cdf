"""What decides how much memory a model takes: the facts of its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Published = Literal["bfloat16", "fp8", "int4", "mxfp4"]


class PlanError(ValueError):
    """What was asked for cannot be planned; the message names the field, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class Model:
    """Architecture facts of one model; sizes in elements.

    Attributes:
        name: the model's name at its publisher, or the folder it was read from.
        layers: decoder layers with attention.
        parameters: all of them, embeddings included; None when the architecture cannot be counted from its config.
        max_positions: longest context in tokens, or None when the model does not say.
        sliding_layers: layers that attend to the last `window` tokens only.
        experts: experts in a layer (0: dense), of which a token uses `experts_per_token`; each has a hidden size of
            `expert_intermediate`. The first `dense_layers` layers have none.
        latent_dim: elements of a token's compressed cache entry under multi-head latent attention (0: plain
            attention).
        sinks: attention has sinks, which kvpilot's kernels do not serve.
        published: how the publisher stores the weights.
        weight_bytes: bytes of the weights found beside a config.json, or None.
        source: where the facts come from.
        doubt: what is not certain of these facts, for people.
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
    sinks: bool = False
    published: Published = "bfloat16"
    weight_bytes: int | None = None
    doubt: str = ""
    also: tuple[str, ...] = ()

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers - self.sliding_layers

    @property
    def embedding_parameters(self) -> int:
        """Elements of the input embedding and, unless tied, of the output projection; quantizers leave both alone."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def expert_parameters(self) -> int:
        """Elements of all experts, of three matrices each."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert_intermediate
