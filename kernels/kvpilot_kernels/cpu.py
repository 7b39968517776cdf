"""Packed pages on a CPU, in vectorised plain torch: store, decode and prefill over `layouts.PageLayout`.

Keys and values are rotated by a Hadamard matrix before they are quantized. Decode never rotates them back: it rotates
the queries in the same way, and the outputs back. A layer's calibration factors (`kvpilot_kernels.factors`) apply to
queries, to outputs, and to a token before it is rotated and stored.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvpilot_formats.formats import Format
from kvpilot_kernels import check
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.hadamard import rotation
from kvpilot_kernels.reference.quantize import decode, encode, pack, unpack, view_region
from kvpilot_kernels.residuals import ResidualPages, Residuals
from kvpilot_kernels.softmax import attention, softmax


class PackedPages:
    """Cache of packed pages of one layer.

    Args:
        cache: uint8 [blocks, kv_heads, block_size, row_bytes]; each (block, head) is one contiguous flat page.
        fmt: one of kvpilot's own formats.
        head_dim: elements of a key and of a value.
        factors: the layer's calibration factors, [kv_heads, head_dim] each; None without calibration.
        residuals: the engine's map of residual pages; None without a recent window.

    Raises:
        BadInputError: the cache does not have the layout of `fmt`, or the map does not fit the cache.
        ValueError: the factors have another shape.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        fmt: Format,
        head_dim: int,
        factors: Factors | None = None,
        residuals: Residuals | None = None,
    ) -> None:
        check.page_cache(cache, fmt, head_dim)
        if residuals is not None:
            check.residuals(residuals, cache, fmt.residual_pages(head_dim, cache.shape[2]))
        if factors is not None and factors.key_mean.shape != (cache.shape[1], head_dim):
            raise ValueError(
                f"factors of {tuple(factors.key_mean.shape)} do not fit a cache of [kv_heads, head_dim] = "
                f"[{cache.shape[1]}, {head_dim}]; load this model's calibration, and shard it as its heads are"
            )
        self.fmt, self.head_dim, self.block_size, self.factors = fmt, head_dim, cache.shape[2], factors
        self.rotation = rotation(head_dim)
        layout = fmt.page_layout(head_dim, self.block_size)
        pages = cache.flatten(2)
        self.key_codes, self.value_codes = (view_region(pages, x) for x in (layout.key_codes, layout.value_codes))
        self.key_meta, self.value_meta = (
            view_region(pages, x).view(torch.int16).transpose(2, 3) for x in (layout.key_meta, layout.value_meta)
        )
        self.residuals = None
        if residuals is not None:
            self.residuals = ResidualPages(pages, fmt, head_dim, self.block_size, residuals)

    def store(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, ordinals: torch.Tensor | None = None
    ) -> None:
        """Rotate, quantize and write tokens. Write residuals of tokens whose block has residual pages.

        Args:
            key, value: [tokens, kv_heads, head_dim], any float dtype.
            slots: int64 [tokens], block * block_size + offset in the block; a negative slot is padding.
            ordinals: int [tokens], each token's position in its sequence, counted from 1. Padding at the end may be
                left out. None if no token is the first of its sequence.
        """
        check.tokens(key, value, slots, self.key_codes.shape[1], self.head_dim)
        check.slots(slots, self.key_codes.shape[0], self.block_size)
        check.ordinals(ordinals, slots)
        key, value = key[: slots.shape[0]], value[: slots.shape[0]]
        first = torch.zeros(len(slots), dtype=torch.bool)
        if ordinals is not None:
            first[: len(ordinals)] = ordinals == 1
        if slots.numel() and int(slots.min()) < 0:
            kept = slots >= 0
            key, value, slots, first = key[kept], value[kept], slots[kept], first[kept]
        block = slots.div(self.block_size, rounding_mode="floor")
        place = slots - block * self.block_size
        if self.residuals is not None:
            check.blocks(self.residuals.map[block], self.key_codes.shape[0], "residuals.pages")
        group = self.fmt.group_size(self.head_dim)
        for x, side, bits, codes_at, meta_at in (
            (key, "key", self.fmt.key.bits, self.key_codes, self.key_meta),
            (value, "value", self.fmt.value.bits, self.value_codes, self.value_meta),
        ):
            x = x.float()
            if self.factors is not None:
                mean, scale = self.factors.of(side)
                if side == "key":
                    mean = torch.where(first[:, None, None], self.factors.key_first, mean)
                x = (x - mean) * scale
            x = x @ self.rotation
            codes, meta = encode(x, bits, group)
            codes_at[block, :, place] = pack(codes, bits)
            meta_at[block, :, place] = meta
            if self.residuals is not None:
                self.residuals.store(side, x, codes, meta, block, place)

    def decode(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        newest_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of query tokens, one per row, to the tokens of their sequences, including themselves.

        The newest blocks of a sequence are read with 8 bits if they have residual pages.

        Args:
            query: [rows, heads, head_dim]; heads is a multiple of kv_heads.
            block_table: int [rows, blocks]; entries past a row's length are not read.
            seq_lens: int [rows], tokens to attend to, at least 1.
            scale: factor on the scores.
            softcap: 0 for none, else scores become cap * tanh(score / cap).
            sinks: [heads], logits of attention sinks, which take part of the softmax weight but have no value; None
                without sinks.
            newest_ends: int [rows], stored tokens of each row's sequence, which has more rows for drafts; None for
                `seq_lens`.

        Returns:
            float32 [rows, heads, head_dim].
        """
        check.queries(query, self.key_codes.shape[1], self.head_dim)
        check.tables(block_table, seq_lens, self.key_codes.shape[0], self.block_size)
        check.newest_ends(newest_ends, seq_lens)
        blocks = -(-int(seq_lens.max()) // self.block_size)
        table = block_table[:, :blocks]
        length = blocks * self.block_size
        # Dimensions in comments: S rows, H KV heads, L tokens.
        past = torch.arange(length)[None, :] >= seq_lens[:, None]  # [S, L]
        # Table entries past a sequence's end are arbitrary, so point them at a valid block.
        table = table.masked_fill(past[:, :: self.block_size], 0)
        sequences, heads = query.shape[:2]
        kv_heads = self.key_codes.shape[1]
        q = query.float().view(sequences, kv_heads, heads // kv_heads, self.head_dim)
        apart, level = None, None
        if self.factors is not None:
            # The key at position 0 has its own mean, so `apart` is added to its score. The mean of all other keys would
            # add `level` to every score. Softmax cancels `level`, except with a soft cap or with sinks.
            apart = (q * (self.factors.key_first - self.factors.key_mean)[:, None]).sum(-1).mul_(scale)
            level = (q * self.factors.key_mean[:, None]).sum(-1, keepdim=True).mul_(scale)
            q = q / self.factors.key_scale[:, None]
        q = (q @ self.rotation).mul_(scale)  # [S, H, queries, D]
        recent = self._recent(table, seq_lens if newest_ends is None else newest_ends)
        keys, values = (self._rows(side, table, recent) for side in ("key", "value"))
        scores = q @ keys.mT  # [S, H, queries, L]
        if apart is not None:
            scores[..., 0] += apart
        if level is not None and (softcap or sinks is not None):
            scores += level
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.masked_fill_(past[:, None, None, :], -torch.inf)
        p = softmax(scores, None if sinks is None else sinks.view(kv_heads, -1, 1))
        # Unused slots may have NaN scales, and 0 * NaN is NaN.
        out = p @ values.masked_fill_(past[:, None, :, None], 0.0) @ self.rotation.T
        if self.factors is not None:
            # A sink takes part of the softmax weight, so multiply the values' mean by the rest of the weight.
            weight = 1.0 if sinks is None else p.sum(-1, keepdim=True)
            out = out / self.factors.value_scale[:, None] + weight * self.factors.value_mean[:, None]
        return out.view(sequences, heads, self.head_dim)

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_table: torch.Tensor,
        context: int,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        """Return causal attention from a sequence's new chunk to its quantized context and to the unquantized chunk.

        Args:
            query: [tokens, heads, D].
            key, value: [tokens, kv_heads, D], those of the new chunk.
            block_table: int [blocks] of this sequence.
            context: tokens stored before the chunk.
            scale, softcap, sinks: as in `decode`.
            spans: ranges [begin, end) of the chunk's tokens that attend to each other in both directions, such as an
                image.

        Returns:
            [tokens, heads, D] in the query's dtype.
        """
        check.queries(query, self.key_codes.shape[1], self.head_dim)
        tokens = query.shape[0]
        if context:
            old_key, old_value = self.read(block_table, context)
            key = torch.cat([old_key.to(key.dtype), key])
            value = torch.cat([old_value.to(value.dtype), value])
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None
        if context or spans or softcap or sinks is not None:
            mask = torch.ones(tokens, key.shape[0], dtype=torch.bool).tril_(context)
            for begin, end in spans:
                mask[begin:end, context + begin : context + end] = True
        if mask is not None and (softcap or sinks is not None):
            return attention(q, k, v, mask, scale, softcap, sinks)[0].transpose(0, 1).to(query.dtype)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def read(self, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a sequence's first `length` tokens, rotated back: float32 [length, kv_heads, D]."""
        return self._side("key", block_table, length), self._side("value", block_table, length)

    def _side(self, side: str, block_table: torch.Tensor, length: int) -> torch.Tensor:
        check.tables(block_table[None], torch.tensor([length]), self.key_codes.shape[0], self.block_size)
        table = block_table[None, : -(-length // self.block_size)].long()
        back = self._rows(side, table)[0].transpose(0, 1)[:length] @ self.rotation.T
        if self.factors is not None:
            mean, scale = self.factors.of(side)
            back = back / scale + mean
            if side == "key":
                back[:1] += self.factors.key_first - mean
        return back

    def _recent(self, table: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | None:
        """Return True for blocks of `table` to read with residuals, [rows, blocks]; None without a recent window.

        `ends` has the stored tokens of each row's sequence.
        """
        if self.residuals is None:
            return None
        check.newest(self.residuals.newest)
        pages = self.residuals.map[table]
        check.blocks(pages, self.key_codes.shape[0], "residuals.pages")
        first = (ends + self.block_size - 1) // self.block_size - self.residuals.newest
        return (torch.arange(table.shape[1]) >= first[:, None]) & (pages[..., 0] > 0)

    def _rows(self, side: str, table: torch.Tensor, recent: torch.Tensor | None = None) -> torch.Tensor:
        """Return keys or values in the rotated space, float32 [rows, kv_heads, tokens, D].

        `recent` is True for blocks to read with residuals, [rows, blocks]; None for no block.
        """
        codes, meta, bits = {
            "key": (self.key_codes, self.key_meta, self.fmt.key.bits),
            "value": (self.value_codes, self.value_meta, self.fmt.value.bits),
        }[side]
        rows, scales = (x[table].transpose(1, 2).flatten(2, 3) for x in (codes, meta))
        rows = decode(unpack(rows, bits), scales, bits)
        if self.residuals is not None and recent is not None:
            row, at = recent.nonzero(as_tuple=True)
            added = self.residuals.read(side, table[row, at], meta[table[row, at]])
            if added is not None:
                rows.view(*rows.shape[:2], recent.shape[1], self.block_size, -1)[row, :, at] += added
        return rows
