"""Whether an engine can start as asked, decided in well under a second and before vLLM or a GPU is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvpilot_kernels import formats
from kvpilot_runtime import engines, machine
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.modelconfig import ModelConfig, read_config, weight_bytes

CPU_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""vLLM's own dtypes that its CPU backend really implements; it accepts the others and reads garbage."""

CPU_OVERHEAD = 2_500 * 2**20
"""Bytes that vLLM's three processes take on CPU beyond weights and KV cache: an estimate (0.32.0, SmolLM2-135M)."""

GPU_OVERHEAD = 3 * 2**30
"""Bytes kept per GPU for activations, CUDA graphs and the allocator's slack: an allowance, not a measurement."""


@dataclass(frozen=True)
class Request:
    """What `kvpilot-serve` was asked for; sizes in bytes, lengths in tokens."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel: int = 1
    memory_fraction: float = 0.9
    kv_bytes: int | None = None
    skip_layers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass
class Findings:
    """What a preflight that passed has to say: warnings as (reason, message)."""

    warnings: list[tuple[str, str]] = field(default_factory=list)


def check(request: Request) -> Findings:
    """Look at model, dtype and memory, in this order.

    Raises:
        PreflightError: the engine cannot work as asked.
    """
    findings = Findings()
    platform = machine.platform()
    fmt = _dtype(request.dtype)
    folder = model_folder(request.model)
    if folder is None:
        findings.warnings.append(
            ("ModelNotChecked", f"model {request.model!r} is a hub id: its architecture and size are checked by vLLM")
        )
        _platform_dtype(fmt, platform, request.tensor_parallel, findings)
        return findings
    config = read_config(folder)
    _architecture(config, request.model, findings)
    _platform_dtype(fmt, platform, request.tensor_parallel, findings)
    if fmt.ours:
        _our_dtype(fmt, config, request)
    _memory(fmt, config, weight_bytes(folder), request, platform)
    return findings


def model_folder(model: str) -> Path | None:
    """The folder that `model` names, or None for a hub id such as `Qwen/Qwen3-8B`."""
    path = Path(model)
    return path if path.is_absolute() or model.startswith(".") or path.exists() else None


def _dtype(name: str) -> formats.Format:
    try:
        return formats.parse(name)
    except formats.UnknownFormatError as error:
        raise PreflightError("DtypeUnsupported", f"--kv-cache-dtype: {error}") from error


def _architecture(config: ModelConfig, model: str, findings: Findings) -> None:
    known = engines.known_architectures()
    if not config.architectures:
        raise PreflightError("ModelUnsupported", f"model {model!r}: config.json names no architecture; add its class under 'architectures'")  # fmt: skip  # noqa: E501
    if not known or any(a in known for a in config.architectures):
        return
    name = config.architectures[0]
    if config.custom_code or any(engines.known_to_transformers(a) for a in config.architectures):
        findings.warnings.append(
            ("ModelNotNative", f"architecture {name!r} is not vLLM's own: it tries the slower Transformers fallback")
        )
        return
    raise PreflightError(
        "ModelUnsupported",
        f"model {model!r}: architecture {name!r} is unknown to the installed vLLM ({len(known)} are known); use a "
        "model that vLLM serves, or a runtime image with a newer vLLM",
    )


def _platform_dtype(fmt: formats.Format, platform: machine.Platform, gpus: int, findings: Findings) -> None:
    if fmt.calibrated_only:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} needs a calibration file, which this release does not read; use 'k4v4' or 'k4v2'")  # fmt: skip  # noqa: E501
    if platform == "cpu":
        if not fmt.ours and fmt.name not in CPU_DTYPES:
            findings.warnings.append(
                ("DtypeUnverified", f"kv-cache dtype {fmt.name!r}: vLLM on CPU accepts it without implementing it, and "
                 f"the answers are wrong; use one of {', '.join([*sorted(CPU_DTYPES), *_served()])}")
            )  # fmt: skip
        return
    if fmt.ours:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} runs on CPU only in this release; on a GPU use 'fp8' or 'auto'")  # fmt: skip  # noqa: E501
    for gpu in machine.gpus()[:gpus]:
        if fmt.name.startswith("fp8") and gpu.capability < (8, 9):
            have = ".".join(map(str, gpu.capability))
            raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} needs compute capability 8.9, and {gpu.name} has {have}; use 'auto' or 'int8_per_token_head'")  # fmt: skip  # noqa: E501


def _served() -> list[str]:
    return [name for name in formats.own_names() if not formats.parse(name).calibrated_only]


def _our_dtype(fmt: formats.Format, config: ModelConfig, request: Request) -> None:
    def refuse(what: str, remedy: str = "use --kv-cache-dtype=auto") -> None:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} does not support {what}; {remedy}")

    if config.head_dim not in formats.HEAD_DIMS and not config.latent_attention:
        refuse(f"head_dim {config.head_dim} (it takes {', '.join(map(str, formats.HEAD_DIMS))})")
    for present, what in (
        (config.latent_attention, "multi-head latent attention"),
        (config.encoder_decoder, "encoder-decoder models"),
        (config.alibi, "ALiBi"),
        (config.sinks, "attention sinks"),
    ):
        if present:
            refuse(what)
    if config.sliding_layers and "sliding_window" not in request.skip_layers:
        refuse(f"the {config.sliding_layers} sliding-window layers of this model", "keep them in 16 bits with --kv-cache-dtype-skip-layers=sliding_window")  # fmt: skip  # noqa: E501
    for option in ("--speculative-config", "--kv-transfer-config"):
        if any(arg == option or arg.startswith(f"{option}=") for arg in request.others):
            raise PreflightError("BadArguments", f"{option} does not work with kv-cache dtype {fmt.name!r} yet; leave one of the two out")  # fmt: skip  # noqa: E501


def _memory(
    fmt: formats.Format, config: ModelConfig, weights: int, request: Request, platform: machine.Platform
) -> None:
    length = request.max_model_len or config.max_model_len
    per_token = 0 if config.latent_attention else _bytes_per_token(fmt, config)
    wanted = (length or 0) * per_token // request.tensor_parallel
    if request.kv_bytes is not None and wanted > request.kv_bytes:
        raise PreflightError(
            "DoesNotFit",
            f"one request of {length} tokens needs {_mib(wanted)} of KV cache in {fmt.name!r} ({per_token} bytes a "
            f"token) and the KV cache has {_mib(request.kv_bytes)}; set maxModelLen to at most "
            f"{request.kv_bytes * request.tensor_parallel // per_token}, or give the cache more",
        )
    if platform == "cpu":
        have = machine.available_memory()
        kv = wanted if request.kv_bytes is None else request.kv_bytes
        need, what, extra = weights + kv + CPU_OVERHEAD, "memory available here", CPU_OVERHEAD
    else:
        gpus = machine.gpus()
        if not gpus:
            raise PreflightError("DoesNotFit", "no GPU is visible and the installed vLLM is made for GPUs; request nvidia.com/gpu, or use the CPU image")  # fmt: skip  # noqa: E501
        if len(gpus) < request.tensor_parallel:
            raise PreflightError("DoesNotFit", f"--tensor-parallel-size {request.tensor_parallel} needs as many GPUs and {len(gpus)} are visible; request more, or lower it")  # fmt: skip  # noqa: E501
        # vLLM takes its fraction of a whole GPU, but cannot take what others hold.
        have = min(
            min(int(g.total * request.memory_fraction), g.total - g.used) for g in gpus[: request.tensor_parallel]
        )
        kv = wanted if request.kv_bytes is None else request.kv_bytes
        need = weights // request.tensor_parallel + kv + GPU_OVERHEAD
        what, extra = f"{request.memory_fraction:.0%} of each GPU's memory, less what others use", GPU_OVERHEAD
    if need > have:
        raise PreflightError(
            "DoesNotFit",
            f"weights {_mib(weights // request.tensor_parallel)} + KV cache {_mib(kv)} + engine {_mib(extra)} = "
            f"{_mib(need)} do not fit in {_mib(have)} ({what}); use a smaller model, a shorter maxModelLen, a smaller "
            "KV-cache dtype, or more memory",
        )


def _bytes_per_token(fmt: formats.Format, config: ModelConfig) -> int:
    """Bytes of KV cache a token takes; sliding-window layers, which hold no more than a window, are left out."""
    layers = config.layers - config.sliding_layers
    if fmt.name == "auto":
        return layers * config.kv_heads * config.head_dim * 2 * config.element_bytes
    return fmt.bytes_per_token(layers=layers, kv_heads=config.kv_heads, head_dim=config.head_dim)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def cpu_kv_bytes() -> int | None:
    """The KV cache's size that the environment sets for vLLM on CPU (`VLLM_CPU_KVCACHE_SPACE`, whole GiB)."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not text:
        return None
    try:
        return int(text) * 2**30
    except ValueError:
        raise PreflightError("BadArguments", f"VLLM_CPU_KVCACHE_SPACE is {text!r}, and vLLM takes whole GiB; use --kv-cache-memory-bytes, which takes bytes (64M)") from None  # fmt: skip  # noqa: E501
