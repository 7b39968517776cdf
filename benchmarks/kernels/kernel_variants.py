"""List, for kernel_resources.py, the variants of GPU kernels that engines launch, with their compile-time constants.

Constants and warps depend on format, head_dim and compute capability.
"""

from dataclasses import dataclass, field
from typing import Any

from kvpilot_formats import formats
from kvpilot_formats import latent as latent_formats
from kvpilot_kernels.gpu.decode import schedule as plan
from kvpilot_kernels.gpu.decode.kernel import DecodeConfig
from kvpilot_kernels.gpu.decode.merge import MergeConfig
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.layout.hadamard import slots
from kvpilot_kernels.gpu.layout.page import side_layouts
from kvpilot_kernels.gpu.mla import tuning as latent_tuning
from kvpilot_kernels.gpu.mla.operands import LatentConfig
from kvpilot_kernels.gpu.mla.pages import part_layouts
from kvpilot_kernels.gpu.prefill.gather import GatherConfig
from kvpilot_kernels.gpu.store.kernel import StoreConfig

BLOCK = 64


@dataclass(frozen=True)
class Variant:
    """Kernel with its compile-time constants. `shape` and `dtype` name the variant in a table.

    `registers` is the limit of registers per thread, as in `tuning.Choice`. `stages` is the number of stages of loops
    that Triton pipelines. Both are None for Triton's default.
    """

    kernel: str
    dtype: str
    shape: str
    warps: int
    constants: dict[str, Any] = field(hash=False)
    registers: int | None = None
    stages: int | None = None


def stored_dim(dim: int) -> int:
    """Return the number of elements of a stored row, for heads of `dim` elements."""
    return formats.stored_dim(dim) or 0


def decode_variant(name: str, dim: int, ratio: int, recent: bool, capability: int, page: int = BLOCK,
                   softcap: bool = False, tokens: int = 1) -> Variant:  # fmt: skip
    """Return the variant of decode that `GpuPages` launches for a format, head_dim and query heads per KV head."""
    fmt, queries = formats.parse(name), tuning.program_queries(dim, ratio, tokens)
    residuals = fmt.residual_pages(dim, page) if recent else 0
    key, value = side_layouts(fmt, dim, page, residuals)
    choice = tuning.choose(dim, queries, fmt.key.bits + fmt.value.bits, page, residuals, divmod(capability, 10))
    parts = [f"head_dim {dim}", f"{ratio} queries", tokens > 1 and f"of {tokens} tokens", recent and "window",
             page != BLOCK and f"blocks of {page}", softcap and "soft cap"]  # fmt: skip
    return Variant(
        "decode_kernel", name, ", ".join(part for part in parts if part), 1,
        {"C": DecodeConfig.of(
            key, queries, value_side=value, ratio=ratio, tile=choice.tile, stages=choice.stages, softcap=softcap,
            residuals=residuals, several=tokens > 1, overlap=False,
        )}, choice.registers,
    )  # fmt: skip


def store_variant(name: str, dim: int, recent: bool, tokens: int) -> Variant:
    """Return the variant of `store` that `GpuPages` launches for this number of new tokens."""
    fmt = formats.parse(name)
    block = tuning.store_block(stored_dim(dim), tokens)
    key, value = side_layouts(fmt, dim, BLOCK, fmt.residual_pages(dim, BLOCK) if recent else 0)
    constants = {"C": StoreConfig(key, value, 8, 4, dim, block.tokens, False, False)}
    parts = [f"head_dim {dim}", recent and "window", f"{block.tokens} tokens in {block.warps} warps"]
    return Variant("store_kernel", name, ", ".join(part for part in parts if part), block.warps, constants)


STORED = (1, tuning.FEW_TOKENS + 1)
"""Two numbers of new tokens per call, for which `store` has different variants."""


def gather_variant(name: str, dim: int) -> Variant:
    """Return the variant of `gather` that `GpuPages` launches for this format and head_dim."""
    block = tuning.gather_block(stored_dim(dim))
    key, value = side_layouts(formats.parse(name), dim, BLOCK, 0)
    constants = {"C": GatherConfig(key, value, 8, dim, block.tokens)}
    return Variant("gather_kernel", name, f"head_dim {dim}", block.warps, constants)


def reduce_variant(dim: int, take: int, step: int, warps: int, several: bool = False) -> Variant:
    """Return the variant of the reduce kernel, which all formats share.

    Args:
        take: query heads that a program takes, out of 8.
        step: number of splits that are merged at once.
    """
    shape = f"head_dim {dim}, {take} of 8 queries, {step} splits" + (", several tokens" if several else "")
    stored = stored_dim(dim)
    constants = {"C": MergeConfig(8, 8, dim, stored, slots(stored), take, take, step, several, False, False, False)}
    return Variant("reduce_kernel", "any", shape, warps, constants)


def merge_variant(dim: int) -> Variant:
    """Return the variant of the reduce kernel that is launched for large batches."""
    return reduce_variant(dim, *tuning.MERGES[stored_dim(dim)][-1][1])


def prefill_variant(causal: bool, capability: int) -> Variant:
    """Return the variant of the prefill kernel for heads of 512 elements, as the CUDA backend launches it."""
    block = tuning.prefill_block(divmod(capability, 10))
    constants = {"RATIO": 8, "D": 512, "WIDE": 512, "M": block.queries, "N": block.keys, "CAUSAL": causal,
                 "SOFTCAP": False}  # fmt: skip
    shape = f"head_dim 512, {'causal' if causal else 'context'}"
    return Variant("prefill_kernel", "any", shape, block.warps, constants, stages=block.stages)


