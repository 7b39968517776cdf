"""Whether an engine can start as asked, decided before vLLM or a GPU is touched.

It takes well under a second for a model in a folder, and for one on the hub as long as fetching its config.json does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvpilot_kernels import formats, models
from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime import bounded_check, compat, engines, hub, machine, memory, options
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.modelconfig import read_config, weight_bytes
from kvpilot_runtime.retention import SinksAndWindow

Dtype = formats.Format | latent.LatentFormat

CPU_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""vLLM's own dtypes that its CPU backend really implements; it accepts the others and reads garbage."""

OLDEST_GPU = (8, 0)
"""Compute capability from which on our formats run: their kernels multiply in bfloat16 on tensor cores."""

CALIBRATION_OFF = "off"
"""In the place of a calibration file: serve without factors."""

_POOLING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "ForRewardModeling", "EmbeddingModel",
            "ForTextEncoding")  # fmt: skip
"""Ends of the names of classes that vLLM turns into pooling models."""


@dataclass(frozen=True)
class Request:
    """What `kvpilot-serve` was asked for; sizes in bytes, lengths in tokens.

    `dtype` is of the KV cache and `model_dtype` of the weights; `skip_layers` and `recent`, the tokens of the recent
    window, are None when the user said nothing. `retention` is None where all tokens are kept.
    """

    model: str
    dtype: str = "auto"
    model_dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel: int = 1
    memory_fraction: float = 0.9
    kv_bytes: int | None = None
    skip_layers: tuple[str, ...] | None = None
    calibration: str | None = None
    revision: str | None = None
    others: tuple[str, ...] = ()
    recent: int | None = None
    retention: SinksAndWindow | None = None


@dataclass
class Findings:
    """What a preflight that passed has to say.

    Attributes:
        config: what the model says of itself; None where it could not be had.
        skip_layers: the layers that are to stay in 16 bits.
        disable_window: vLLM is to build layers without the window that no context of this model can leave.
        warnings: as (reason, message).
    """

    config: models.Architecture | None = None
    skip_layers: tuple[str, ...] = ()
    disable_window: bool = False
    warnings: list[tuple[str, str]] = field(default_factory=list)


def check(request: Request) -> Findings:
    """Look at model, dtype and memory, in this order.

    Raises:
        PreflightError: the engine cannot work as asked.
    """
    findings = Findings(skip_layers=request.skip_layers or ())
    platform = machine.platform()
    fmt = _dtype(request.dtype)
    folder = model_folder(request.model)
    if folder is not None:
        findings.config = read_config(folder)
        _architecture(findings.config, request, findings)
    _platform_dtype(fmt, platform, request, findings)
    if any(options.given(request.others, options.OFFLOAD)):
        _offload(request, platform)
    if fmt.ours:
        _our_options(fmt, request)
    _window(fmt, request, findings)
    if folder is None:
        _ask_hub(request, findings)
    findings.warnings += bounded_check.check(fmt, findings.config, request, platform)
    findings.disable_window = (
        request.retention is not None and findings.config is not None and findings.config.idle_window
    )
    if isinstance(fmt, latent.LatentFormat):
        _latent_dtype(fmt, findings.config, request)
    elif fmt.ours and findings.config is not None:
        _our_dtype(fmt, findings.config, request, findings, platform)
    elif fmt.ours and request.skip_layers is None:
        findings.skip_layers = (options.SLIDING,)  # of no effect on a model without such layers
    if folder is not None and findings.config is not None:
        memory.check(fmt, findings.config, weight_bytes(folder) + _draft_bytes(request, folder), request, platform)
    return findings


def _draft_bytes(request: Request, model: Path) -> int:
    """Bytes of the weights of a draft model that lies in a folder of its own.

    Raises:
        PreflightError: ModelNotFound, as `weight_bytes`.
    """
    asked = options.speculation(request.others)
    folder = model_folder(asked.get("model", "")) if asked.get("method") in options.DRAFT_MODELS else None
    return 0 if folder is None or folder == model or not asked.get("model") else weight_bytes(folder)


def _ask_hub(request: Request, findings: Findings) -> None:
    file = hub.config_file(request.model, request.revision)
    unchecked = "its architecture and size are" if file is None else "whether its weights fit is"
    findings.warnings.append(
        ("ModelNotChecked", f"model {request.model!r} is on the hub: {unchecked} for vLLM to find out")
    )
    if file is not None:
        findings.config = read_config(file)
        _architecture(findings.config, request, findings)


def model_folder(model: str) -> Path | None:
    """The folder that `model` names, or None for a hub id such as `Qwen/Qwen3-8B`."""
    path = Path(model)
    return path if path.is_absolute() or model.startswith(".") or path.exists() else None


