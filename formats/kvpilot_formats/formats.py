"""KV-cache formats: names, bits and groups. Pure Python, so that the operator can import it.

A format stores the key and the value of one token and KV head as codes, integers of a fixed width. Groups of elements
also have metadata, such as a scale. kvpilot's own formats have the byte layout of `layouts`. The others are vLLM's, and
only their sizes are described here.

To add a dtype with keys and values of 2, 4 or 8 bits, add a row to `FORMATS` and run `make generate`. Kernels,
backends, API, forecasts and docs/formats.md follow from the row. tests/unit/test_dtype_table.py names what it lacks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from kvpilot_formats import layouts
from kvpilot_formats.layouts import PageLayout, ResidualLayout

_Dtype = TypeVar("_Dtype")
_Read = tuple[float | None, float | None]
_UNREAD: _Read = (None, None)

HEAD_DIMS = (64, 96, 128, 192, 256, 512)
"""Head dimensions for which kvpilot's own formats have a layout. Other heads are padded to the next larger one."""

SERVED = "multiples of 8 from 48 to 256 and from 344 to 512"
"""Head dimensions that `stored_dim` accepts, as text for messages."""

RECENT_CHOICES = (0, 64, 128, 256, 512)
"""Numbers of tokens that a recent window may have; 0 means no window."""
ALL = "all"
"""Value in place of a number: the default window. While memory is free, older tokens are read with 8 bits, too."""


class FormatError(ValueError):
    """Error for an argument that a format cannot handle. The message names field, value and remedy."""


