"""Print the resources of every GPU kernel, without a GPU: `python -m benchmarks.kernels.kernel_resources`.

The program compiles the kernels with the installed Triton for each compute capability, and reads registers and memory
from the machine code. A stack means spilled registers, because no kernel has local arrays. The program exits with 1 if
a kernel spills that is not in `known`, or needs more shared memory than the GPU has. `--page` writes
docs/benchmarks/kernel-resources.md.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.kernels.kernel_variants import Variant, every_variant, few_variants
from kvpilot_kernels.gpu.decode.kernel import decode_kernel
from kvpilot_kernels.gpu.decode.merge import reduce_kernel
from kvpilot_kernels.gpu.decode.schedule import plan_kernel
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.mla.decode import latent_decode_kernel
from kvpilot_kernels.gpu.mla.gather import latent_gather_kernel
from kvpilot_kernels.gpu.mla.merge import latent_reduce_kernel
from kvpilot_kernels.gpu.mla.store import latent_prepare_kernel, latent_store_kernel
from kvpilot_kernels.gpu.prefill.gather import gather_kernel
from kvpilot_kernels.gpu.prefill.head512 import prefill_kernel
from kvpilot_kernels.gpu.store.kernel import store_kernel

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernel-resources.md"
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Largest shared memory of a program in KiB, by compute capability."""
# Without line numbers, compiling takes a tenth of the time and gives the same machine code.
triton.knobs.compilation.disable_line_info = True
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    "query_ptr": "*bf16", "key_ptr": "*bf16", "value_ptr": "*bf16", "out_ptr": "*bf16", "key_out_ptr": "*bf16",
    "value_out_ptr": "*bf16", "cache_ptr": "*u8", "residuals_ptr": "*i32", "newest_ptr": "*i32", "rotated_ptr": "*i8",
    "slots_ptr": "*i64", "table_ptr": "*i32", "splits_ptr": "*i32", "lens_ptr": "*i32",
    "spans_ptr": "*i32", "bases_ptr": "*i32", "owners_ptr": "*i32",
    "rows_ptr": "*i32", "starts_ptr": "*i32", "signs_ptr": "*bf16", "key_signs_ptr": "*bf16",
    "value_signs_ptr": "*bf16", "ordinals_ptr": "*i32", "query_rope_ptr": "*bf16",
    "latent_ptr": "*bf16", "rope_ptr": "*bf16", "sums_ptr": "*i32",
    "wanted_ptr": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """Resources of one program: registers per thread, bytes of shared memory, and bytes of stack per thread."""

    registers: int
    shared: int
    stack: int

    def misfit(self, capability: int) -> str:
        """Return why a GPU of this compute capability cannot launch the program, or an empty string."""
        if self.stack:
            return f"spills {self.stack} bytes of registers"
        if self.shared > SHARED_KIB[capability] * 1024:
            return f"takes {self.shared} bytes of shared memory, of {SHARED_KIB[capability]} KiB"
        return ""


def kernels() -> dict[str, Any]:
    """Return all of kvpilot's GPU kernels by name."""
    found = (decode_kernel, store_kernel, gather_kernel, plan_kernel, reduce_kernel, prefill_kernel,
             latent_decode_kernel, latent_gather_kernel, latent_reduce_kernel, latent_prepare_kernel,
             latent_store_kernel)  # fmt: skip
    return {kernel.__name__: kernel for kernel in found}


def known(variant: Variant, taken: Resources) -> bool:
    """Return True if the program spills no more than is known and accepted. These are the known cases:

    - Decode of 8 queries with a window spills up to 120 bytes with Triton 3.9. With 4 queries, only k2v2 spills, up to
      32 bytes at head_dim 256 and 512, but not on 9.0. No alternative was tried.
    - Decode without a window spills with Triton 3.9 on compute capability 9.0: int8 48 and k8v4 16 bytes at head_dim
      192, k2v2 8 bytes at 512. No alternative was tried.
    - Decode of several tokens, with 16 queries (8 at head_dim 256), spills up to 112 bytes without a window. With one,
      it spills up to 192 bytes with Triton 3.9.
    - Prefill of heads of 512 elements on 9.0 spills 8 bytes with Triton 3.6 and 456 with 3.9. With 32 queries it spills
      none, but an H200 takes 2.1 times as long.
    - Reduce spills 8 bytes with some versions of Triton from 3.6 to 3.9, and 16 bytes for rows of 96.
    """
    most = 0
    if variant.kernel == "reduce_kernel":
        most = 16
    elif variant.kernel == "prefill_kernel":
        most = 512 if variant.constants["M"] == 64 else 0
    elif variant.kernel == "decode_kernel" and "tokens" in variant.shape:
        most = 192 if "window" in variant.shape else 112
    elif variant.kernel == "decode_kernel" and "window" in variant.shape:
        most = 120 if "8 queries" in variant.shape else 32 if variant.constants["C"].dim > 192 else 0
    elif variant.kernel == "decode_kernel":
        most = 48 if variant.constants["C"].dim > 128 else 0
    return 0 < taken.stack <= most


