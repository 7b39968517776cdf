"""What every GPU kernel takes of a GPU, without one: `python kernels/benchmarks/kernel_resources.py`.

Compiles with the installed Triton for each compute capability and reads what the assembler allotted from the machine
code. A stack is registers that did not fit: no kernel has local arrays. Writes docs/benchmarks/kernel-resources.md;
`--few` compiles one variant of each kind and prints it, for tests, which exit 1 where one does not fit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kvpilot_kernels import formats
from kvpilot_kernels.gpu import decode, gather, plan, reduce, ring, store, tuning
from kvpilot_kernels.gpu.codec import side_layouts
from kvpilot_kernels.gpu.rotation import slots

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernel-resources.md"
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may ask for, by compute capability."""
SPILLS = {"store_kernel": 64, "gather_kernel": 64}
"""Bytes of a thread's registers that may go to its stack: these kernels have no loop. In decode none."""
BLOCK, TOOLS = 64, Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    "query_ptr": "*bf16", "key_ptr": "*bf16", "value_ptr": "*bf16", "out_ptr": "*bf16", "key_out_ptr": "*bf16",
    "value_out_ptr": "*bf16", "cache_ptr": "*u8", "ring_ptr": "*u8", "rotated_ptr": "*fp16", "slots_ptr": "*i64",
    "ring_slots_ptr": "*i64", "table_ptr": "*i32", "ring_table_ptr": "*i32", "splits_ptr": "*i32", "lens_ptr": "*i32",
    "spans_ptr": "*i32", "rows_ptr": "*i32", "starts_ptr": "*i32", "rotation_ptr": "*bf16", "key_rotation_ptr": "*bf16",
    "value_rotation_ptr": "*bf16", "query_rotation_ptr": "*bf16",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants; `shape` and `dtype` say in a table which."""

    kernel: str
    dtype: str
    shape: str
    warps: int
    constants: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Resources:
    """What one program takes: registers of a thread, bytes of shared memory, bytes of a thread's stack."""

    registers: int
    shared: int
    stack: int

    def misfit(self, kernel: str, capability: int) -> str:
        """Why this kernel must not be served on such a GPU; empty if it may."""
        if self.stack > SPILLS.get(kernel, 0):
            return f"spills {self.stack} bytes of registers"
        if self.shared > SHARED_KIB[capability] * 1024:
            return f"takes {self.shared} bytes of shared memory, of {SHARED_KIB[capability]} KiB"
        return ""


def kernels() -> dict[str, Any]:
    """The kernels by name."""
    found = (decode.decode_kernel, store.store_kernel, gather.gather_kernel, plan.plan_kernel, reduce.reduce_kernel,
             ring.ring_slots_kernel)  # fmt: skip
    return {kernel.__name__: kernel for kernel in found}


