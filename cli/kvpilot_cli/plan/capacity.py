"""Compute how many tokens and sequences fit in the memory that weights and vLLM leave.

All sizes are those of one GPU under tensor parallelism. Weights and KV heads are divided evenly. If there are more GPUs
than KV heads, each GPU has one head, so some heads are copied. A latent cache (MLA) is not divided: every GPU has all
of it.
"""

from dataclasses import dataclass

from kvpilot_cli.plan.facts import Model, PlanError
from kvpilot_formats import dtypes, formats
from kvpilot_formats.latent import LatentFormat
from kvpilot_operator.decide.steps.capacity import OWN_BLOCK
from kvpilot_operator.gpus import Gpu

MIB = 2**20

ENGINE_BYTES = 3 * 2**30
"""Bytes on each GPU for activations, CUDA graphs and the allocator's slack, as in kvpilot-serve's preflight."""

WEIGHT_BITS = {"bfloat16": 16.0, "fp8": 8.0, "int4": 4.16, "mxfp4": 4.25}
"""Bits of a weight, with its share of scales. Embeddings always have 16 bits.

- int4: AWQ or GPTQ. A group of 128 weights has a 16-bit scale and a 4-bit zero point.
- mxfp4: only for experts. 32 weights share a scale of one byte.
"""

BLOCK = 16
"""Tokens of a KV block in vLLM's formats on a GPU (`block_size` in docs/benchmarks/h200-engine.json)."""