def _dtype(name: str) -> Dtype:
    if name in latent.names():
        return latent.parse(name)
    if name in formats.VLLM_DTYPES_LEFT_OUT:
        # vLLM's to judge; counted as its smallest, so that nothing is refused that could fit.
        return replace(formats.parse("nvfp4"), name=name)
    try:
        return formats.parse(name)
    except formats.UnknownFormatError as error:
        raise PreflightError("DtypeUnsupported", f"--kv-cache-dtype: {error}") from error


def _architecture(config: models.Architecture, request: Request, findings: Findings) -> None:
    model = request.model
    if not config.architectures:
        raise PreflightError("ModelUnsupported", f"model {model!r}: config.json names no architecture; add its class under 'architectures'")  # fmt: skip  # noqa: E501
    _custom_code(config, request)
    if config.doubt:
        findings.warnings.append(("ModelNotKnown", f"model {model!r}: {config.doubt}"))
    known = engines.known_architectures()
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


def _custom_code(config: models.Architecture, request: Request) -> None:
    """Code from a model's repository runs only where the user has said that it may."""
    if not config.custom_code or any(arg.split("=", 1)[0] == "--trust-remote-code" for arg in request.others):
        return
    ours = engines.known_model_types()
    if not ours or config.model_type in ours or models.known(config.model_type):
        return
    raise PreflightError(
        "ModelUnsupported",
        f"model {request.model!r}: its model_type {config.model_type!r} is neither vLLM's nor transformers', and needs "
        "the code in its own repository (auto_map); if you trust its publisher, add --trust-remote-code",
    )


def _platform_dtype(fmt: Dtype, platform: machine.Platform, request: Request, findings: Findings) -> None:
    if platform == "cpu":
        if not fmt.ours and fmt.name not in CPU_DTYPES:
            findings.warnings.append(
                ("DtypeUnverified", f"kv-cache dtype {fmt.name!r}: vLLM on CPU accepts it without implementing it, and "
                 f"the answers are wrong; use one of {', '.join([*sorted(CPU_DTYPES), *formats.own_names()])}")
            )  # fmt: skip
        return
    for gpu in machine.gpus()[: memory.here(request)]:
        have = ".".join(map(str, gpu.capability))
        instead = "'auto' or 'int8'" if gpu.capability >= OLDEST_GPU else "'auto'"
        if fmt.name.startswith("fp8") and gpu.capability < (8, 9):
            raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} needs compute capability 8.9, and {gpu.name} has {have}; use {instead}")  # fmt: skip  # noqa: E501
        if fmt.ours and gpu.capability < OLDEST_GPU:
            raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} needs compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]}, and {gpu.name} has {have}; use 'auto'")  # fmt: skip  # noqa: E501
    if fmt.ours and request.model_dtype in ("float", "float32"):
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} on a GPU needs a model in 16 bits, and --dtype is {request.model_dtype!r}; use --dtype=bfloat16, or --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501


def _offload(request: Request, platform: machine.Platform) -> None:
    """Whether this vLLM can offload, and this machine has the memory for it."""
    if not engines.can_offload():
        raise PreflightError("BadArguments", f"{options.OFFLOAD}: the installed vLLM has no offloading to host memory; leave it out, or use a runtime image with vLLM 0.28 or newer")  # fmt: skip  # noqa: E501
    memory.check_offload(request, platform)


