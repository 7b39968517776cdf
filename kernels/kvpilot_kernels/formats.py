"""KV-cache formats: names, bits, groups and the page layout. Pure Python, so that the operator can import it.

A format says how the keys and the values of one token and one KV head become bytes: codes of a fixed width, plus
metadata per group of elements. kvpilot's own formats are `int8`, `k8v4`, `k4v4`, `k4v2` and `k2v2`; the others are
vLLM's, listed so that capacities can be compared.

kvpilot's group format (everything of a token is in its page; nothing depends on other tokens)
----------------------------------------------------------------------------------------------
A row of D elements is cut into groups of g = 64 (g = 48 at D = 96). Each group stores codes of b bits and one 16-bit
metadata word (little endian)::

    word = (float16 bits of `step` >> 4) << 5 | zc        step: positive, rounded up to 6 mantissa bits
    qmax = 2^b - 1        z = zc * qmax / 30, zc in 0..30        x is read back as step * (code - z)

Byte j of a 4-bit row holds element j (low nibble) and j + D/2 (high nibble); byte j of a 2-bit row holds j, j + D/4,
j + D/2 and j + 3D/4 from the low bits up: a kernel unpacks contiguous tiles without interleaving.

Page layout (one flat region per block and KV head; T = tokens in a block, kb/vb = code bits, G = D / g groups)
---------------------------------------------------------------------------------------------------------------
=============  =====================================  =========================  ================
region         offset in bytes                        shape, row-major           element
=============  =====================================  =========================  ================
`key_codes`    0                                      [T, D * kb / 8]            packed codes, u8
`value_codes`  T * D * kb / 8                         [T, D * vb / 8]            packed codes, u8
`key_meta`     T * D * (kb + vb) / 8                  [G, T]                     words, u16
`value_meta`   T * D * (kb + vb) / 8 + T * 2 * G      [G, T]                     words, u16
(end)          T * `row_bytes(D)`
=============  =====================================  =========================  ================

D is a multiple of 32 and T of 16, so every region starts at a multiple of 16 bytes. The words of a group lie side by
side over the tokens: a kernel loads the steps of a tile as one vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions that kvpilot's own formats support."""

ZERO_STEPS = 30
"""Zero points are stored in thirtieths of qmax; 30 is even, so a symmetric group has an exact centre."""


class FormatError(ValueError):
    """A format was asked for something that it does not have; the message names field, value and remedy."""


