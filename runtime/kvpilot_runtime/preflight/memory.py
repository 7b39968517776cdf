"""Estimate, without vLLM, whether weights, one request's KV cache and an engine's buffers fit on this machine."""

import math
import os

from kvpilot_formats import formats, models
from kvpilot_formats.arguments.drafts import drafts
from kvpilot_formats.latent import ENTRY, RANK, LatentFormat
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.request import Request

CPU_OVERHEAD = 2_500 * 2**20
"""Estimated bytes of vLLM's processes on a CPU, besides weights and KV cache (vLLM 0.32.0, SmolLM2-135M)."""

GPU_OVERHEAD = 3 * 2**30
"""Assumed bytes per GPU for activations, CUDA graphs and unused memory of the allocator. The value is not measured."""

SEQUENCES, LARGE_GPU = (256, 1024), 70 * 2**30
"""Default `--max-num-seqs` of vLLM 0.32 on (small, large) GPUs, and the memory in bytes from which a GPU is large."""

RESULTS = 3
"""Assumed number of partial results of split-KV decode per sequence, without drafts. It determines their buffer's size.
"""


def stages(request: Request) -> int:
    """Return the number of pipeline-parallel stages of an engine."""
    return request.arguments.count("--pipeline-parallel-size")


def nodes(request: Request) -> int:
    """Return the number of machines (nodes) of one engine."""
    return request.arguments.count("--nnodes")


def ranks(request: Request) -> int:
    """Return the number of GPUs of one engine: tensor-parallel size times pipeline stages."""
    return request.tensor_parallel * stages(request)