def _our_options(fmt: Dtype, request: Request) -> None:
    """What else was asked for, whatever the model is."""
    every = (*request.others, f"--tensor-parallel-size={request.tensor_parallel}")
    if (found := options.refused(every, os.environ)) is not None:
        option, what = found
        raise PreflightError("BadArguments", f"{option}: {what} does not work with kv-cache dtype {fmt.name!r}; leave it out, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if any(options.given(request.others, "--enable-sleep-mode")) and not compat.wakes_as_it_was():
        raise PreflightError("BadArguments", f"--enable-sleep-mode: before vLLM {'.'.join(map(str, compat.SLEEP_FROM))} an engine with kv-cache dtype {fmt.name!r} does not wake up as it was; leave it out, or use a runtime image with a newer vLLM")  # fmt: skip  # noqa: E501
    named = request.calibration not in (None, CALIBRATION_OFF)
    if fmt.calibrated_only and request.calibration == CALIBRATION_OFF:
        raise PreflightError("BadArguments", f"--calibration off: without calibration kv-cache dtype {fmt.name!r} is not accurate; leave the option out, so that the engine calibrates itself, or give a file of `kvpilot calibrate`")  # fmt: skip  # noqa: E501
    if named and not Path(request.calibration or "").is_file():
        raise PreflightError("BadArguments", f"--calibration {request.calibration!r}: there is no such file; check that its volume is mounted, or leave the option out: the engine then calibrates itself")  # fmt: skip  # noqa: E501


def _window(fmt: Dtype, request: Request, findings: Findings) -> None:
    """Whether the recent window that was asked for can be served."""
    if not request.recent:
        return
    length = request.max_model_len or (findings.config.max_positions if findings.config is not None else None)
    if not fmt.has_ring:
        findings.warnings.append(
            ("WindowUnused", f"--recent-tokens {request.recent}: kv-cache dtype {fmt.name!r} has no bits to add to its "
             "last tokens; the option is of no effect")
        )  # fmt: skip
    elif length is not None and request.recent > length:
        raise PreflightError("BadArguments", f"--recent-tokens {request.recent} is more than the context of {length} tokens; use a smaller window ({', '.join(map(str, formats.RECENT_CHOICES))}), or a longer --max-model-len")  # fmt: skip  # noqa: E501


def _our_dtype(
    fmt: Dtype, config: models.Architecture, request: Request, findings: Findings, platform: machine.Platform
) -> None:
    """Whether our backend can serve the model, and which of its layers stay in 16 bits."""

    def refuse(what: str, remedy: str = "use --kv-cache-dtype=auto") -> None:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} does not support {what}; {remedy}")

    what = models.unsupported(config, platform == "cuda", request.tensor_parallel)
    if config.latent and models.unsupported_latent(config) is None:
        instead = " or ".join(f"--kv-cache-dtype={name}" for name in ("auto", *latent.names()))
        refuse("multi-head latent attention, which has dtypes of its own", f"use {instead}")
    if what is not None:
        refuse(what)
    if _pools(config, request):
        refuse(f"pooling, which is what vLLM serves {config.architectures[0]!r} for")
    if config.image_prefix and not any(options.given(request.others, "--language-model-only")):
        refuse("images whose tokens attend to each other both ways", "serve text alone with --language-model-only, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    findings.disable_window = config.idle_window
    drafted = options.speculation(request.others).get("method") in options.DRAFT_MODELS
    if drafted and (config.layers != config.full_layers or config.state_layers or request.skip_layers):
        refuse("a draft model, EAGLE or MTP beside layers that are not full attention, or stay in 16 bits,", "speculate by ngram, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if config.layers != config.full_layers and any(options.given(request.others, options.OFFLOAD)):
        kind = "sliding-window layers" if config.window_layers else "chunked attention"
        refuse(f"{options.OFFLOAD} for a model with {kind}, whose requests can wait for each other for ever when blocks are loaded", "leave it out, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if config.window_layers:
        if request.skip_layers is None:
            findings.skip_layers = (options.SLIDING,)
        elif options.SLIDING not in request.skip_layers:
            refuse(f"the {config.window_layers} sliding-window layers of this model", f"keep them in 16 bits with --kv-cache-dtype-skip-layers={options.SLIDING}")  # fmt: skip  # noqa: E501


def _latent_dtype(fmt: latent.LatentFormat, config: models.Architecture | None, request: Request) -> None:
    """Whether our backend of multi-head latent attention can serve the model as asked."""

    def refuse(what: str, remedy: str = "leave it out, or use --kv-cache-dtype=auto") -> None:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} does not support {what}; {remedy}")

    if options.speculation(request.others):
        refuse("speculative decoding")
    if any(options.given(request.others, options.OFFLOAD)):
        refuse(options.OFFLOAD)
    if request.skip_layers:
        refuse("--kv-cache-dtype-skip-layers")
    if request.calibration not in (None, CALIBRATION_OFF):
        refuse(f"--calibration {request.calibration!r}: there are no static factors of latents")
    if config is None:
        return
    if (what := models.unsupported_latent(config)) is not None:
        refuse(what, "use --kv-cache-dtype=auto")
    if _pools(config, request):
        refuse(f"pooling, which is what vLLM serves {config.architectures[0]!r} for", "use --kv-cache-dtype=auto")


def _pools(config: models.Architecture, request: Request) -> bool:
    """Whether vLLM would serve this model for embeddings, scores or classes, as far as is known without asking it."""
    if ("--runner", "generate") in options.given(request.others, "--runner"):
        return False
    folder, name = model_folder(request.model), config.architectures[0]
    if folder is not None and (folder / "modules.json").exists():  # sentence-transformers
        return True
    return name in engines.pooling_architectures() or name.endswith(_POOLING)
