"""Properties of a model that decide the size of its KV cache and the formats that can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpilot_formats import formats
from kvpilot_formats import latent as latent_formats


class Kind(StrEnum):
    """State that a layer keeps for a sequence."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"
    OTHER = "other"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep keys and values of one size.

    Attributes:
        kind: FULL, WINDOW or CHUNKED.
        kv_heads, head_dim, value_dim: of a layer, in elements; values may be shorter than keys.
        window: largest number of tokens that a layer attends to, of its window or chunk; 0 for FULL.
    """

    kind: Kind
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """Model architecture; sizes in elements, lengths in tokens.

    Attributes:
        model_type, architectures: the names in config.json, of the whole model.
        groups: layers with their own KV cache, those that attend to everything first.
        heads: query heads of a layer.
        state_layers: layers with a state of fixed size (Mamba, linear attention, convolutions), including those that
            attend too.
        shared_layers: layers that read the cache of another layer.
        other_layers: layers whose cache is unknown here, and not counted.
        latent: elements that a token keeps in each layer under multi-head latent attention; 0 without.
        index_bytes: bytes of a token's index in each layer of sparse attention, in every dtype.
        softcap: the cap of attention's logits, or None.
        alibi, encoder_decoder: attention has biases by distance; the model has cross attention.
        bidirectional: tokens also attend to later ones, as in models for embeddings.
        image_prefix: the tokens of an image attend to each other both ways.
        custom_code: the repository brings its own model code (`auto_map`).
        max_positions: the longest context, or None if the model does not say.
        idle_window: the config has a window that is not shorter than the longest context; its layers count as full.
        auto: the dtype that vLLM makes of `auto`: `auto` for the model's own, or one that the checkpoint names.
        element_bytes: bytes of a KV element in the model's own dtype.
        doubt: uncertain facts, for people.
    """

    model_type: str
    architectures: tuple[str, ...]
    groups: tuple[Group, ...]
    heads: int
    state_layers: int = 0
    shared_layers: int = 0
    other_layers: int = 0
    latent: int = 0
    index_bytes: int = 0
    softcap: float | None = None
    alibi: bool = False
    encoder_decoder: bool = False
    bidirectional: bool = False
    image_prefix: bool = False
    custom_code: bool = False
    max_positions: int | None = None
    idle_window: bool = False
    auto: str = "auto"
    element_bytes: int = 2
    doubt: str = ""

    @property
    def layers(self) -> int:
        """Number of layers with their own KV cache."""
        return sum(group.layers for group in self.groups)

    @property
    def full_layers(self) -> int:
        """Number of these layers that attend to everything."""
        return sum(group.layers for group in self.groups if group.kind is Kind.FULL)

    @property
    def window_layers(self) -> int:
        """Number of these layers that have a sliding window. They stay in 16 bits with our dtypes."""
        return sum(group.layers for group in self.groups if group.kind is Kind.WINDOW)

    @property
    def chunked_layers(self) -> int:
        """Number of these layers that attend within chunks."""
        return sum(group.layers for group in self.groups if group.kind is Kind.CHUNKED)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layers that grow with a sequence, the largest if they differ; 0 without a cache."""
        return max((group.kv_heads for group in self._growing()), default=0)

    @property
    def head_dim(self) -> int:
        """Elements of a key in the layers that grow with a sequence, the largest if they differ; 0 without a cache."""
        return max((group.head_dim for group in self._growing()), default=0)

    def _growing(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind is Kind.FULL) or self.groups

    def token_bytes(self, dtype: str | formats.Format | latent_formats.LatentFormat, kept: int = 0) -> int:
        """Return the bytes of a token in the layers that grow with a sequence, in all KV heads.

        `kept` of these layers stay in the model's dtype. With latent attention only 16 bits, fp8 and the latent formats
        have a layout.

        Raises:
            FormatError: there is no such dtype, or it has no layout for these keys and values.
        """
        if isinstance(dtype, latent_formats.LatentFormat):
            return self.full_layers * dtype.row_bytes
        stored, total, left = dtype if isinstance(dtype, formats.Format) else formats.parse(dtype), 0, kept
        if stored.name == "auto":
            stored = formats.parse(self.auto)
        for group in self.groups:
            if group.kind is not Kind.FULL:
                continue
            wide = group.layers if stored.name == "auto" else min(left, group.layers)
            left -= wide
            if self.latent:
                own, small = self.latent * self.element_bytes, stored.key.row_bytes(self.latent)
            else:
                own = group.kv_heads * (group.head_dim + group.value_dim) * self.element_bytes
                small = group.kv_heads * _row_bytes(stored, group)
            total += wide * own + (group.layers - wide) * small + group.layers * self.index_bytes
        return total


def _row_bytes(stored: formats.Format, group: Group) -> int:
    """Return the bytes of a key and a value of one head."""
    if group.value_dim == group.head_dim:
        return stored.row_bytes(group.head_dim)
    return (stored.row_bytes(group.head_dim) + stored.row_bytes(group.value_dim)) // 2