class UnknownFormatError(FormatError):
    """No KV-cache dtype has this name.

    Attributes: `name` (what was asked for), `known` (the names that exist).
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"kv-cache dtype {name[:80]!r} is not known; use one of: {', '.join(self.known)}")


class UnsupportedHeadDimError(FormatError):
    """This format has no layout for this head dimension. Attributes: `format`, `head_dim`."""

    def __init__(self, format_name: str, head_dim: int) -> None:
        self.format = format_name
        self.head_dim = head_dim
        dims = ", ".join(map(str, HEAD_DIMS))
        super().__init__(f"head_dim {head_dim} is not supported by kv-cache dtype {format_name!r}, which takes {dims};"
                         " use 'auto' or 'fp8' for this model")  # fmt: skip


class Origin(Enum):
    """Whose code stores and reads the format."""

    KVPILOT = "kvpilot"
    VLLM = "vllm"


@dataclass(frozen=True)
class Side:
    """How one vector (a key or a value of one token and KV head) is stored.

    Attributes:
        bits: width of an element's code, in bits.
        metadata_bytes: bytes of scale and zero point per group.
        group: elements that share metadata; None means the whole vector.
    """

    bits: int
    metadata_bytes: int = 0
    group: int | None = None

    @property
    def qmax(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one vector with its metadata."""
        groups = 1 if self.group is None else -(-head_dim // self.group)
        return -(-head_dim * self.bits // 8) + groups * self.metadata_bytes


@dataclass(frozen=True)
class Region:
    """One array of a page: `offset` in bytes from the page's start, row-major [rows, row_bytes]."""

    offset: int
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class PageLayout:
    """Where everything is in the page of one block and one KV head; see the module's table. All sizes in bytes."""

    key_codes: Region
    value_codes: Region
    key_meta: Region
    value_meta: Region
    size: int


@dataclass(frozen=True)
class Format:
    """A KV-cache dtype.

    Attributes:
        name: the value of `--kv-cache-dtype`.
        key, value: how a key and a value are stored (at a head dimension that is a multiple of 64, for ours).
        origin: who implements it.
        calibrated_only: not to be chosen without a calibration file: the accuracy is not there otherwise.
        summary: one line for people.
    """

    name: str
    key: Side
    value: Side
    origin: Origin
    summary: str
    calibrated_only: bool = False

    @property
    def ours(self) -> bool:
        """Whether kvpilot's own backend serves it."""
        return self.origin is Origin.KVPILOT

    def group_size(self, head_dim: int) -> int:
        """Elements per metadata word in kvpilot's formats: 64, or 48 at head_dim 96.

        Raises:
            UnsupportedHeadDimError: the format is not ours, or the dimension has no layout.
        """
        if not self.ours or head_dim not in HEAD_DIMS:
            raise UnsupportedHeadDimError(self.name, head_dim)
        return 48 if head_dim == 96 else 64

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token and KV head, key and value together, with all metadata.

        Raises:
            UnsupportedHeadDimError: the format is ours and has no layout for this dimension.
            FormatError: head_dim is not positive.
        """
        if head_dim <= 0:
            raise FormatError(f"head_dim {head_dim} is not a dimension; give the model's head_dim, such as 128")
        if self.ours:
            groups = head_dim // self.group_size(head_dim)
            return head_dim * (self.key.bits + self.value.bits) // 8 + 2 * 2 * groups
        return self.key.row_bytes(head_dim) + self.value.row_bytes(head_dim)

    def bits_per_element(self, head_dim: int = 128) -> float:
        """Bits per stored element with everything counted (codes, scales, zero points)."""
        return self.row_bytes(head_dim) * 8 / (2 * head_dim)

    def bytes_per_token(self, *, layers: int, kv_heads: int, head_dim: int) -> int:
        """Bytes that one token takes in all `layers` of a model with `kv_heads` KV heads."""
        return layers * kv_heads * self.row_bytes(head_dim)

    def page_layout(self, head_dim: int, block_size: int) -> PageLayout:
        """Offsets of a page of `block_size` tokens; the table in the module's docstring.

        Raises:
            UnsupportedHeadDimError: as `group_size`.
            FormatError: block_size is not a positive multiple of 16.
        """
        groups = head_dim // self.group_size(head_dim)
        if block_size <= 0 or block_size % 16:
            raise FormatError(f"block_size {block_size} is not a multiple of 16 tokens; use 16, 32, 64 or 128")
        codes, words = block_size * head_dim // 8, block_size * 2
        value_codes = codes * self.key.bits
        key_meta = value_codes + codes * self.value.bits
        value_meta = key_meta + groups * words
        return PageLayout(
            key_codes=Region(0, block_size, head_dim * self.key.bits // 8),
            value_codes=Region(value_codes, block_size, head_dim * self.value.bits // 8),
            key_meta=Region(key_meta, groups, words),
            value_meta=Region(value_meta, groups, words),
            size=value_meta + groups * words,
        )


def _own(name: str, key_bits: int, value_bits: int, summary: str, *, calibrated_only: bool = False) -> Format:
    key, value = Side(key_bits, 2, 64), Side(value_bits, 2, 64)
    return Format(name, key, value, Origin.KVPILOT, summary, calibrated_only)


def _vllm(name: str, key: Side, value: Side | None = None, *, summary: str) -> Format:
    return Format(name, key, value or key, Origin.VLLM, summary)


# Sizes of vLLM's formats as its 0.32.0 backends allocate them on a GPU: per-token-head formats carry a float32 scale
# per vector (v1/attention/backends/triton_attn.py, customize_spec), TurboQuant a float16 norm per key and float16 scale
# and zero per value (model_executor/layers/quantization/turboquant/config.py), nvfp4 an fp8 scale per 16 elements
# (utils/torch_utils.py, nvfp4_kv_cache_full_dim).
_FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _vllm("auto", Side(16), summary="the model's own 16-bit dtype"),
        _vllm("bfloat16", Side(16), summary="bfloat16, whatever the model's dtype"),
        _vllm("float16", Side(16), summary="float16, whatever the model's dtype"),
        _vllm("fp8", Side(8), summary="8-bit float (e4m3), one scale per tensor"),
        _vllm("fp8_e4m3", Side(8), summary="8-bit float, 4 exponent bits"),
        _vllm("fp8_e5m2", Side(8), summary="8-bit float, 5 exponent bits"),
        _vllm("fp8_per_token_head", Side(8, 4), summary="8-bit float, a scale per token and head"),
        _vllm("int8_per_token_head", Side(8, 4), summary="8-bit integer, a scale per token and head"),
        _vllm("int4_per_token_head", Side(4, 4), summary="4-bit integer, a scale per token and head"),
        _vllm("nvfp4", Side(4, 1, 16), summary="4-bit float, an fp8 scale per 16 elements"),
        _vllm("turboquant_k8v4", Side(8), Side(4, 4), summary="TurboQuant, fp8 keys and 4-bit values"),
        _vllm("turboquant_4bit_nc", Side(4, 2), Side(4, 4), summary="TurboQuant, 4-bit keys and values"),
        _vllm("turboquant_k3v4_nc", Side(3, 2), Side(4, 4), summary="TurboQuant, 3-bit keys and 4-bit values"),
        _vllm("turboquant_3bit_nc", Side(3, 2), Side(3, 4), summary="TurboQuant, 3-bit keys and values"),
        _own("int8", 8, 8, "8-bit keys and values in groups of 64, for GPUs without fp8"),
        _own("k8v4", 8, 4, "8-bit keys, 4-bit values"),
        _own("k4v4", 4, 4, "4-bit keys and values: the workhorse"),
        _own("k4v2", 4, 2, "4-bit keys, 2-bit values: for long contexts"),
        _own("k2v2", 2, 2, "2-bit keys and values", calibrated_only=True),
    )
}

VLLM_DTYPES_LEFT_OUT: dict[str, str] = {
    "fp8_inc": "Intel Gaudi only",
    "fp8_ds_mla": "multi-head latent attention only",
    "nvfp4_ds_mla": "multi-head latent attention only",
    "nvfp4_4over6": "an encoder variant of nvfp4, same layout",
    "ultraquant_4bit": "AMD GPUs only",
}
"""Names in vLLM 0.32.0's CacheDType that kvpilot does not offer, and why."""


def parse(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnknownFormatError: no format has this name; the message lists those that exist.
    """
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        raise UnknownFormatError(str(name), _FORMATS) from None


def names() -> tuple[str, ...]:
    """Every known dtype, vLLM's first."""
    return tuple(_FORMATS)


def own_names() -> tuple[str, ...]:
    """The dtypes that kvpilot's own backend serves."""
    return tuple(f.name for f in _FORMATS.values() if f.ours)


def capacity_ratio(dtype: str, over: str = "auto", head_dim: int = 128) -> float:
    """How many times more tokens `dtype` keeps than `over` in the same bytes.

    Raises:
        UnknownFormatError, UnsupportedHeadDimError: as `parse` and `Format.row_bytes`.
    """
    return parse(over).row_bytes(head_dim) / parse(dtype).row_bytes(head_dim)
