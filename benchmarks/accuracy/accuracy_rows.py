"""Rows of the accuracy table. A row is a way of storing and reading a KV cache, and has a size in bits.

A row's name is a codec's name, followed by options after `+`:

- `self`: use factors that an engine computes at start.
- `wN`: read the last N tokens (the recent window) at 8 bits, in whole blocks as engines do. `wall`: read all tokens at
  8 bits, as an engine with `--recent-tokens=all` does while memory is free.
- `firstN`: keep a sequence's first N tokens in 16 bits, for comparison with engines that do so. Our engines never do.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.accuracy.codec import Codec, own
from benchmarks.accuracy.rivals import plain
from benchmarks.accuracy.rivals.kivi import kivi
from benchmarks.accuracy.rivals.kvarn import kvarn
from benchmarks.accuracy.rivals.turboquant import turboquant
from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors

ByLayer = Callable[[int], Codec]
"""Function that returns the codec of a layer."""

SELF = "self"


def _served(name: str) -> str:
    fmt = formats.parse(name)
    return f"{name}+{SELF}" + (f"+w{fmt.window}" if fmt.window else "")


SERVED = tuple(map(_served, formats.own_names()))
"""Rows of our formats as engines use them, with the default window and factors that are computed at start."""

OTHER_WINDOWS = ("k4v2+self+w64",)
"""Rows with a window other than the default."""

AGAINST_EXACT = ("k4v4+self+w128+first128", "k4v4+self+w128")
"""Rows to compare with `kvarn_k4v4+exact`, which keeps the first 128 tokens and the unfinished tile in 16 bits."""

CONTEXT = 4096
"""Context in tokens, over which bits per element spread data outside base pages, such as residual pages."""

EVERY = 1 << 30
"""Length of the window of a row with `wall`, in tokens."""

BLOCK = 64
"""Number of tokens in a block of an engine on a GPU, which determines the size of a recent window."""


@dataclass(frozen=True)
class Reading:
    """Rules by which attention reads a KV cache.

    Attributes:
        pages: function that returns a layer's codec for pages.
        newest: number of newest blocks, including the query's own, that are read by the codec `fine`.
        fine: function that returns a layer's codec for these blocks; None for 16 bits.
        first: number of a sequence's first tokens that are kept in 16 bits.
        hit: number of a sequence's first tokens that come from the prefix cache. Their own queries attend in 16 bits,
            as in a prefill. Only the newest blocks of these tokens have residuals.
        block: number of tokens in a block.
    """

    pages: ByLayer
    newest: int = 0
    fine: ByLayer | None = None
    first: int = 0
    hit: int = 0
    block: int = BLOCK


def rivals() -> dict[str, Codec]:
    """Return the codecs of other projects by name. Each codec serves all layers."""
    found = [plain.fp8_e4m3(), plain.int4_raw(), plain.int4_per_token_head(), turboquant(4), turboquant(3), kivi(2)]
    found += [kvarn(4, v, exact_ends=exact) for v in (4, 2) for exact in (False, True)]
    return {codec.name: codec for codec in found}


def every_name() -> list[str]:
    """Return the names of all rows."""
    mine = [name + suffix for name in formats.own_names() for suffix in ("", f"+{SELF}")]
    return [*rivals(), *mine, *SERVED, *OTHER_WINDOWS, *AGAINST_EXACT]


def reading(name: str, factors: Mapping[int, Factors], block: int = BLOCK) -> Reading:
    """Return the rules by which the row `name` reads its cache. `factors` has each layer's factors for rows `+self`.

    `block` is the number of tokens in a block.

    Raises:
        ValueError: there is no such row.
    """
    if name in rivals():
        codec = rivals()[name]
        return Reading(lambda _layer: codec)
    fmt, calibrated, recent, first = _parts(name)
    newest = fmt.recent_blocks(recent, block)
    if not calibrated:
        pages, fine = own(fmt), own(fmt, recent=True)
        return Reading(lambda _layer: pages, newest, (lambda _layer: fine) if newest else None, first, block=block)
    layers = {layer: own(fmt, one) for layer, one in factors.items()}
    finer = {layer: own(fmt, one, recent=True) for layer, one in factors.items()}
    return Reading(layers.__getitem__, newest, finer.__getitem__ if newest else None, first, block=block)


def engine(name: str) -> tuple[str, dict[str, str]]:
    """Return the KV-cache dtype and the environment of a vLLM engine that stores its cache like the row `name`.

    Raises:
        ValueError: no engine can store its cache in this way.
    """
    if name == "fp8_e4m3":
        return name, {}
    fmt, calibrated, recent, first = _parts(name)
    if first:
        raise ValueError(f"row {name!r}: an engine serves FORMAT[+{SELF}][+wN] and fp8_e4m3")
    window = formats.ALL if recent == EVERY else str(recent)
    variables = {"KVPILOT_RECENT_TOKENS": window} if fmt.has_residuals else {}
    return fmt.name, variables if calibrated else {**variables, "KVPILOT_CALIBRATION": "off"}


def bits(name: str, head_dim: int) -> float:
    """Return a row's bits per element, with scales, and with data outside the pages spread over `CONTEXT` tokens."""
    known = rivals()
    if name in known:
        codec = known[name]
        kept = 2 * codec.tile if codec.exact_ends else 0  # The first and the unfinished tile have 16 bits.
        return _mixed(codec.bits(head_dim), kept)
    fmt, _, recent, first = _parts(name)
    pages = fmt.bits_per_element(head_dim)
    residuals = fmt.recent_pages(min(recent, CONTEXT - BLOCK), head_dim, BLOCK) * BLOCK
    return _mixed(pages, first) + pages * residuals / CONTEXT


def _mixed(low: float, exact: int) -> float:
    return low + (16 - low) * exact / CONTEXT


def _parts(name: str) -> tuple[formats.Format, bool, int, int]:
    """Return a row's format, True for `+self`, the length of the window, and the number of first tokens in 16 bits."""
    found = re.fullmatch(rf"(\w+?)(\+{SELF})?(?:\+w(\d+|{formats.ALL}))?(?:\+first(\d+))?", name)
    if found is None:
        raise ValueError(f"row {name!r} is not FORMAT[+{SELF}][+wN][+firstN]; for example k4v4+self+w64")
    recent = EVERY if found[3] == formats.ALL else int(found[3] or 0)
    return formats.parse(found[1]), found[2] is not None, recent, int(found[4] or 0)