class UnknownFormatError(FormatError):
    """Error for an unknown KV-cache dtype."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"kv-cache dtype {name[:80]!r} is not known; use one of: {', '.join(known)}")


class UnsupportedHeadDimError(FormatError):
    """Error for a head dimension that a format cannot store."""

    def __init__(self, format_name: str, head_dim: int) -> None:
        super().__init__(f"head_dim {head_dim} is not supported by kv-cache dtype {format_name!r}, which takes "
                         f"{SERVED}; use 'auto' or 'fp8' for this model")  # fmt: skip


def stored_dim(head_dim: int) -> int | None:
    """Return the smallest of `HEAD_DIMS` that holds a head of `head_dim` elements; the rest is padded with zeros.

    Return None if a third of the row or more would be padding. Also return None if `head_dim` is not a multiple of 8,
    because the kernels load multiples of 16 bytes.
    """
    wide = next((dim for dim in HEAD_DIMS if dim >= head_dim), 0)
    return wide if head_dim % 8 == 0 and 3 * head_dim > 2 * wide > 0 else None


@dataclass(frozen=True)
class Side:
    """Storage of one vector: a key or a value of one token and KV head."""

    bits: int
    """Bits of an element's code."""
    metadata_bytes: int = 0
    """Bytes of scale and zero point per group of elements."""
    group: int | None = None
    """Number of elements that share metadata; None means the whole vector."""

    @property
    def digits(self) -> int:
        """Number of additional digits, of `bits` bits each, that refine a code to 8 bits; 0 for codes of 8 bits."""
        return 8 // self.bits - 1

    def row_bytes(self, head_dim: int) -> int:
        """Return the size in bytes of one vector with its metadata."""
        groups = 1 if self.group is None else -(-head_dim // self.group)
        return -(-head_dim * self.bits // 8) + groups * self.metadata_bytes


@dataclass(frozen=True)
class Format:
    """KV-cache dtype of keys and values. `latent.LatentFormat` describes those of multi-head latent attention."""

    name: str
    """The value of `--kv-cache-dtype`."""
    key: Side
    value: Side
    """Storage of a value. `group` of `key` and `value` is right only for head dimensions that are multiples of 64.

    `group_size` is right for all head dimensions.
    """
    ours: bool = False
    """True for kvpilot's own formats, False for vLLM's."""
    window: int = 0
    """Default size of the recent window in tokens, one of `RECENT_CHOICES`; 0 for none."""
    calibrated_only: bool = False
    """True if the format is inaccurate without calibration factors. Engines then refuse to start without factors."""
    read: _Read = _UNREAD
    """Shares of a GPU's peak bandwidth at which decode attention reads the cache, at head_dim 128 and 256.

    None if not measured (benchmarks/kernels/decode.py).
    """
    latent: ClassVar[bool] = False

    def row_dim(self, head_dim: int) -> int:
        """Return `stored_dim`, the number of elements of a head's stored row.

        Raise UnsupportedHeadDimError if the format is not ours, or heads of this dimension are not stored.
        """
        wide = stored_dim(head_dim) if self.ours else None
        if wide is None:
            raise UnsupportedHeadDimError(self.name, head_dim)
        return wide

    def group_size(self, head_dim: int) -> int:
        """Return how many elements of a stored row share a scale: 64, or 48 in rows of 96 and 192."""
        return 64 if self.row_dim(head_dim) % 3 else 48

    def groups(self, head_dim: int) -> int:
        """Return the number of groups, and so of scales, in a stored row."""
        return self.row_dim(head_dim) // self.group_size(head_dim)

    def row_bytes(self, head_dim: int) -> int:
        """Return the size in bytes of one token's key and value in one KV head, with all metadata.

        Raise FormatError if head_dim is not positive, or if the format is ours and cannot store such heads.
        """
        if head_dim <= 0:
            raise FormatError(f"head_dim {head_dim} is not a dimension; give the model's head_dim, such as 128")
        if self.ours:
            return self.row_dim(head_dim) * (self.key.bits + self.value.bits) // 8 + 2 * 2 * self.groups(head_dim)
        return self.key.row_bytes(head_dim) + self.value.row_bytes(head_dim)

    def bits_per_element(self, head_dim: int = 128) -> float:
        """Return the mean number of stored bits per element of keys and values, with scale, zero point and padding."""
        return self.row_bytes(head_dim) * 8 / (2 * head_dim)

    def read_share(self, head_dim: int) -> float | None:
        """Return the share of peak bandwidth at which decode attention reads heads of this size; None if unknown."""
        return self.read[head_dim > 128]

    def page_layout(self, head_dim: int, block_size: int) -> PageLayout:
        """Return the layout of a page of `block_size` tokens, a multiple of 16 (first table of `layouts`)."""
        groups = self.groups(head_dim)
        if block_size <= 0 or block_size % 16:
            raise FormatError(f"block_size {block_size} is not a multiple of 16 tokens; use 16, 32, 64 or 128")
        return layouts.page(self.key.bits, self.value.bits, self.row_dim(head_dim), groups, block_size)

    @property
    def has_residuals(self) -> bool:
        """True if a recent window makes this format more accurate: it is ours, with keys or values below 8 bits."""
        return self.ours and min(self.key.bits, self.value.bits) < 8

    def recent_tokens(self, asked: int | None = None, context: int | None = None) -> int:
        """Return the size of the recent window in tokens; 0 if the format has no residuals.

        If `asked` is None, return the default (`window`). But if `context`, in tokens, is given and shorter than the
        default, return the largest of `RECENT_CHOICES` that fits in it. Raise FormatError if `asked` is not one of
        `RECENT_CHOICES`.
        """
        if asked is not None and asked not in RECENT_CHOICES:
            choices = ", ".join(map(str, RECENT_CHOICES))
            raise FormatError(f"recentTokens {asked} is not supported; use one of {choices}")
        if not self.has_residuals:
            return 0
        if asked is not None:
            return asked
        most = self.window if context is None else min(self.window, context)
        return max(choice for choice in RECENT_CHOICES if choice <= most)

    def residual_layout(self, head_dim: int, block_size: int) -> ResidualLayout:
        """Return the layout of a residual page, for blocks of `block_size` tokens (second table of `layouts`)."""
        page = self.page_layout(head_dim, block_size)
        if not self.has_residuals:
            raise FormatError(f"kv-cache dtype {self.name!r} stores every token in 8 bits: set recentTokens to 0")
        return layouts.residual(
            self.key.bits, self.value.bits, self.row_dim(head_dim), self.groups(head_dim), block_size, page.size
        )

    def residual_pages(self, head_dim: int, block_size: int) -> int:
        """Return how many residual pages refine a block of `block_size` tokens; 0 for a format without residuals."""
        return -(-block_size // self.residual_layout(head_dim, block_size).tokens) if self.has_residuals else 0

    def recent_blocks(self, recent: int, block_size: int) -> int:
        """Return how many of a sequence's newest blocks always have its last `recent` tokens; 0 without a window."""
        if recent < 0:
            raise FormatError(f"recentTokens {recent} is not a number of tokens; use 0 for none, or 64")
        return -(-recent // block_size) + 1 if recent and self.has_residuals else 0

    def recent_pages(self, recent: int, head_dim: int, block_size: int) -> int:
        """Return how many residual pages the recent window of a long sequence takes."""
        return self.recent_blocks(recent, block_size) * self.residual_pages(head_dim, block_size)


def own(
    name: str, key_bits: int, value_bits: int, *, window: int = 0, calibrated_only: bool = False, read: _Read = _UNREAD
) -> Format:
    """Return one of our formats: keys and values of 2, 4 or 8 bits, with one scale per group."""
    return Format(name, Side(key_bits, 2, 64), Side(value_bits, 2, 64), True, window, calibrated_only, read)


def _vllm(name: str, key: Side, value: Side | None = None, read: _Read = _UNREAD) -> Format:
    return Format(name, key, value or key, read=read)


# Sources of `read`, on an H200 (4.8 TB/s). At head_dim 128 the workload is 32 sequences of 16K tokens with Llama-3-8B
# on vLLM 0.32.0, unless a source says otherwise:
# - auto, fp8, k4v4 and k4v2: the attention column of docs/benchmarks/h200-engine.md.
# - Our other dtypes: the layer column of h200-decode.md.
# - vLLM's integer and TurboQuant caches: step times of 67.6, 78.5 (32 x 16K) and 10.3 ms (32 x 2K) on vLLM 0.25.1.
# At head_dim 256 it is one layer with 32 x 16,384 tokens, with the store of the new token: the column `layer` of
# h200-decode.md, or FlashAttention 3's `merged` for auto and fp8.
# Other GPUs are assumed to reach the same share of their own peak.
_READ_16_BITS = (0.92, 0.859)
_READ_FP8 = (0.63, 0.352)

# Sizes of vLLM's formats are those that its 0.32.0 backends allocate on a GPU. The metadata is:
# - per-token-head: a float32 scale per vector (v1/attention/backends/triton_attn.py, customize_spec);
# - TurboQuant: a float16 norm per key, a float16 scale and zero per value
#   (model_executor/layers/quantization/turboquant/config.py);
# - nvfp4: an fp8 scale per 16 elements (utils/torch_utils.py, nvfp4_kv_cache_full_dim).
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _vllm("auto", Side(16), read=_READ_16_BITS),  # `auto` is the model's own 16-bit dtype
        _vllm("bfloat16", Side(16), read=_READ_16_BITS),
        _vllm("float16", Side(16), read=_READ_16_BITS),
        _vllm("fp8", Side(8), read=_READ_FP8),  # fp8 is e4m3 with one scale per tensor
        _vllm("fp8_e4m3", Side(8), read=_READ_FP8),
        _vllm("fp8_e5m2", Side(8)),
        _vllm("fp8_per_token_head", Side(8, 4)),
        _vllm("int8_per_token_head", Side(8, 4), read=(0.12, None)),
        _vllm("int4_per_token_head", Side(4, 4), read=(0.052, None)),
        _vllm("nvfp4", Side(4, 1, 16)),
        _vllm("turboquant_k8v4", Side(8), Side(4, 4)),
        _vllm("turboquant_4bit_nc", Side(4, 2), Side(4, 4), read=(0.094, None)),
        _vllm("turboquant_k3v4_nc", Side(3, 2), Side(4, 4)),
        _vllm("turboquant_3bit_nc", Side(3, 2), Side(3, 4)),
        own("int8", 8, 8, read=(0.77, 0.750)),  # int8 is for GPUs without fp8
        own("k8v4", 8, 4, window=64, read=(0.80, 0.683)),
        own("k4v4", 4, 4, window=64, read=(0.77, 0.617)),
        own("k4v2", 4, 2, window=128, read=(0.63, 0.494)),  # k4v2 suits long contexts
        own("k2v2", 2, 2, window=512, calibrated_only=True, read=(0.40, 0.370)),
    )
}
"""All formats of keys and values by name, vLLM's first. `dtypes.DTYPES` also has the formats of latents."""

VLLM_DTYPES_LEFT_OUT: dict[str, str] = {
    "fp8_inc": "Intel Gaudi only",
    "fp8_ds_mla": "multi-head latent attention only",
    "nvfp4_ds_mla": "multi-head latent attention only",
    "nvfp4_4over6": "an encoder variant of nvfp4, same layout",
    "ultraquant_4bit": "AMD GPUs only",
}
"""Dtypes of vLLM 0.32.0 (CacheDType) that kvpilot does not offer, with the reason."""


def named(table: Mapping[str, _Dtype], name: str) -> _Dtype:
    """Return the entry `name` of a table of dtypes; raise UnknownFormatError if there is none."""
    try:
        return table[name]
    except (KeyError, TypeError):
        raise UnknownFormatError(str(name), table) from None


def parse(name: str) -> Format:
    """Return the format called `name`."""
    return named(FORMATS, name)


def own_names() -> tuple[str, ...]:
    """Return the names of kvpilot's own formats of keys and values."""
    return tuple(f.name for f in FORMATS.values() if f.ours)


def recent_choices() -> str:
    """Return text for messages with the values that an engine takes for its recent window."""
    return f"{', '.join(map(str, RECENT_CHOICES))} or {ALL}"


def default_windows() -> str:
    """Return text for messages with the default recent window of each format that has one."""
    return ", ".join(f"{f.window} for {f.name}" for f in FORMATS.values() if f.window)
