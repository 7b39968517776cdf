"""Measure the host's time in a mixed step, without a GPU: `python -m benchmarks.engine.host_time`.

In this step, 16 sequences decode, and one prompt with 8,192 cached tokens gets 100 new ones. The model has 32 layers of
Llama-3-8B's shape, with `k4v4` and a recent window. The backend's code is the real one on CPU tensors. Compiled kernels
and FlashAttention are replaced by functions that do nothing, so their launches cost nothing. The program prints the
smallest times of all steps in microseconds: for the metadata of a step, and for `forward` and its parts in each layer.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends import fa_utils

from kvpilot_formats import formats
from kvpilot_kernels.gpu.launch import launches, pages
from kvpilot_runtime.vllm_api.compat import backend_class

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 64
DECODES, CONTEXT, NEW, PADDED = 16, 8192, 100, 120
DTYPE, LSE = "k4v4", torch.zeros(HEADS, NEW)
PARTS = ("store", "attend", "merge", "gather")
KERNELS = ("store_kernel", "decode_kernel", "reduce_kernel", "gather_kernel")


class Program:
    """Stand-in for a compiled program. Its launcher is a C function that ignores its arguments."""

    function, packed_metadata, n_regs, metadata = 1, (), 128, SimpleNamespace(shared=0)
    run = staticmethod("".format)


class Compiler:
    """Stand-in for a kernel that Triton compiles."""

    arg_names = ()

    def __getitem__(self, _grid: Any) -> Callable[..., Program]:
        return lambda *_args, **_constants: Program()


def replace_gpu_parts() -> Any:
    """Replace everything that needs a GPU. Return the backend's module."""
    attend = lambda *_args, out, **_options: (out, LSE)  # noqa: E731
    vars(fa_utils).update(flash_attn_varlen_func=attend)
    from kvpilot_runtime.backends import cuda, packed

    vars(pages).update(dict.fromkeys(KERNELS, Compiler()), fill_splits=lambda *_args: None)
    active = SimpleNamespace(get_current_device=int, get_current_stream=abs)
    vars(launches).update(driver=SimpleNamespace(active=active), CompiledKernel=Program)
    vars(cuda).update(get_flash_attn_version=lambda **_: 3, workspace_bytes=lambda _: 4 * KV_HEADS * DIM * 20000)
    vars(packed).update(get_current_vllm_config=lambda: CONFIG, calibration_of=lambda _config: None)
    return cuda


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192),
    cache_config=SimpleNamespace(gpu_memory_utilization=0.9, cache_dtype=DTYPE),
    compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=512),
    model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=20480),
    parallel_config=SimpleNamespace(enable_dbo=False, ubatch_size=0, world_size=1),
    speculative_config=None, kv_transfer_config=None,
)  # fmt: skip


def batch() -> SimpleNamespace:
    """Return the description of the batch that vLLM gives to a metadata builder."""
    counts = [1] * DECODES + [NEW]
    lens = torch.tensor([CONTEXT + n for n in counts], dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=len(counts), causal=True, max_query_len=NEW, num_actual_tokens=sum(counts), seq_lens=lens,
        query_start_loc_cpu=starts, query_start_loc=starts, seq_lens_cpu_upper_bound=lens, mm_req_doc_ranges=None,
        is_prefilling=torch.tensor([n > 1 for n in counts]), slot_mapping=torch.zeros(PADDED, dtype=torch.int64),
        block_table_tensor=torch.ones(len(counts), 320, dtype=torch.int32),
    )  # fmt: skip


def steps(cuda: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return two functions. The first builds a step's metadata, and the second runs all layers with it."""
    fmt, cpu, common = formats.parse(DTYPE), torch.device("cpu"), batch()
    layers = CONFIG.compilation_config.static_forward_context
    shape = (4, KV_HEADS, BLOCK, fmt.row_bytes(DIM))
    tensors = []
    for i in range(LAYERS):
        impl = cuda.CudaImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, DTYPE)
        layers[f"{i}"] = SimpleNamespace(impl=impl, layer_name=f"{i}")
        rows = torch.zeros(PADDED, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16)
        split = rows.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
        query, key, value = (x.view(PADDED, -1, DIM) for x in split)
        tensors.append((query, key, value, torch.zeros(shape, dtype=torch.uint8), torch.zeros_like(query)))
    kind = getattr(cuda, backend_class(DTYPE))
    builder = kind.get_builder_cls()(SimpleNamespace(block_size=BLOCK), list(layers), CONFIG, cpu)

    def forward(metadata: Any) -> None:
        for layer, (query, key, value, cache, out) in zip(layers.values(), tensors, strict=True):
            layer.impl.forward(layer, query, key, value, cache, metadata, out)

    return lambda: builder.build(0, common), forward


def main() -> None:
    """Measure the times, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    count: int = parser.parse_args().steps
    torch.set_num_threads(1)
    describe, forward = steps(replace_gpu_parts())
    found: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        for _ in range(count):
            times = [time.perf_counter()]
            metadata = describe()
            times.append(time.perf_counter())
            forward(metadata)
            times.append(time.perf_counter())
            found["metadata, a step"].append(times[1] - times[0])
            found["forward, a layer"].append((times[2] - times[1]) / LAYERS)
        spent = {name: watch(name) for name in PARTS}
        for _ in range(count):
            for part in spent.values():
                part.clear()
            forward(describe())
            for name, part in spent.items():
                found[f"  {name}"].append(sum(part) / LAYERS)
    for name, seconds in found.items():
        print(f"{name:18} {min(seconds) * 1e6:7.1f} us")


def watch(name: str) -> list[float]:
    """Return a list to which every call of a method of `GpuPages` adds its seconds."""
    method, spent = getattr(pages.GpuPages, name), []

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        result = method(*args)
        spent.append(time.perf_counter() - began)
        return result

    setattr(pages.GpuPages, name, timed)
    return spent


if __name__ == "__main__":
    main()
