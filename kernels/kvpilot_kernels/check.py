"""Checks of arguments before a kernel is launched, because a wrong shape could give a wrong answer without an error.

Each check raises BadInputError, whose message names the argument, its value and the remedy. The checks `slots`,
`tables`, `blocks`, `newest` and `newest_ends` read values, so on a GPU they wait for the device. All other checks read
only shapes, types and strides, so code for GPUs may call them in every step.
"""

import torch

from kvpilot_formats.formats import Format
from kvpilot_formats.latent import RANK, ROPE, LatentFormat
from kvpilot_kernels.residuals import Residuals

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


class BadInputError(ValueError):
    """Error for an argument that does not fit packed pages. `field` is the argument's name."""

    def __init__(self, field: str, holds: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field} {holds}; {remedy}")


def shown(x: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as text for a message."""
    return f"{x.dtype} {tuple(x.shape)}"


def page_cache(cache: torch.Tensor, fmt: Format, head_dim: int) -> None:
    """Check a layer's cache: uint8 [blocks, kv_heads, block_size, row_bytes]. Each (block, head) is a contiguous page.

    Raises:
        UnsupportedHeadDimError: the format has no layout for this head dimension.
    """
    row = fmt.row_bytes(head_dim)
    pages(cache, ("blocks", "kv_heads", "block_size"), row, f"{fmt.name} at head_dim {head_dim}")


def pages(cache: torch.Tensor, dims: tuple[str, ...], row: int, what: str) -> None:
    """Check that pages are uint8 [*dims, row], contiguous, aligned to 16 bytes, and do not overlap.

    Args:
        dims: names of the leading dimensions; the last one counts the tokens of a page.
        row: bytes of a token.
        what: description of the format, for the message.
    """
    right = cache.dtype == torch.uint8 and cache.dim() == len(dims) + 1 and cache.shape[-1] == row
    if not right or cache.stride()[-2:] != (row, 1) or cache.shape[-2] % 16 or cache.shape[-2] == 0:
        takes = f"{what} takes uint8 [{', '.join(dims)}, {row}] with contiguous pages and a block_size that is a"
        raise BadInputError("cache", f"is {shown(cache)} with strides {cache.stride()}", f"{takes} multiple of 16")
    page, outer = cache.shape[-2] * row, list(zip(cache.shape, cache.stride(), strict=True))[:-2]
    if any(size > 1 and stride < page for size, stride in outer):
        remedy = f"its pages of {page} bytes must not overlap"
        raise BadInputError("cache", f"has strides {cache.stride()}", remedy)
    if cache.data_ptr() % 16 or any(stride % 16 for _, stride in outer):
        raise BadInputError(
            "cache", f"starts at byte {cache.data_ptr() % 16} of 16 with strides {cache.stride()}",
            "pages start at multiples of 16 bytes: allocate and pad them so",
        )  # fmt: skip


def tokens(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """Check that key and value are floats [tokens, kv_heads, head_dim], and slots int64 [tokens or fewer]."""
    for name, x in (("key", key), ("value", value)):
        if x.dtype not in FLOATS or tuple(x.shape[1:]) != (kv_heads, head_dim):
            raise BadInputError(name, f"is {shown(x)}", f"this cache takes floats [tokens, {kv_heads}, {head_dim}]")
    one_slot_each(slot_mapping, {"keys": key, "values": value})


def one_slot_each(slot_mapping: torch.Tensor, rows: dict[str, torch.Tensor]) -> None:
    """Check that there is at most one slot per row, and that slots are int64.

    Slots of 32 bits would be too small for byte offsets in a cache of more than 2 GiB.

    Args:
        rows: tensors with a row for each slot, by their name in the message.
    """
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise BadInputError("slots", f"is {shown(slot_mapping)}", "give one int64 for each token")
    if slot_mapping.shape[0] > min(x.shape[0] for x in rows.values()):
        counts = " and ".join(f"{x.shape[0]} {name}" for name, x in rows.items())
        raise BadInputError("slots", f"has {slot_mapping.shape[0]} entries for {counts}", "give one for each token")


def residuals(found: Residuals | None, cache: torch.Tensor, count: int) -> None:
    """Check that a map of residual pages fits a layer's cache, or is None.

    Args:
        found: the map.
        cache: the layer's pages; its first dimension counts blocks.
        count: residual pages of a block (`Format.residual_pages`); 0 without a recent window.
    """
    if (found is not None) != (count > 0):
        remedy = f"these pages have {count} residual pages a block: give the map if, and only if, that is above 0"
        raise BadInputError("residuals", "is missing" if found is None else "is given", remedy)
    if found is None:
        return
    for name, x, shape in (("pages", found.pages, (cache.shape[0], count)), ("newest", found.newest, (1,))):
        if x.dtype != torch.int32 or tuple(x.shape) != shape or not x.is_contiguous() or x.device != cache.device:
            holds = f"is {shown(x)} with strides {x.stride()} on {x.device}"
            raise BadInputError(f"residuals.{name}", holds, f"give contiguous int32 {shape} on {cache.device}")


def newest(newest: torch.Tensor) -> None:
    """Check that the number of newest blocks that decode reads with residuals is not negative."""
    if int(newest) < 0:
        raise BadInputError("residuals.newest", f"is {int(newest)} blocks", "give 0 for none, or a positive number")


def newest_ends(newest_ends: torch.Tensor | None, seq_lens: torch.Tensor) -> None:
    """Check that `newest_ends` are integers [rows], none of them less than its row's `seq_lens`, or None."""
    if newest_ends is None:
        return
    right = newest_ends.dtype in _INTEGERS and newest_ends.shape == seq_lens.shape
    if not right or bool((newest_ends < seq_lens).any()):
        remedy = "give integers, for each row of seq_lens the stored tokens of its sequence"
        raise BadInputError("newest_ends", f"are {shown(newest_ends)} for seq_lens {shown(seq_lens)}", remedy)


def inner_strides(head_dim: int, **named: torch.Tensor) -> None:
    """Check that heads and elements of tensors [tokens, heads, head_dim] are contiguous."""
    for name, x in named.items():
        if x.stride()[1:] != (head_dim, 1):
            raise BadInputError(name, f"has strides {x.stride()}", "make heads and elements contiguous")


def ordinals(ordinals: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
    """Check ordinals, the positions of tokens in their sequences: integers [tokens], or None.

    Padding tokens at the end may have none.
    """
    if ordinals is None:
        return
    if ordinals.dtype not in _INTEGERS or ordinals.dim() != 1 or ordinals.shape[0] > slot_mapping.shape[0]:
        remedy = f"give one int32 for each of the {slot_mapping.shape[0]} slots, 1 for the first token of a sequence"
        raise BadInputError("ordinals", f"are {shown(ordinals)}", remedy)


def queries(query: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """Check that queries are floats [rows, heads, head_dim], and heads a multiple of kv_heads."""
    right = query.dtype in FLOATS and query.dim() == 3 and query.shape[2] == head_dim
    if not right or query.shape[1] == 0 or query.shape[1] % kv_heads:
        remedy = f"this cache takes floats [rows, heads, {head_dim}] with heads a multiple of {kv_heads}"
        raise BadInputError("query", f"is {shown(query)}", remedy)


def slots(slot_mapping: torch.Tensor, blocks: int, block_size: int) -> None:
    """Check that slots to write to are below blocks * block_size. A negative slot is padding."""
    if slot_mapping.numel() and int(slot_mapping.max()) >= blocks * block_size:
        remedy = f"{blocks} blocks of {block_size} tokens end at slot {blocks * block_size - 1}: nothing was written"
        raise BadInputError("slots", f"name slot {int(slot_mapping.max())}", remedy)


def tables(block_table: torch.Tensor, seq_lens: torch.Tensor, blocks: int, block_size: int) -> None:
    """Check block tables, integers [sequences, columns], and seq_lens, integers [sequences] of at least 1.

    Table entries past a sequence's length may have any value, so they are not checked.
    """
    for name, x, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if x.dtype not in _INTEGERS or x.dim() != dims or x.shape[0] != seq_lens.shape[0]:
            raise BadInputError(name, f"is {shown(x)}", "give integers, one row for each sequence of seq_lens")
    if seq_lens.numel() == 0:
        return
    room = block_table.shape[1] * block_size
    shortest, longest = (int(x) for x in seq_lens.aminmax())
    if shortest < 1 or longest > room:
        remedy = f"a table of {block_table.shape[1]} blocks of {block_size} tokens holds 1 to {room}"
        raise BadInputError("seq_lens", f"go from {shortest} to {longest} tokens", remedy)
    used = torch.arange(block_table.shape[1], device=block_table.device) * block_size < seq_lens[:, None]
    named = block_table[used]
    wrong = named[(named < 0) | (named >= blocks)]
    if wrong.numel():
        remedy = f"the cache has blocks 0 to {blocks - 1}: the table belongs to another cache, or was not filled"
        raise BadInputError("block_table", f"names block {int(wrong[0])} within a sequence", remedy)


def int32(**given: torch.Tensor) -> None:
    """Check that tensors are int32. A kernel would misread another type without an error."""
    for name, x in given.items():
        if x.dtype != torch.int32:
            raise BadInputError(name, f"is {x.dtype}", "give int32")


def sequences(seq_lens: torch.Tensor, most: int) -> None:
    """Check that there are at most `most` sequences."""
    if seq_lens.shape[0] > most:
        raise BadInputError("seq_lens", f"has {seq_lens.shape[0]} sequences", f"the plan has room for {most}")


def several(starts: torch.Tensor, owners: torch.Tensor, most: int, seq_lens: torch.Tensor, tokens: int,
            rows: int) -> None:  # fmt: skip
    """Check that a step with several query tokens per sequence fits a plan.

    Args:
        starts: int32 [sequences + 1 or more], the first row of each sequence. A row is a query token.
        owners: int32 [rows or fewer], the sequence of each row.
        most: largest number of rows of a sequence in this step.
        tokens: largest number of rows of a sequence in the plan.
        rows: largest number of rows of all sequences in the plan.
    """
    int32(starts=starts, owners=owners)
    if starts.shape[0] <= seq_lens.shape[0]:
        remedy = f"give one more than the {seq_lens.shape[0]} sequences"
        raise BadInputError("starts", f"has {starts.shape[0]} rows", remedy)
    if not 2 <= most <= tokens:
        raise BadInputError("most", f"is {most} tokens of a sequence", f"the plan takes 2 to {tokens}")
    if owners.shape[0] > rows:
        raise BadInputError("owners", f"has {owners.shape[0]} rows", f"the plan has {rows}")


def blocks(pages: torch.Tensor, blocks: int, field: str) -> None:
    """Check that pages are among the cache's blocks. 0 means no page."""
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < blocks:
        wrong = pages[(pages < 0) | (pages >= blocks)]
        remedy = f"the cache has blocks 0 to {blocks - 1}; give 0 for none"
        raise BadInputError(field, f"names block {int(wrong[0])}", remedy)


def sinks(found: torch.Tensor | None, heads: int) -> None:
    """Check logits of attention sinks: contiguous floats [heads], or None."""
    if found is None:
        return
    if found.dtype not in FLOATS or tuple(found.shape) != (heads,) or not found.is_contiguous():
        raise BadInputError("sinks", f"is {shown(found)}", f"give contiguous floats, one for each of {heads} heads")


def latent_cache(cache: torch.Tensor, fmt: LatentFormat) -> None:
    """Check a layer's cache: uint8 [blocks, block_size, row_bytes]. Each block is one contiguous page."""
    pages(cache, ("blocks", "block_size"), fmt.row_bytes, fmt.name)


def latent_tokens(latent: torch.Tensor, rope: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Check the entries of new tokens.

    Args:
        latent: floats [tokens, 512].
        rope: RoPE parts, floats [tokens, 64].
        slot_mapping: int64 [tokens or fewer].
    """
    for name, x, width in (("latent", latent, RANK), ("rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
            remedy = f"give floats [tokens, {width}], each row contiguous"
            raise BadInputError(name, f"is {shown(x)} with strides {x.stride()}", remedy)
    one_slot_each(slot_mapping, {"latents": latent, "RoPE keys": rope})


def latent_queries(absorbed: torch.Tensor, rope: torch.Tensor, heads: int | None = None) -> None:
    """Check queries: floats [rows, heads, 512] absorbed into latent space, and RoPE parts, floats [rows, heads, 64]."""
    for name, x, width in (("query", absorbed, RANK), ("query_rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 3 or x.shape[2] != width or x.shape[1] != (heads or absorbed.shape[1]):
            raise BadInputError(name, f"is {shown(x)}", f"give floats [rows, {heads or 'heads'}, {width}]")
    if absorbed.shape[:2] != rope.shape[:2] or absorbed.shape[1] == 0:
        remedy = f"give the rows and heads of query, {tuple(absorbed.shape)}"
        raise BadInputError("query_rope", f"is {tuple(rope.shape)}", remedy)