def step_variants() -> list[Variant]:
    """Return the variants of the plan kernel, which do not depend on heads."""
    cut = {"TILE": 64, "CHUNK": plan.CHUNK, "OWN": plan.OWN, "PER": plan.PER, "ROUNDS": plan.ROUNDS}
    return [
        Variant("plan_kernel", "any", "a token of a sequence", 4, cut | {"SEVERAL": False}),
        Variant("plan_kernel", "any", "several tokens", 4, cut | {"SEVERAL": True}),
    ]


def latent_variants(heads: int, capability: int, page: int = BLOCK) -> list[Variant]:
    """Return the variants of the kernels for latents that `GpuLatentPages` launches for this number of heads."""
    shape, found = f"{heads} heads" + (f", blocks of {page}" if page != BLOCK else ""), []
    for name in latent_formats.names():
        fmt = latent_formats.parse(name)
        latent, position = part_layouts(fmt, page)
        pages = {"LATENT": latent, "POSITION": position}
        choice = latent_tuning.choose(fmt, heads, page, divmod(capability, 10))
        config = LatentConfig(latent, position, heads, latent_tuning.program_heads(heads), choice.heads, choice.tile,
                              choice.stages, choice.warps, False)  # fmt: skip
        found += [
            Variant("latent_decode_kernel", name, shape, choice.warps, {"C": config}, choice.registers),
            Variant("latent_store_kernel", name, shape, latent_tuning.STORE_WARPS,
                    pages | {"TOKENS": latent_tuning.STORE_TOKENS}),
            Variant("latent_gather_kernel", name, shape, latent_tuning.GATHER_WARPS,
                    pages | {"TOKENS": latent_tuning.GATHER_TOKENS}),
        ]  # fmt: skip
    merges = {latent_tuning.merging(splits) for splits in (8, 33, 264)}
    return [
        *found,
        Variant("latent_prepare_kernel", "any", shape, latent_tuning.STORE_WARPS,
                {"HEADS": heads, "ROWS": latent_tuning.STORE_TOKENS}),
        *(Variant("latent_reduce_kernel", "any", f"{shape}, {one.splits} splits in {one.warps} warps", one.warps,
                  {"HEADS": heads, "TAKE": one.heads, "STEP": one.splits})
          for one in sorted(merges, key=lambda one: one.warps)),
    ]  # fmt: skip


def every_variant(capability: int) -> list[Variant]:
    """Return the variants of every kernel for each format and head_dim, with and without a recent window.

    Decode is listed for 4 and 8 query heads per KV head, and for several tokens per sequence only for 4.
    """
    found = step_variants()
    for dim in (80, 160):
        found += [store_variant("k4v4", dim, True, 1), merge_variant(dim)]
        found.append(gather_variant("k4v4", dim))
    for dim in formats.HEAD_DIMS:
        for name in formats.own_names():
            windows = (False, True) if formats.parse(name).has_residuals else (False,)
            found += [decode_variant(name, dim, ratio, recent, capability) for ratio in (4, 8) for recent in windows]
            found += [decode_variant(name, dim, 4, recent, capability, tokens=4) for recent in windows]
            found += [store_variant(name, dim, recent, tokens) for recent in windows for tokens in STORED]
            found.append(gather_variant(name, dim))
        found.append(decode_variant("k4v4", dim, 8, True, capability, page=16))
        found.append(decode_variant("k4v4", dim, 8, True, capability, softcap=True))
        found += [reduce_variant(dim, *way, several) for _, way in tuning.MERGES[dim] for several in (False, True)]
    found += [prefill_variant(causal, capability) for causal in (True, False)]
    for heads in (8, 16, 20, 64, 128):
        found += latent_variants(heads, capability)
    return found + latent_variants(16, capability, page=16)


def few_variants(capability: int) -> list[Variant]:
    """Return the variants of every kernel for a few shapes, to save time.

    - Decode has Llama-3-8B's shape in each format, with a recent window, and Gemma's head_dim 256 in int8.
    - The other kernels have one or two shapes, because their resources hardly depend on the format.
    - Kernels for latents have 16 heads, and the dtype mla4.
    - Head dims 80 (padded), 192 (rows are stored in two parts) and 512 (Gemma 4) are included only for compute
      capability 8.6 and 9.0. These have little and much shared memory.
    - Store and gather need at most 152 registers and 9 KiB on every GPU, far below any limit. They are included only
      for 8.6 and 9.0, and for these three head dims only for 9.0.
    """
    found = [*step_variants(), reduce_variant(128, 1, 32, 2), reduce_variant(128, 2, 8, 1, several=True)]
    for name in formats.own_names():
        recent, dim = formats.parse(name).has_residuals, 256 if name == "int8" else 128
        found.append(decode_variant(name, dim, 4, recent, capability))
        if name in ("int8", "k4v4", "k2v2") and capability in (86, 90):
            found.append(store_variant(name, dim, recent, 1))
        if name in ("int8", "k4v4") and capability in (86, 90):
            found.append(gather_variant(name, dim))
    found += [decode_variant("k4v4", 128, 4, True, capability, tokens=4), prefill_variant(True, capability)]
    *of_formats, prepare, merge = latent_variants(16, capability)[:-2]
    found += [one for one in of_formats if one.dtype == "mla4"] + [prepare, merge]
    if capability not in (86, 90):
        return found
    found += [decode_variant("k4v4", dim, ratio, True, capability) for dim, ratio in ((512, 8), (192, 4))]
    found += [merge_variant(dim) for dim in (512, 256, 192, 80)]
    found.append(store_variant("k4v4", 128, True, STORED[1]))
    if capability == 86:
        return found
    found += [store_variant("k4v4", dim, True, tokens) for dim in (512, 192, 80) for tokens in STORED]
    return found + [gather_variant("k4v4", dim) for dim in (80, 192)]
