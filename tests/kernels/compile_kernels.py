"""Compile every GPU kernel with the installed Triton, without a GPU: `python compile_kernels.py 80`.

A process of its own: where Triton's interpreter is on, nothing is compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kvpilot_kernels import formats
from kvpilot_kernels.gpu import decode, gather, plan, reduce, store
from kvpilot_kernels.gpu.codec import side_layouts
from kvpilot_kernels.gpu.ring import ring_slots_kernel

POINTERS = {
    "query_ptr": "*bf16", "key_ptr": "*bf16", "value_ptr": "*bf16", "out_ptr": "*bf16", "key_out_ptr": "*bf16",
    "value_out_ptr": "*bf16", "cache_ptr": "*u8", "ring_ptr": "*u8", "rotated_ptr": "*fp16", "slots_ptr": "*i64",
    "ring_slots_ptr": "*i64", "table_ptr": "*i32", "ring_table_ptr": "*i32", "splits_ptr": "*i32", "lens_ptr": "*i32",
    "spans_ptr": "*i32", "rows_ptr": "*i32", "starts_ptr": "*i32", "rotation_ptr": "*bf16", "key_rotation_ptr": "*bf16",
    "value_rotation_ptr": "*bf16", "query_rotation_ptr": "*bf16",
}  # fmt: skip


def compile_for(capability: int, kernel: Any, warps: int, source: type = ASTSource, **constants: Any) -> None:
    """Compile to machine code; raises whatever Triton does."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = POINTERS.get(name, "*fp32")
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i64" if name.endswith("page_stride") else "i32"
    if kernel is decode.decode_kernel:
        types |= {"query_ptr": "*fp16", "out_ptr": "*fp32"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    compiled = triton.compile(
        source(kernel, types, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    print(kernel.__name__, capability, len(compiled.asm["cubin"]), flush=True)


def main(capability: int) -> None:
    """Each kernel for Llama-3-8B's attention in k4v2, decode for a hard shape too."""
    overlap = capability >= 90
    key, value = side_layouts(formats.parse("k4v2"), 128, 64, 64)
    codec = {"KV_HEADS": 8, "KEY": key, "VALUE": value, "D": 128, "WIDE": 128, "PAGE": 64}
    for ring in (0, 39):
        compile_for(capability, store.store_kernel, 4, RATIO=4, RING=ring, TOKENS=16, OVERLAP=overlap, **codec)
    compile_for(capability, gather.gather_kernel, 4, TOKENS=64, **codec)
    compile_for(capability, plan.plan_kernel, 8, TILE=64, WINDOW=0, SEQUENCES=64, SPLITS=128)
    compile_for(capability, ring_slots_kernel, 4, RECENT=64, RING=39, RING_BLOCKS=2, ROUNDS=8, TOKENS=128)
    for take in (1, 4):
        compile_for(
            capability, reduce.reduce_kernel, 4, KV_HEADS=8, RATIO=4, TAKE=take, D=128, WIDE=128, ROWS=take,
            STEP=32 // take, OVERLAP=overlap,
        )  # fmt: skip
    for name, dim, group, ratio, tile, stages, recent in (
        ("k4v4", 128, 64, 4, 64, 2, 0), ("k8v4", 96, 48, 16, 32, 3, 0), ("k4v4", 128, 64, 4, 64, 2, 64),
        ("k2v2", 96, 48, 16, 32, 3, 64),
    ):  # fmt: skip
        fmt = formats.parse(name)
        key, value = side_layouts(fmt, dim, 64, recent)
        compile_for(
            capability, decode.decode_kernel, 1, GluonASTSource, KEY=key, VALUE=value, D=dim, GROUP=group, RATIO=ratio,
            N=8 if ratio <= 8 else 16, TILE=tile, PAGE=64, STAGES=stages, SOFTCAP=False, WINDOW=0, RECENT=recent,
            RING=fmt.ring_layout(dim, 64).tokens, RING_BLOCKS=fmt.ring_blocks(recent, dim, 64), OVERLAP=overlap,
        )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]))
