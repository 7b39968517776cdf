"""Latent pages on a CPU, in vectorised plain torch: store, decode and read over `LatentLayout`.

Decode never dequantizes. A token's latent and its RoPE part each have codes c, a scale s and a zero point z. Let x be
one of the two, q the rotated query, and p_t the probability of token t:

    q . x = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

A score is the sum of q . x over the latent and the RoPE part. The output uses only the latent's codes, which are
unpacked once for both products.
"""

import torch

from kvpilot_formats.latent import RANK, ROPE_BITS, LatentFormat
from kvpilot_kernels import check
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.reference.hadamard import hadamard
from kvpilot_kernels.reference.quantize import decode, encode, pack, scale_and_zero, unpack, view_region

LATENT, POSITION = slice(RANK), slice(RANK, None)
"""Channels of the factors that belong to a token's latent, and to its RoPE part."""


class LatentPages:
    """Cache of latent pages of one layer.

    Args:
        cache: uint8 [blocks, block_size, row_bytes]; each block is one contiguous flat page.
        fmt: the format.
        factors: the layer's calibration; None without calibration.
    """

    def __init__(self, cache: torch.Tensor, fmt: LatentFormat, factors: LatentFactors | None = None) -> None:
        check.latent_cache(cache, fmt)
        self.fmt, self.block_size = fmt, cache.shape[1]
        self.factors = factors or LatentFactors.identity()
        layout = fmt.page_layout(self.block_size)
        pages = cache.flatten(1)
        self.codes, self.rope_codes = view_region(pages, layout.codes), view_region(pages, layout.rope_codes)
        self.meta = view_region(pages, layout.meta).view(torch.int16)

    def store(self, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
        """Rotate, quantize and write tokens.

        Args:
            latent: [tokens, 512], after its norm, any float dtype.
            rope: [tokens, 64], after RoPE, any float dtype.
            slots: int64 [tokens], block * block_size + offset in the block; a negative slot is padding.
        """
        check.latent_tokens(latent, rope, slots)
        check.slots(slots, self.codes.shape[0], self.block_size)
        kept = slots >= 0
        at = slots[kept]
        block = at.div(self.block_size, rounding_mode="floor")
        place = at - block * self.block_size
        for i, (x, part, bits, codes_at) in enumerate(
            ((latent, LATENT, self.fmt.bits, self.codes), (rope, POSITION, ROPE_BITS, self.rope_codes))
        ):
            x = (x[: len(slots)][kept].float() - self.factors.mean[part]) * self.factors.scale[part]
            codes, meta = encode(x @ hadamard(x.shape[-1]), bits, x.shape[-1])
            codes_at[block, place] = pack(codes, bits)
            self.meta[block, i, place] = meta.squeeze(-1)

    def decode(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return attention of one query token per sequence to all stored tokens of its sequence, including itself.

        Args:
            query: [sequences, heads, 512], absorbed into latent space.
            query_rope: [sequences, heads, 64].
            block_table: int [sequences, blocks]; entries past a sequence's length are not read.
            seq_lens: int [sequences], tokens stored, at least 1.
            scale: factor on the scores.

        Returns:
            float32 [sequences, heads, 512], in latent space.
        """
        check.latent_queries(query, query_rope)
        check.tables(block_table, seq_lens, self.codes.shape[0], self.block_size)
        blocks = -(-int(seq_lens.max()) // self.block_size)
        # Dimensions in comments: S sequences, L tokens.
        past = torch.arange(blocks * self.block_size)[None, :] >= seq_lens[:, None]  # [S, L]
        # Table entries past a sequence's end are arbitrary, so point them at a valid block.
        table = block_table[:, :blocks].masked_fill(past[:, :: self.block_size], 0)
        q, q_rope = (
            (x.float() / self.factors.scale[part]) @ hadamard(x.shape[-1]) * scale
            for x, part in ((query, LATENT), (query_rope, POSITION))
        )
        codes = unpack(self.codes[table].flatten(1, 2), self.fmt.bits).float()  # [S, L, 512]
        rope_codes = self.rope_codes[table].flatten(1, 2).float()
        meta = self.meta[table].transpose(1, 2).flatten(2, 3)  # [S, 2, L]
        step, zero = scale_and_zero(meta[:, :1], self.fmt.bits)  # [S, 1, L]
        rope_step, rope_zero = scale_and_zero(meta[:, 1:], ROPE_BITS)
        scores = (q @ codes.mT - zero * q.sum(-1, keepdim=True)) * step  # [S, heads, L]
        scores += (q_rope @ rope_codes.mT - rope_zero * q_rope.sum(-1, keepdim=True)) * rope_step
        p = scores.masked_fill_(past[:, None], -torch.inf).softmax(-1)
        # Unused slots may have NaN scales, and 0 * NaN is NaN.
        weights = p * step.masked_fill(past[:, None], 0.0)
        out = weights @ codes - (weights * zero).sum(-1, keepdim=True)
        out = out @ hadamard(RANK).T
        return out / self.factors.scale[LATENT] + self.factors.mean[LATENT]

    def read(self, block_table: torch.Tensor, length: int) -> torch.Tensor:
        """Return the entries of a sequence's first `length` tokens, rotated back: float32 [length, 576]."""
        check.tables(block_table[None], torch.tensor([length]), self.codes.shape[0], self.block_size)
        table = block_table[: -(-length // self.block_size)].long()
        parts = []
        for i, (codes, bits) in enumerate(((self.codes, self.fmt.bits), (self.rope_codes, ROPE_BITS))):
            rows, meta = codes[table].flatten(0, 1)[:length], self.meta[table, i].flatten()[:length, None]
            back = decode(unpack(rows, bits), meta, bits)
            parts.append(back @ hadamard(back.shape[-1]).T)
        return torch.cat(parts, -1) / self.factors.scale + self.factors.mean