def weight_bytes(model: Model, dtype: str) -> int:
    """Return the bytes of the model's weights if they are stored as `dtype`, a key of WEIGHT_BITS."""
    if dtype == model.published and model.weight_bytes is not None:
        return model.weight_bytes
    if model.parameters is None:
        why = model.uncounted or "parameters cannot be counted from its config.json"
        raise PlanError(f"MODEL {model.name!r}: {why}; give --weights-gb")
    small = model.expert_parameters if dtype == "mxfp4" else model.parameters - model.embedding_parameters
    return int(small * WEIGHT_BITS[dtype] / 8) + 2 * (model.parameters - small)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU. `usable_bytes` is the part that vLLM may use for weights, engine and KV cache."""

    usable_bytes: int
    weights_bytes: int
    engine_bytes: int
    kv_bytes: int


def memory(gpu: Gpu, gpus: int, utilization: float, weights: int) -> Memory:
    """Divide the memory of one GPU.

    `weights` are the bytes of all weights. If they do not fit, `kv_bytes` of the result is 0.
    """
    usable = int(gpu.memory_mib * MIB * utilization)
    share = -(-weights // gpus)
    return Memory(usable, share, ENGINE_BYTES, max(0, usable - share - ENGINE_BYTES))


def kv_heads_per_gpu(model: Model, gpus: int) -> int:
    """Return the number of KV heads on one GPU.

    Raises:
      PlanError: the heads cannot be divided among `gpus`.
    """
    if model.heads % gpus or (model.kv_heads % gpus and gpus % model.kv_heads):
        fits = [n for n in (1, 2, 4, 8, 16, 32) if not model.heads % n and not (model.kv_heads % n and n % model.kv_heads)]  # fmt: skip  # noqa: E501
        raise PlanError(f"--gpus {gpus}: {model.heads} heads with {model.kv_heads} KV heads cannot be divided among {gpus} GPUs; use one of {', '.join(map(str, fits))}")  # fmt: skip  # noqa: E501
    return max(1, model.kv_heads // gpus)


@dataclass(frozen=True, slots=True)
class Cache:
    """Layout of the KV cache of one dtype on one GPU.

    All pages have the same size. vLLM puts full-attention layers and layers with a sliding window into separate groups,
    each with the same number of layers. A block is one page of every layer of a group (vLLM 0.32,
    v1/core/kv_cache_utils.py).

    Attributes:
      block, window_block: tokens in a page of a full-attention layer, and of a layer with a sliding window.
      page_bytes: bytes of one layer's page.
      group_layers: layers in a group, including layers that are only padding.
      full_groups, window_groups: groups of each kind.
      window: length of the sliding window in tokens.
      full_token_bytes, window_token_bytes: bytes of one token in all full-attention layers, and in all with a window.
      recent_blocks: newest blocks of a sequence that have residual pages in each full group; 0 without a recent window.
      residual_pages: residual pages of a block.
    """

    block: int
    window_block: int
    page_bytes: int
    group_layers: int
    full_groups: int
    window_groups: int
    window: int
    full_token_bytes: int
    window_token_bytes: int
    recent_blocks: int = 0
    residual_pages: int = 0

    @property
    def recent_bytes(self) -> int:
        """Return the bytes of a long sequence's recent window."""
        return self.recent_blocks * self.residual_pages * self.full_token_bytes * self.block

    def blocks(self, kv_bytes: int) -> int:
        """Return the number of blocks that fit in `kv_bytes` of one GPU."""
        return kv_bytes // (self.page_bytes * self.group_layers)

    def held(self, context: int) -> int:
        """Return the number of blocks that a sequence of `context` tokens takes.

        A sliding window may begin and end inside a block.
        """
        blocks = -(-context // self.block)
        full = (blocks + self.residual_pages * min(self.recent_blocks, blocks)) * self.full_groups
        if context <= self.window:
            return full + -(-context // self.window_block) * self.window_groups
        return full + (-(-self.window // self.window_block) + 1) * self.window_groups

    def sequences(self, kv_bytes: int, context: int) -> int:
        """Return the number of sequences of `context` tokens that fit at once."""
        return self.blocks(kv_bytes) // self.held(context)

    def tokens(self, kv_bytes: int, context: int) -> int:
        """Return the number of tokens that fit if every sequence has `context` of them."""
        return self.blocks(kv_bytes) * context // self.held(context)


def cache(model: Model, dtype: str, gpus: int, recent_tokens: int | None = None) -> Cache:
    """Return the layout of the KV cache for this dtype.

    Layers with a sliding window stay in 16 bits, the default of engines that the operator starts. Layers with chunked
    attention use `dtype`. Only full-attention layers have a recent window.

    `recent_tokens` is the length of the recent window, or None for the dtype's default. Dtypes without a window ignore
    it.

    Raises:
      PlanError: the heads cannot be divided among `gpus`.
      FormatError: the dtype has no layout for the model's head_dim, or does not support the recent window.
    """
    stored = dtypes.parse(model.served(dtype))
    recent = stored.recent_tokens(recent_tokens, model.max_positions)
    heads = kv_heads_per_gpu(model, gpus)
    block = OWN_BLOCK if stored.ours else BLOCK
    window_heads = max(1, (model.window_kv_heads or model.kv_heads) // gpus)
    beside = formats.parse(model.served("auto") if dtype == "auto" else dtype if model.chunked else "auto")
    wide = beside.row_bytes(model.window_head_dim or model.head_dim) * window_heads
    if isinstance(stored, LatentFormat):
        row = stored.row_bytes
    elif model.latent_dim:
        row = int(model.latent_dim * (1 if stored.bits_per_element() < 16 else 2))
    else:
        sizes = (model.head_dim, model.value_dim or model.head_dim)
        row = sum(stored.row_bytes(size) for size in sizes) * heads // 2
    full, windows = model.full_layers, model.sliding_layers
    window_block = block
    if full and windows:
        # vLLM makes all pages equally large. So a page of a full-attention layer must have room for at least one block
        # of a layer with a window. A layer with a window then puts as many tokens into a page as fit, in steps of
        # BLOCK. The rest of its page is unused (docs/model-kinds.md).
        block *= -(-wide // row)
        window_block = row * block // (wide * BLOCK) * BLOCK
        few, many = sorted((full, windows))
        group = many if many < 1.5 * few else few
    else:
        group = full or windows
        row = row if full else wide
    newest = refined = 0
    if isinstance(stored, formats.Format) and full:
        newest, refined = stored.recent_blocks(recent, block), stored.residual_pages(model.head_dim, block)
    return Cache(
        recent_blocks=newest,
        residual_pages=refined,
        block=block,
        window_block=window_block,
        page_bytes=row * block,
        group_layers=group,
        full_groups=-(-full // group),
        window_groups=-(-windows // group),
        window=model.window,
        full_token_bytes=row * full,
        window_token_bytes=wide * windows,
    )