def decode_variant(name: str, dim: int, ratio: int, recent: int) -> Variant:
    """Decode as `GpuPages` launches it for a format, head_dim, query heads of a KV head, and recent window."""
    fmt, queries = formats.parse(name), -(-ratio // -(-ratio // 8))
    key, value = side_layouts(fmt, dim, BLOCK, recent)
    choice = tuning.choose(dim, queries, fmt.key.bits + fmt.value.bits, BLOCK)
    ring = fmt.ring_layout(dim, BLOCK).tokens if recent else 0
    shape = f"head_dim {dim}, {ratio} queries" + (f", window {recent}" if recent else "")
    return Variant(
        "decode_kernel", name, shape, 1,
        {"KEY": key, "VALUE": value, "D": dim, "GROUP": fmt.group_size(dim), "RATIO": ratio, "TAKE": queries,
         "TILE": choice.tile, "PAGE": BLOCK, "STAGES": choice.stages, "SOFTCAP": False, "WINDOW": 0, "RECENT": recent,
         "RING": ring, "RING_BLOCKS": fmt.ring_blocks(recent, dim, BLOCK) if recent else 0},
    )  # fmt: skip


def page_variants(name: str, dim: int) -> Iterator[Variant]:
    """Store, with and without a ring, and gather."""
    fmt = formats.parse(name)
    wide = slots(dim)
    for recent in (0, 64) if fmt.has_ring else (0,):
        key, value = side_layouts(fmt, dim, BLOCK, recent)
        codec = {"KV_HEADS": 8, "KEY": key, "VALUE": value, "D": dim, "WIDE": wide, "PAGE": BLOCK}
        ring, window = fmt.ring_layout(dim, BLOCK).tokens if recent else 0, ", window 64" if recent else ""
        constants = {"RATIO": 4, "RING": ring, "TOKENS": 16, **codec}
        yield Variant("store_kernel", name, f"head_dim {dim}{window}", tuning.store_warps(dim, recent), constants)
        if not recent:
            yield Variant("gather_kernel", name, f"head_dim {dim}", 4 if dim <= 128 else 8, {"TOKENS": 64, **codec})


def step_variants(dim: int) -> Iterator[Variant]:
    """Plan, ring slots and reduce, which know no format."""
    if dim == 128:
        constants = {"TILE": 64, "WINDOW": 0, "SEQUENCES": 64, "SPLITS": 128}
        yield Variant("plan_kernel", "any", "64 sequences", 8, constants)
        constants = {"RECENT": 64, "RING": 39, "RING_BLOCKS": 2, "ROUNDS": 8, "TOKENS": ring.TOKENS}
        yield Variant("ring_slots_kernel", "any", "window 64", 4, constants)
    for take in (1, 4, 8):
        constants = {"KV_HEADS": 8, "RATIO": 8, "TAKE": take, "D": dim, "WIDE": slots(dim), "ROWS": take,
                     "STEP": 32 // take}  # fmt: skip
        yield Variant("reduce_kernel", "any", f"head_dim {dim}, {take} of 8 queries", 4, constants)


def every_variant() -> list[Variant]:
    """Each kernel for each format and head_dim, decode for 4 and for 8 queries, with a recent window and without."""
    found = []
    for dim in formats.HEAD_DIMS:
        for name in formats.own_names():
            windows = (0, 64) if formats.parse(name).has_ring else (0,)
            found += [decode_variant(name, dim, ratio, recent) for ratio in (4, 8) for recent in windows]
            found += page_variants(name, dim)
        found += step_variants(dim)
    return found


def few_variants() -> list[Variant]:
    """One of each kernel, and of decode two that take most."""
    hard = decode_variant("k2v2", 128, 4, 64), decode_variant("k4v4", 256, 16, 0)
    return [*hard, *list(page_variants("k4v2", 128))[1:], *list(step_variants(128))[:3]]


def compile_for(capability: int, variant: Variant) -> Resources:
    """Compile to machine code, and read what it takes; raises whatever Triton does."""
    kernel, types = kernels()[variant.kernel], {}
    constants = dict(variant.constants)
    if "OVERLAP" in kernel.arg_names:
        constants["OVERLAP"] = capability >= 90
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = POINTERS.get(name, "*fp32")
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i64" if name.endswith("page_stride") else "i32"
    if variant.kernel == "decode_kernel":
        types |= {"query_ptr": "*fp16", "out_ptr": "*fp32"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    source = GluonASTSource if variant.kernel == "decode_kernel" else ASTSource
    compiled = triton.compile(
        source(kernel, types, constants, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.warps},
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", cubin.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    return Resources(registers, compiled.metadata.shared, stack)


def row(variant: Variant, capabilities: list[int]) -> list[Resources]:
    """A variant's resources on each compute capability."""
    return [compile_for(capability, variant) for capability in capabilities]


def page(rows: list[tuple[Variant, list[Resources]]], capabilities: list[int]) -> str:
    """The table."""
    names = [f"{capability // 10}.{capability % 10}" for capability in capabilities]
    limits = ", ".join(f"{SHARED_KIB[c]} KiB on {n}" for c, n in zip(capabilities, names, strict=True))
    lines = [
        "# What the GPU kernels take",
        "",
        f"`python {' '.join(sys.argv)}`, Triton {triton.__version__}, no GPU. By compute capability: KiB of shared",
        "memory of a program / registers of a thread, and bold, in bytes of a thread's stack, registers that did not",
        f"fit. A program may have {limits}, and a thread 255 registers.",
        "",
        f"| kernel | dtype | shape | warps | {' | '.join(names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    for variant, found in rows:
        cells = [f"{r.shared / 1024:.1f} / {r.registers}" + (f" **{r.stack}**" if r.stack else "") for r in found]
        what = f"{variant.kernel.removesuffix('_kernel')} | {variant.dtype} | {variant.shape} | {variant.warps}"
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, and write or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="one variant of each kind, printed")
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(SHARED_KIB), choices=list(SHARED_KIB))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    variants, rows, misfits = few_variants() if options.few else every_variant(), [], 0
    with ProcessPoolExecutor(options.processes) as pool:
        futures = [pool.submit(row, variant, options.capabilities) for variant in variants]
        for variant, future in zip(variants, futures, strict=True):
            rows.append((variant, future.result()))
            for capability, resources in zip(options.capabilities, rows[-1][1], strict=True):
                wrong = resources.misfit(variant.kernel, capability)
                misfits += bool(wrong)
                print(variant.kernel, variant.dtype, variant.shape, capability, resources, wrong, flush=True)
    if not options.few:
        PAGE.write_text(page(rows, options.capabilities))
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
