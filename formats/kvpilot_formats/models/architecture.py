"""Properties of a model that decide the size of its KV cache and the formats that can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpilot_formats import formats
from kvpilot_formats import latent as latent_formats


class Kind(StrEnum):
    """Kind of state that a layer keeps for a sequence."""

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
        layers: number of layers.
        kv_heads: KV heads of a layer.
        head_dim, value_dim: elements of a head's key and of its value, which may be shorter.
        window: length of the window or chunk in tokens; 0 for FULL.
    """

    kind: Kind
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """Model architecture, as far as it affects the KV cache.

    Attributes:
        model_type, architectures: the names in config.json, of the whole model.
        groups: layers with their own KV cache, those with full attention first.
        heads: query heads of a layer.
        state_layers: layers with a state of fixed size (Mamba, linear attention, convolutions). They may also attend.
        shared_layers: layers that read the cache of another layer.
        other_layers: layers with an unknown kind of cache, which is not counted.
        latent: elements that a layer with multi-head latent attention caches per token; 0 without it.
        index_bytes: bytes of a token's index in a layer with sparse attention, the same in every dtype; 0 without.
        softcap: cap on attention logits, or None.
        alibi: True if attention has biases by distance.
        encoder_decoder: True if the model has cross attention.
        bidirectional: True if tokens also attend to later tokens, as in embedding models.
        image_prefix: True if the tokens of an image attend to each other in both directions.
        custom_code: True if the repository brings its own model code (`auto_map`).
        max_positions: longest context in tokens; None if the config does not say.
        idle_window: True if no context is longer than the sliding window. Its layers then count as full attention.
        auto: KV-cache dtype that vLLM chooses for `auto`; `auto` itself means the model's own dtype.
        element_bytes: bytes of a KV element in the model's own dtype.
        doubt: message for people about uncertain facts; empty if there are none.
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
        """Number of layers with their own KV cache and full attention."""
        return sum(group.layers for group in self.groups if group.kind is Kind.FULL)

    @property
    def window_layers(self) -> int:
        """Number of layers with their own KV cache and a sliding window. Our dtypes leave them in 16 bits."""
        return sum(group.layers for group in self.groups if group.kind is Kind.WINDOW)

    @property
    def chunked_layers(self) -> int:
        """Number of layers with their own KV cache and chunked attention."""
        return sum(group.layers for group in self.groups if group.kind is Kind.CHUNKED)

    @property
    def kv_heads(self) -> int:
        """Largest number of KV heads of layers with full attention, else of all layers; 0 without a cache."""
        return max((group.kv_heads for group in self._growing()), default=0)

    @property
    def head_dim(self) -> int:
        """Largest key dimension of layers with full attention, else of all layers; 0 without a cache."""
        return max((group.head_dim for group in self._growing()), default=0)

    def _growing(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind is Kind.FULL) or self.groups

    def token_bytes(self, dtype: str | formats.Format | latent_formats.LatentFormat, kept: int = 0) -> int:
        """Return the bytes that a token adds to the cache of all layers with full attention, over all KV heads.

        Args:
            dtype: KV-cache dtype. For multi-head latent attention: 16 bits, fp8 or a latent format.
            kept: number of full layers that stay in the model's own dtype.

        Raises:
            FormatError: the dtype is unknown, or has no layout for these keys and values.
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
    """Return the bytes of one head's key and value."""
    if group.value_dim == group.head_dim:
        return stored.row_bytes(group.head_dim)
    return (stored.row_bytes(group.head_dim) + stored.row_bytes(group.value_dim)) // 2