def compile_for(variant: Variant, capability: int) -> Resources:
    """Compile a program to machine code for a compute capability, such as 90, and return its resources."""
    kernel, types = kernels()[variant.kernel], {}
    constants = dict(variant.constants)
    config: Any = constants.get("C")
    if hasattr(config, "overlap"):
        constants["C"] = replace(config, overlap=capability >= 90)
    if "OVERLAP" in kernel.arg_names:
        constants["OVERLAP"] = capability >= 90
    row = getattr(config, "key_side", config)
    if getattr(row, "dim", 0) == getattr(row, "slots", 0):  # Rows whose size is a power of two need no tensor of signs.
        constants |= {name: None for name in kernel.arg_names if name.endswith("signs_ptr")}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = POINTERS.get(name, "*fp32")
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i64" if name.endswith("page_stride") else "i32"
    in_gluon = variant.kernel in ("decode_kernel", "latent_decode_kernel")
    if in_gluon:
        types |= {name: kind for name, kind in {"query_ptr": "*fp16", "out_ptr": "*fp32"}.items() if name in types}
    if variant.kernel.startswith("latent"):  # kernels for latents take rotated queries as floats, not as integers
        own = {"rotated_ptr": "*fp16", "sums_ptr": "*fp32"}
        types |= {name: kind for name, kind in own.items() if name in types}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    source = GluonASTSource if in_gluon else ASTSource
    compiled = triton.compile(
        source(kernel, types, constants, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.warps, "maxnreg": variant.registers, **tuning.FUSED}
        | ({"num_stages": variant.stages} if variant.stages else {}),
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", cubin.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    return Resources(registers, compiled.metadata.shared, stack)


def page(found: dict[tuple[str, str, str], dict[int, tuple[int, Resources]]], capabilities: list[int]) -> str:
    """Return the page as Markdown.

    `found` has by kernel, dtype and shape, and then by compute capability, the warps and the `Resources` of a program.
    """
    names = [f"{capability // 10}.{capability % 10}" for capability in capabilities]
    limits = ", ".join(f"{SHARED_KIB[c]} KiB on {n}" for c, n in zip(capabilities, names, strict=True))
    tools = ", ".join(f"{tool} {version(tool)}" for tool in ("ptxas", "ptxas-blackwell"))
    spills = sum(r.stack > 0 for cells in found.values() for _, r in cells.values())
    lines = [
        "# Registers and shared memory of the GPU kernels",
        "",
        "This page shows how many registers and how much shared memory each compiled kernel takes. These numbers limit",
        "how many programs a GPU runs at once. Compiling needs no GPU.",
        "",
        "```sh",
        f"python -m benchmarks.kernels.kernel_resources {' '.join(sys.argv[1:])}",
        "```",
        "",
        f"{datetime.now(UTC).date()}, Triton {triton.__version__} with {tools}.",
        "",
        "The last columns are compute capabilities. A cell `4 x 56, 0.1` means 4 warps in a program, 56 registers in a",
        "thread, and 0.1 KiB of shared memory in a program. A bold number is the bytes of registers that a thread",
        "spills to slower memory.",
        "",
        "* Limits of a program's shared memory:",
        f"  {limits}.",
        "* A thread has at most 255 registers.",
        "* `--few` compiles only some shapes: those of Llama-3-8B, head_dim 256 for int8, and 16 heads for mla4.",
        "  For 8.6 and 9.0 it adds store, gather, and some shapes with heads of 80, 192 and 512.",
        f"* Registers spill in {spills or 'none'} of {sum(map(len, found.values()))} programs.",
        "",
        "These are the largest known spills of decode, per thread. They include shapes that `--few` leaves out:",
        "",
        "* 4 queries with a recent window: 32 bytes, only from head_dim 256 on;",
        "* 8 queries (Llama-3-70B) with a recent window: 120 bytes;",
        "* several tokens of a sequence: 192 bytes with a recent window, 112 bytes without one.",
        "",
        f"| kernel | dtype | shape | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for (kernel, dtype, shape), cells in found.items():
        told = [cell(*cells[capability]) if capability in cells else "-" for capability in capabilities]
        lines.append(f"| {kernel.removesuffix('_kernel')} | {dtype} | {shape} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def cell(warps: int, taken: Resources) -> str:
    """Return one cell of the table: warps, registers, KiB of shared memory, and bytes of spills, if any."""
    return f"{warps} x {taken.registers}, {taken.shared / 1024:.1f}" + (f" **{taken.stack}**" if taken.stack else "")


def version(tool: str) -> str:
    """Return the version of one of Triton's assemblers."""
    said = subprocess.run([TOOLS / tool, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"V([\d.]+)", said)[1]  # type: ignore[index]


def main() -> int:
    """Compile every program, and print its resources or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="compile only one variant of each kernel and format")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(SHARED_KIB), choices=list(SHARED_KIB))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    variants = few_variants if options.few else every_variant
    jobs = [(variant, capability) for capability in options.capabilities for variant in variants(capability)]
    found: dict[tuple[str, str, str], dict[int, tuple[int, Resources]]] = {}
    misfits = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for (variant, capability), taken in zip(jobs, pool.map(compile_for, *zip(*jobs, strict=True)), strict=True):
            wrong = taken.misfit(capability)
            expected = bool(wrong) and known(variant, taken)
            misfits += bool(wrong) and not expected
            row = found.setdefault((variant.kernel, variant.dtype, variant.shape), {})
            row[capability] = variant.warps, taken
            print(
                capability,
                variant.kernel,
                variant.dtype,
                variant.shape,
                taken,
                wrong or "fits",
                "(known)" * expected,
                flush=True,
            )
    if options.page:
        PAGE.write_text(page(found, options.capabilities))
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
