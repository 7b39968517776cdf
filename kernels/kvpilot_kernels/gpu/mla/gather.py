"""Gather of latent pages: read entries (a token's latent and RoPE part) back in the model's 16-bit dtype.

Prefill computes each head's keys and values from the context's entries, chunk by chunk, in a workspace of fixed size.
So the whole context never exists in 16 bits.
"""

import triton
import triton.language as tl

from kvpilot_kernels.gpu.layout.hadamard import rotate
from kvpilot_kernels.gpu.layout.page import read_codes, scale_and_zero
from kvpilot_kernels.gpu.mla.store import ENTRY, RANK


@triton.jit
def read_part(page, place, live, to, mean_ptr, factor_ptr, SIDE: tl.constexpr):
    """Dequantize latents or RoPE parts (SIDE), rotate them back, and write those of `live` tokens.

    page, to: pointers to the tokens' pages and output rows, [tokens].
    place: each token's place in its page, [tokens].
    """
    d = tl.arange(0, SIDE.dim)
    code = read_codes(page + (SIDE.codes + place * SIDE.row), live, SIDE)
    meta = tl.load((page + SIDE.meta).to(tl.pointer_type(tl.int16)) + place, mask=live, other=0).to(tl.int32)
    scale, zero = scale_and_zero(meta, SIDE.bits)
    y = rotate((code.to(tl.float32) - zero[:, None]) * scale[:, None], None, SIDE.dim)
    y = y * (1.0 / tl.load(factor_ptr + d))[None, :] + tl.load(mean_ptr + d)[None, :]
    tl.store(to[:, None] + d[None, :], y.to(to.dtype.element_ty), mask=live[:, None])


# Steps pass slices of tensors and tables of any width. Do not compile a variant for each alignment and stride.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "starts_ptr"])
def latent_gather_kernel(cache_ptr, table_ptr, starts_ptr, rows_ptr, out_ptr, mean_ptr, factor_ptr,
                         page_stride, table_stride, LATENT: tl.constexpr, POSITION: tl.constexpr,
                         TOKENS: tl.constexpr):  # fmt: skip
    """Read latents and RoPE parts of tokens [start, start + length). Grid (cdiv(longest, TOKENS), 2, sequences).

    table: int32 [sequences, blocks].
    starts: int32 [sequences], `start` of each sequence.
    rows: int32 [sequences + 1], each sequence's first row of the output. Their differences are the lengths.
    out: [rows, 576], any float dtype.
    The other parameters are those of `latent_store_kernel`.
    """
    sequence = tl.program_id(2)
    row = tl.load(rows_ptr + sequence)
    length = tl.load(rows_ptr + sequence + 1) - row
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length:
        live = at < length
        token = tl.load(starts_ptr + sequence) + at
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + token // LATENT.page, mask=live, other=0)
        page = cache_ptr + block.to(tl.int64) * page_stride
        to = out_ptr + (row + at).to(tl.int64) * ENTRY
        if tl.program_id(1) == 0:
            read_part(page, token % LATENT.page, live, to, mean_ptr, factor_ptr, LATENT)
        else:
            read_part(page, token % LATENT.page, live, to + RANK, mean_ptr + RANK, factor_ptr + RANK, POSITION)
