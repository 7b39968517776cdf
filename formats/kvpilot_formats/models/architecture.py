"""The facts of a model that decide how large its KV cache is and which formats can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpilot_formats import formats
from kvpilot_formats import latent as latent_formats


class Kind(StrEnum):
    """What a layer keeps of a sequence."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"
    SHARED = "shared"
    OTHER = "other"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep keys and values of one size.

    Attributes:
        kind: FULL, WINDOW or CHUNKED.
        kv_heads, head_dim, value_dim: of a layer, in elements; values may be shorter than keys.
        window: tokens that a layer attends to at most: of its window, or of its chunk; 0 for FULL.
    """

    kind: Kind
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model; sizes in elements, lengths in tokens.

    Attributes:
        model_type, architectures: as config.json names them, of the whole model.
        groups: layers with a KV cache of their own, those that attend to everything first.
        heads: query heads of a layer.
        state_layers: layers with a state of fixed size (Mamba, linear attention, convolutions), those counted that
            attend too.
        shared_layers: layers that read the cache of another layer.
        other_layers: layers whose cache is not known here, and not counted.
        latent: elements that a token keeps in each layer under multi-head latent attention; 0 without.
        index_bytes: bytes that a token's index takes in each layer of sparse attention, whatever the dtype.
        softcap: the cap of attention's logits, or None.
        alibi, encoder_decoder: attention has biases by distance; the model has cross attention.
        bidirectional: tokens attend to those after them, too, as in models for embeddings.
        image_prefix: the tokens of an image do, among themselves.
        custom_code: the repository brings its own model code (`auto_map`).
        max_positions: the longest context, or None when the model does not say.
        idle_window: the config has a window that is no shorter than the longest context; its layers count as full.
        auto: the dtype that vLLM makes of `auto`: `auto` for the model's own, or one that the checkpoint says.
        element_bytes: bytes of a KV element in the model's own dtype.
        doubt: what is not certain of these facts, for people.
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
        """Layers with a KV cache of their own."""
        return sum(group.layers for group in self.groups)

    @property
    def full_layers(self) -> int:
        """Of these, those that attend to everything."""
        return sum(group.layers for group in self.groups if group.kind is Kind.FULL)

    @property
    def window_layers(self) -> int:
        """Of these, those with a sliding window, which stay in 16 bits beside our dtypes."""
        return sum(group.layers for group in self.groups if group.kind is Kind.WINDOW)

    @property
    def chunked_layers(self) -> int:
        """Of these, those that attend within chunks."""
        return sum(group.layers for group in self.groups if group.kind is Kind.CHUNKED)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layers that grow with a sequence, the most where they differ; 0 without a cache."""
        return max((group.kv_heads for group in self._growing()), default=0)

    @property
    def head_dim(self) -> int:
        """Elements of a key in the layers that grow with a sequence, the most where they differ; 0 without a cache."""
        return max((group.head_dim for group in self._growing()), default=0)

    def _growing(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind is Kind.FULL) or self.groups

    def token_bytes(self, dtype: str | formats.Format | latent_formats.LatentFormat, kept: int = 0) -> int:
        """Bytes of a token in the layers that grow with a sequence, in all KV heads.

        `kept` of these layers stay in the model's dtype. Under latent attention 16 bits, fp8 and formats of latents are
        laid out.

        Raises:
            FormatError: no such dtype, or it has no layout for these keys and values.
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
    """Of a key and a value of one head."""
    if group.value_dim == group.head_dim:
        return stored.row_bytes(group.head_dim)
    return (stored.row_bytes(group.head_dim) + stored.row_bytes(group.value_dim)) // 2