def here(request: Request) -> int:
    """Return the number of GPUs that one engine needs on this machine."""
    return -(-ranks(request) // nodes(request))


def check(
    fmt: formats.Format | LatentFormat, config: models.Architecture, weights: int, request: Request,
    platform: machine.Platform,
) -> None:  # fmt: skip
    """Compare the memory that an engine needs with the available memory. Skip a comparison whose limit is unknown.

    Args:
        weights: bytes of the whole model's weights.

    Raises:
        PreflightError: DoesNotFit.
    """
    length = request.max_model_len or config.max_positions
    in_16_bits = len({layer for layer in request.skip_layers or () if layer.isdecimal()})
    per_token = config.token_bytes(fmt, in_16_bits)
    # The ranks share a request's cache. But every tensor-parallel rank holds all latents, and if there are more ranks
    # than KV heads, each rank holds one whole head.
    shares = stages(request) * (1 if config.latent else max(1, min(request.tensor_parallel, config.kv_heads)))
    wanted = (length or 0) * per_token // shares
    if request.kv_bytes is not None and wanted > request.kv_bytes:
        most = request.kv_bytes * shares // per_token
        raise PreflightError(
            "DoesNotFit",
            f"one request of {length} tokens needs {_mib(wanted)} of KV cache in {fmt.name!r} ({per_token} bytes a "
            f"token), but the KV cache has {_mib(request.kv_bytes)}; set maxModelLen to at most {most}, or "
            "give the cache more",
        )
    kv = wanted if request.kv_bytes is None else request.kv_bytes
    if platform == "cpu":
        have, extra, what = machine.available_memory(), CPU_OVERHEAD + offloaded(request), "memory available here"
        weights //= nodes(request)
    else:
        have, smallest = _of_gpus(request)
        extra = GPU_OVERHEAD + (0 if smallest is None else step_buffers(fmt, config, request, smallest))
        what = f"{request.memory_fraction:.0%} of each GPU's memory, less what others use"
        # Data-parallel engines may share experts, so assume the smallest possible size per GPU.
        weights //= ranks(request) * request.arguments.count("--data-parallel-size")
    need = weights + kv + extra
    if have is not None and need > have:
        raise PreflightError(
            "DoesNotFit",
            f"weights {_mib(weights)} + KV cache {_mib(kv)} + engine {_mib(extra)} = "
            f"{_mib(need)} do not fit in {_mib(have)} ({what}); use a smaller model, a shorter maxModelLen, a smaller "
            "KV-cache dtype, or more memory",
        )


def step_buffers(fmt: formats.Format | LatentFormat, config: models.Architecture, request: Request, total: int) -> int:
    """Estimate how many bytes of one GPU our backends use in addition to weights and KV pages.

    They use buffers for decode, and a workspace for the contexts of prefill. Return 0 for vLLM's own dtypes.

    Args:
        total: the GPU's memory in bytes.
    """
    asked = request.arguments.value("--max-num-seqs") or ""
    sequences = int(asked) if asked.isdecimal() else SEQUENCES[total >= LARGE_GPU]
    heads = -(-config.heads // request.tensor_parallel)
    if isinstance(fmt, LatentFormat):
        return sequences * heads * (4 * RANK + 2 * ENTRY)
    if not fmt.ours:
        return 0
    tokens, dim = 1 + drafts(request.arguments), formats.stored_dim(config.head_dim) or config.head_dim
    plan = sequences * heads * dim * (4 * max(RESULTS, tokens) + 2 * tokens)
    return plan + int(total * request.memory_fraction) // options.WORKSPACE_SHARE


def _of_gpus(request: Request) -> tuple[int | None, int | None]:
    """Return two sizes in bytes: the least memory that vLLM may use on one of the GPUs, and the smallest GPU's memory.

    A size is None if it is unknown.
    """
    gpus, seen = machine.gpus(), here(request)
    if not gpus:
        if machine.may_have_gpus():
            return None, None
        raise PreflightError("DoesNotFit", "no GPU is visible and the installed vLLM is made for GPUs; request nvidia.com/gpu, or use the CPU image")  # fmt: skip  # noqa: E501
    if len(gpus) < seen:
        stages_too = f" times --pipeline-parallel-size {stages(request)}" if stages(request) > 1 else ""
        shared = f", {seen} on each of {nodes(request)} nodes," if nodes(request) > 1 else ""
        raise PreflightError("DoesNotFit", f"--tensor-parallel-size {request.tensor_parallel}{stages_too} needs as many GPUs{shared} but {len(gpus)} are visible; request more, or lower it")  # fmt: skip  # noqa: E501
    # vLLM takes a fraction of the GPU's whole memory, but at most the memory that other processes leave free.
    known = [(gpu.total, gpu.used or 0) for gpu in gpus[:seen] if gpu.total is not None]
    taken = (min(int(total * request.memory_fraction), total - used) for total, used in known)
    return min(taken, default=None), min((total for total, _ in known), default=None)


def offloaded(request: Request) -> int:
    """Return the host memory, in bytes, that offloaded pages of all data-parallel engines take; 0 without any."""
    value = request.arguments.value(options.OFFLOAD)
    if value is None:
        return 0
    try:
        gib = float(value)
    except ValueError:
        gib = 0.0
    if not 0 < gib < math.inf:
        raise PreflightError("BadArguments", f"{options.OFFLOAD} is {value!r}, but must be a number of GiB above 0; set it to the host memory that offloaded pages may take, or leave it out")  # fmt: skip  # noqa: E501
    return int(gib * 2**30) * request.arguments.count("--data-parallel-size")


def check_offload(request: Request, platform: machine.Platform) -> None:
    """Compare the host memory that offloading needs with the available memory and /dev/shm."""
    wanted, have = offloaded(request), machine.available_memory()
    if have is not None and wanted > have:
        raise PreflightError(
            "DoesNotFit",
            f"{options.OFFLOAD}: offloaded pages need {_mib(wanted)} of host memory, but {_mib(have)} are available; "
            "offload less, or give the container more memory",
        )
    # On a GPU, vLLM maps these pages as a file in /dev/shm, which all ranks share.
    have = machine.shared_memory() if platform != "cpu" else None
    if have is not None and wanted > have:
        raise PreflightError(
            "DoesNotFit",
            f"{options.OFFLOAD}: offloaded pages need {_mib(wanted)} of /dev/shm, but {_mib(have)} are free there; "
            "offload less, or mount a larger /dev/shm (a container's own has 64 MiB)",
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def cpu_kv_bytes() -> int | None:
    """Return the KV cache's size in bytes from `VLLM_CPU_KVCACHE_SPACE` (whole GiB); None if it is not set."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not text:
        return None
    try:
        return int(text) * 2**30
    except ValueError:
        raise PreflightError("BadArguments", f"VLLM_CPU_KVCACHE_SPACE is {text!r}, but vLLM takes whole GiB; use --kv-cache-memory-bytes, which takes bytes (64M)") from None  # fmt: skip  # noqa: E501
