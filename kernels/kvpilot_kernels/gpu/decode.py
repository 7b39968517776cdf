"""Decode: one query token of every sequence over its packed pages, split over the sequence, never dequantizing.

With codes c, step s and zero point z of a group, and the rotated query q (in units of log2, see `store`)

    q . k = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

so the matrix products run on codes alone. What makes it fast on NVIDIA GPUs from compute capability 8.0 on:

- a code becomes a float16 by one AND: the bits of n in a mantissa with exponent 0 are the subnormal n * 2^-24, which
  tensor cores multiply exactly. Nothing is shifted into place but the upper byte of a word; no offset is subtracted;
- 16-bit words of codes go from memory to shared memory (cp.async) and by ldmatrix, transposed for the values, straight
  into the registers of an MMA operand. The planes of a word (`planes`) are separate MMAs on permuted elements;
- keys and values are the left operand (tokens, or elements, along M), queries of one KV head the right (N = 8 or 16);
- a program is one warp: no barrier, no exchange between warps, and eight or more of them hide each other's latency.

Gluon, because Triton's own layouts take packed values through shared memory unpacked, which halves the speed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Renamed between Triton 3.6 and 3.9.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

UNIT = gl.constexpr(2.0**-24)
"""The value of the code 1 in a float16 mantissa with exponent 0."""

HEADROOM = gl.constexpr(5.0)
"""Probabilities are kept times 2^5: small ones times a step of a value stay normal in float16, and large steps do not
overflow it until 2,048 (values of 6,000 and more in 2 bits, of 30,000 in 4; then the output is not finite)."""


@gluon.constexpr_function
def planes(bits, dim, group):
    """Planes of a row as (chunk, sub-plane, odd, group); a chunk's words share their group in each plane.

    Element of word w of chunk c: sub * dim * bits / 8 + 2 * (c * chunk_words + w) + odd.
    """
    row, words = dim * bits // 8, min(dim * bits // 16, group // 2)
    return tuple(
        (c, sub, odd, (sub * row + 2 * c * words) // group)
        for c in range(dim * bits // 16 // words)
        for sub in range(8 // bits)
        for odd in range(2)
    )


@gluon.constexpr_function
def chunk_words(bits, dim, group):
    """Words of a chunk."""
    return min(dim * bits // 16, group // 2)


@gluon.constexpr_function
def padded(words):
    """Words that a tile loads for a chunk: a power of two, 16 at least (an MMA's depth). The rest is not used."""
    return 16 if words <= 16 else 32


@gluon.constexpr_function
def chunks(bits, dim, group):
    """Chunks of a row."""
    return dim * bits // 16 // min(dim * bits // 16, group // 2)


@gluon.constexpr_function
def and_mask(bits, sub):
    """PTX that keeps one code in each half of a register."""
    return f"and.b32 $0, $1, {hex(((1 << bits) - 1 << bits * sub) * 0x10001)};"


@gluon.jit
def plane(words, bits: gl.constexpr, sub: gl.constexpr):
    """Codes of a sub-plane of the low bytes as float16 subnormals times 2^(bits * sub)."""
    return gl.inline_asm_elementwise(and_mask(bits, sub), "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def high(words):
    """The upper byte of each word, moved down; what comes from the neighbour above is masked by `plane`."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=gl.uint16, is_pure=True, pack=2)


@gluon.jit
def to_half(x):
    """float32 to float16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def step_and_zero(words):
    """Metadata words (see `formats`) as float32 step and zc; the integer becomes a float by its place in a mantissa."""
    wide = words.to(gl.uint32)
    step = ((wide >> 1) & 0x7FF0).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    return step, ((wide & 31) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def fetch_codes(buffer, stage, page, in_page, bits: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
                TILE: gl.constexpr):  # fmt: skip
    """Start copying a tile's rows of codes, chunk by chunk, into shared memory."""
    WORDS: gl.constexpr = chunk_words(bits, D, GROUP)
    WIDE: gl.constexpr = padded(WORDS)
    COUNT: gl.constexpr = chunks(bits, D, GROUP)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [1, 1], [1, 0])
    token = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    word = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    rows = (page + in_page * (D * bits // 8)).to(gl.pointer_type(gl.uint16))
    for c in gl.static_range(COUNT):
        at = token[:, None] * (D * bits // 16) + (word[None, :] + c * WORDS)
        copy_to_shared(buffer.index(stage * COUNT + c), rows + at)


@gluon.jit
def fetch(kbuf, vbuf, mbuf, stage, base, table_ptr, t, end, page_stride, KB: gl.constexpr, VB: gl.constexpr,
          D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start copying the tile of tokens [t, t + TILE) into `stage`, if t < end."""
    META: gl.constexpr = 2 * (D // GROUP)
    if t < end:
        page = base + gl.load(table_ptr + t // PAGE).to(gl.int64) * page_stride
        in_page = gl.multiple_of(t % PAGE, TILE)
        fetch_codes(kbuf, stage, page, in_page, KB, D, GROUP, TILE)
        layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
        i = gl.arange(0, META * TILE, layout)
        words = (page + PAGE * (D * (KB + VB) // 8)).to(gl.pointer_type(gl.uint16)) + in_page
        copy_to_shared(mbuf.index(stage), words + ((i // TILE) * PAGE + i % TILE))
        fetch_codes(vbuf, stage, page + PAGE * (D * KB // 8), in_page, VB, D, GROUP, TILE)


@gluon.jit
def decode_kernel(
    query_ptr, cache_ptr, table_ptr, items_ptr, lens_ptr, out_ptr, lse_ptr, page_stride, head_stride, table_stride,
    softcap, KB: gl.constexpr, VB: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, RATIO: gl.constexpr,
    N: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Partial attention of one item of the plan and one KV head; grid (kv_heads, items), one warp.

    query: float16 [sequences, kv_heads * RATIO, D], rotated, scaled by softmax scale * log2(e).
    cache: packed pages; table: int32 [sequences, blocks]; items: int32 [items, 4] as (sequence, start, end, -), a
    sequence of -1 is no work; lens: int32 [sequences].
    out: float32 [items, kv_heads, RATIO, D], normalised, rotated; lse: float32 [items, kv_heads, RATIO] in log2.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    cols: gl.constexpr = gl.SliceLayout(0, mma)
    GROUPS: gl.constexpr = D // GROUP
    KP: gl.constexpr = planes(KB, D, GROUP)
    VP: gl.constexpr = planes(VB, D, GROUP)
    KW: gl.constexpr = chunk_words(KB, D, GROUP)
    VW: gl.constexpr = chunk_words(VB, D, GROUP)
    KWIDE: gl.constexpr = padded(KW)
    VWIDE: gl.constexpr = padded(VW)
    KC: gl.constexpr = chunks(KB, D, GROUP)
    VC: gl.constexpr = chunks(VB, D, GROUP)
    KQ: gl.constexpr = ((1 << KB) - 1) / 30
    VQ: gl.constexpr = ((1 << VB) - 1) / 30
    head = gl.program_id(0)
    heads = gl.num_programs(0)
    item = gl.program_id(1)
    sequence = gl.load(items_ptr + 4 * item)
    if sequence >= 0:
        start = gl.multiple_of(gl.load(items_ptr + 4 * item + 1), TILE)
        end = gl.load(items_ptr + 4 * item + 2)
        base = cache_ptr + head.to(gl.int64) * head_stride
        table_ptr += sequence.to(gl.int64) * table_stride
        kbuf = gl.allocate_shared_memory(
            gl.uint16, [STAGES * KC, TILE, KWIDE], gl.SwizzledSharedLayout(8, 64 // KWIDE, KWIDE // 8, [1, 0])
        )
        vbuf = gl.allocate_shared_memory(
            gl.uint16, [STAGES * VC, TILE, VWIDE], gl.SwizzledSharedLayout(8, 64 // VWIDE, VWIDE // 8, [1, 0])
        )
        mbuf = gl.allocate_shared_memory(gl.uint16, [STAGES, 2 * GROUPS * TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # What this step stores is at the end of a sequence: its own token, and before it perhaps one of a sequence that
        # it shares a block with. Tiles before these two tokens do not wait for `store`.
        settled = end - 1 - TILE
        for i in gl.static_range(STAGES - 1):
            t = start + i * TILE
            fetch(kbuf, vbuf, mbuf, i, base, table_ptr, t, settled, page_stride, KB, VB, D, GROUP, TILE, PAGE)
        if OVERLAP:
            gdc_wait()
        for i in gl.static_range(STAGES - 1):
            t = start + i * TILE
            if t >= settled:
                fetch(kbuf, vbuf, mbuf, i, base, table_ptr, t, end, page_stride, KB, VB, D, GROUP, TILE, PAGE)
            async_copy.commit_group()

        word = gl.arange(0, KWIDE, gl.SliceLayout(1, right))[:, None]
        n = gl.arange(0, N, gl.SliceLayout(0, right))[None, :]
        query_ptr += (sequence * heads + head).to(gl.int64) * (RATIO * D)
        q = ()
        for i in gl.static_range(len(KP)):
            element = KP[i][1] * (D * KB // 8) + KP[i][2] + 2 * (KP[i][0] * KW + word)
            q = q + (gl.load(query_ptr + n * D + element, mask=(n < RATIO) & (word < KW), other=0.0),)
        sums = ()
        for g in gl.static_range(GROUPS):
            total = gl.full([N], 0.0, gl.float32, gl.SliceLayout(0, right))
            for i in gl.static_range(len(KP)):
                if KP[i][3] == g:
                    total += gl.sum(q[i].to(gl.float32), 0)
            sums = sums + (gl.convert_layout(total, cols) * (KQ * UNIT),)
        scaled = ()
        for i in gl.static_range(len(KP)):
            scaled = scaled + ((q[i] * (0.5 ** (KB * KP[i][1]))).to(gl.float16),)

        nothing = gl.full([TILE, N], 0.0, gl.float32, mma)
        m = gl.full([N], -1e30, gl.float32, cols)
        total = nothing
        zeros = ()
        for g in gl.static_range(GROUPS):
            zeros = zeros + (nothing,)
        acc = ()
        for i in gl.static_range(len(VP)):
            acc = acc + (gl.full([VWIDE, N], 0.0, gl.float32, mma),)
        token = gl.arange(0, TILE, rows)
        first = 0
        if WINDOW > 0:
            first = gl.load(lens_ptr + sequence) - WINDOW
        stage = 0
        for t in range(start, end, TILE):
            ahead = stage + STAGES - 1
            ahead = gl.where(ahead >= STAGES, ahead - STAGES, ahead)
            fetch(
                kbuf, vbuf, mbuf, ahead, base, table_ptr, t + (STAGES - 1) * TILE, end, page_stride, KB, VB, D, GROUP,
                TILE, PAGE,
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            meta = mbuf.index(stage)
            live = t + token < end
            if WINDOW > 0:
                live = live & (t + token >= first)
            kw = ()
            for c in gl.static_range(KC):
                low = kbuf.index(stage * KC + c).load(left)
                kw = kw + (low, high(low))
            score = nothing
            for g in gl.static_range(GROUPS):
                # A word past the end may be anything, NaN among it, and 0 * NaN is not 0.
                step, zero = step_and_zero(gl.where(live, meta.slice(g * TILE, TILE).load(rows), 0))
                dot = nothing
                for i in gl.static_range(len(KP)):
                    if KP[i][3] == g:
                        dot = mma_v2(plane(kw[2 * KP[i][0] + KP[i][2]], KB, KP[i][1]), scaled[i], dot)
                score += step[:, None] * (dot - zero[:, None] * sums[g][None, :])
            if SOFTCAP:
                power = gl.exp2(score * (2.0 / UNIT / softcap))
                score = (1.0 - 2.0 / (power + 1.0)) * (softcap * 1.4426950408889634 * UNIT)
            score = gl.where(live[:, None], score, -1e30)
            m_new = gl.maximum(m, gl.max(score, 0) * (1 / UNIT) - HEADROOM)
            alpha = gl.exp2(m - m_new)[None, :]
            p = gl.exp2(score * (1 / UNIT) - m_new[None, :])
            m = m_new
            total = total * alpha + p
            weights = ()
            new = ()
            for g in gl.static_range(GROUPS):
                step, zero = step_and_zero(gl.where(live, meta.slice((GROUPS + g) * TILE, TILE).load(rows), 0))
                w = to_half(p * step[:, None])
                new = new + (zeros[g] * alpha + w.to(gl.float32) * zero[:, None],)
                weights = weights + (gl.convert_layout(w, right),)
            zeros = new
            vw = ()
            for c in gl.static_range(VC):
                low = vbuf.index(stage * VC + c).permute([1, 0]).load(left)
                vw = vw + (low, high(low))
            new = ()
            for i in gl.static_range(len(VP)):
                codes = plane(vw[2 * VP[i][0] + VP[i][2]], VB, VP[i][1])
                new = new + (mma_v2(codes, weights[VP[i][3]], acc[i] * alpha),)
            acc = new
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(0)
        if OVERLAP:
            gdc_launch_dependents()

        norm = gl.sum(total, 0)
        word = gl.arange(0, VWIDE, rows)[:, None]
        n = gl.arange(0, N, cols)
        out_ptr += (item * heads + head).to(gl.int64) * (RATIO * D)
        for i in gl.static_range(len(VP)):
            element = VP[i][1] * (D * VB // 8) + VP[i][2] + 2 * (VP[i][0] * VW + word)
            shift = gl.sum(zeros[VP[i][3]], 0) * VQ
            value = (acc[i] * (0.5 ** (VB * VP[i][1]) / UNIT) - shift[None, :]) / norm[None, :]
            gl.store(out_ptr + n[None, :] * D + element, value, mask=(n[None, :] < RATIO) & (word < VW))
        gl.store(lse_ptr + (item * heads + head) * RATIO + n, gl.log2(norm) + m, mask=n < RATIO)
    elif OVERLAP:
        gdc_wait()
