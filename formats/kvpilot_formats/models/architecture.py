"""Properties of a model that determine the size of its KV cache, or that our dtypes do not support."""

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
    """Group of layers whose keys and values have the same size."""

    kind: Kind
    """FULL, WINDOW or CHUNKED."""
    layers: int
    kv_heads: int
    head_dim: int
    """Number of elements of a key. A value (`value_dim`) may be shorter."""
    value_dim: int
    window: int = 0
    """Length of the window or chunk in tokens; 0 for FULL."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of a model's architecture that affect its KV cache."""

    model_type: str
    architectures: tuple[str, ...]
    groups: tuple[Group, ...]
    """Groups of layers that have their own KV cache. Groups with full attention come first."""
    heads: int
    """Query heads of a layer."""
    state_layers: int = 0
    """Layers with a state of fixed size (Mamba, linear attention, convolutions). They may also attend."""
    shared_layers: int = 0
    """Layers that read the cache of another layer."""
    other_layers: int = 0
    """Layers with an unknown kind of cache, which is not counted."""
    latent: int = 0
    """Number of elements that a layer with multi-head latent attention caches per token; 0 for other attention."""
    index_bytes: int = 0
    """Bytes of a token's index in a layer with sparse attention, whatever the dtype; 0 without such layers."""
    softcap: float | None = None
    """Cap on attention logits."""
    alibi: bool = False
    encoder_decoder: bool = False
    bidirectional: bool = False
    """True if tokens also attend to later tokens, as in embedding models."""
    custom_code: bool = False
    """True if the repository brings its own model code (`auto_map`)."""
    max_positions: int | None = None
    """Longest context in tokens; None if the config does not say."""
    idle_window: bool = False
    """True if no context is longer than the sliding window. Layers with this window then count as full attention."""
    auto: str = "auto"
    """KV-cache dtype that vLLM uses for `auto`. The value `auto` stands for the model's own dtype."""
    element_bytes: int = 2
    """Bytes of a KV element in the model's own dtype."""
    doubt: str = ""
    """Message to users about facts that are uncertain; empty if there are none."""

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
        """Return how many bytes a token takes in the cache of all layers with full attention, over all KV heads.

        Raise FormatError if the dtype is unknown, or has no layout for these keys and values.

        Args:
            dtype: for multi-head latent attention, a dtype of 16 bits, fp8 or a latent format.
            kept: number of these layers that stay in the model's own dtype.
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
    """Return the bytes of one head's key and value for one token."""
    if group.value_dim == group.head_dim:
        return stored.row_bytes(group.head_dim)
    return (stored.row_bytes(group.head_dim) + stored.row_bytes(group.value_dim)) // 2


def unsupported(model: Architecture) -> str | None:
    """Name a property of this model that our dtypes do not support, or return None."""
    ours = [group for group in model.groups if group.kind is not Kind.WINDOW]
    sizes = {size for group in ours for size in (group.head_dim, group.value_dim)}
    odd = sorted(size for size in sizes if formats.stored_dim(size) is None)
    found = (
        (model.latent, "multi-head latent attention"),
        (model.encoder_decoder, "encoder-decoder models"),
        (model.alibi, "ALiBi"),
        (model.bidirectional, "attention to later tokens (a bidirectional model)"),
        (not model.layers and not model.other_layers, "a model without attention: there is no KV cache to quantize"),
        (model.other_layers, "layers whose cache is neither keys and values nor a state"),
        (model.layers and not ours, "a model whose layers all have a sliding window: they stay in 16 bits"),
        (odd, f"head_dim {odd[-1] if odd else 0} (it takes {formats.SERVED})"),
        (len(sizes) > 1 and _unlike_values(model), "keys and values of different sizes"),
    )
    return next((what for present, what in found if present), None)


def unsupported_latent(model: Architecture) -> str | None:
    """Name a property of this model that our latent dtypes do not support, or return None."""
    found = (
        (not model.latent, "a model without multi-head latent attention"),
        (model.index_bytes, "sparse attention with an index, as in DeepSeek V3.2"),
        (
            model.latent != latent_formats.ENTRY,
            f"entries of {model.latent} elements (they take {latent_formats.ENTRY}: {latent_formats.RANK} of a latent, "
            f"{latent_formats.ROPE} with RoPE)",
        ),
        (
            model.state_layers or model.layers != model.full_layers or model.other_layers,
            "layers with states or windows beside those with latents",
        ),
    )
    return next((what for present, what in found if present), None)


def _unlike_values(model: Architecture) -> bool:
    return any(group.kind is Kind.FULL and group.value_dim != group.head_dim for group in model.groups)
