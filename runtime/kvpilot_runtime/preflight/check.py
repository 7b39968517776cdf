"""Preflight: check a request to start an engine, before vLLM is imported or a GPU is used.

For a model in a folder the check takes well under a second. For a model on the hub it first fetches config.json.
"""

import os
from dataclasses import replace
from pathlib import Path

from kvpilot_formats import dtypes, formats, hardware, latent, models
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, speculation
from kvpilot_formats.dtypes import Dtype
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import elsewhere, hub, installed, machine, memory, own_dtypes
from kvpilot_runtime.preflight.modelconfig import read_config, weight_bytes
from kvpilot_runtime.preflight.request import Findings, Request, model_folder
from kvpilot_runtime.transfer import disk_file
from kvpilot_runtime.vllm_api import compat

CPU_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""Dtypes of vLLM that its CPU backend implements. It accepts other dtypes without an error, but answers garbage."""


def check(request: Request) -> Findings:
    """Check a request's model, dtype, options and memory. Raise PreflightError at the first fault.

    Return the warnings, the model's architecture, and the arguments that follow from it.
    """
    findings = Findings(skip_layers=request.skip_layers or ())
    platform = machine.platform()
    fmt = _dtype(request.dtype)
    folder = model_folder(request.model)
    left = elsewhere.look(request, platform)
    findings.warnings += left.warnings()
    config = model_folder(elsewhere.config_source(request)) if left.config is None else None
    if config is not None:
        findings.config = elsewhere.as_cached(read_config(config, elsewhere.overrides(request)))
        _architecture(findings.config, request, left, findings)
    if left.gpus is None:
        _platform_dtype(fmt, platform, request, findings)
        findings.warnings += memory.unknown(request, platform)
    if request.arguments.on(options.OFFLOAD):
        memory.check_offload(request, platform)
    if request.disk_path is not None or request.disk_bytes is not None:
        _disk(request)
    if fmt.ours:
        own_dtypes.check_options(fmt, request)
    own_dtypes.check_window(fmt, request, findings)
    if config is None and left.config is None:
        _ask_hub(request, left, findings)
    if isinstance(fmt, latent.LatentFormat):
        own_dtypes.check_latent(fmt, findings.config, request)
    elif fmt.ours and findings.config is not None:
        own_dtypes.check_layers(fmt, request, findings)
        own_dtypes.check_own(fmt, findings.config, request, findings)
    elif fmt.ours and request.skip_layers is None:
        findings.skip_layers = (options.SLIDING,)  # this option is harmless for models without sliding-window layers
    if folder is not None and findings.config is not None and left.gpus is None:
        weights = weight_bytes(folder) + _draft_bytes(request, folder) if left.weights is None else 0
        # With fit_length, vLLM chooses the longest context that fits, so check only that one token fits.
        sized = replace(request, max_model_len=1) if request.fit_length else request
        memory.check(fmt, findings.config, weights, sized, platform)
    return findings


def _draft_bytes(request: Request, model: Path) -> int:
    """Return the size in bytes of a draft model's weights, if it has a folder of its own; else 0."""
    asked = speculation(request.arguments)
    folder = model_folder(asked.get("model", "")) if asked.get("method") in DRAFT_MODELS else None
    return 0 if folder is None or folder == model or not asked.get("model") else weight_bytes(folder)


def _ask_hub(request: Request, left: elsewhere.Elsewhere, findings: Findings) -> None:
    token = request.arguments.value("--hf-token")
    file = hub.config_file(elsewhere.config_source(request), request.revision, token)
    unchecked = "its architecture and size are" if file is None else "whether its weights fit is"
    findings.warnings.append(
        ("ModelNotChecked", f"model {request.model!r} is on the hub: {unchecked} for vLLM to check")
    )
    if file is not None:
        findings.config = elsewhere.as_cached(read_config(file, elsewhere.overrides(request)))
        _architecture(findings.config, request, left, findings)


def _dtype(name: str) -> Dtype:
    if name in formats.VLLM_DTYPES_LEFT_OUT:
        # Leave the check of these dtypes to vLLM. Assume the smallest page size, to refuse nothing that might fit.
        return replace(formats.parse("nvfp4"), name=name)
    try:
        return dtypes.parse(name)
    except formats.UnknownFormatError as error:
        raise PreflightError("DtypeUnsupported", f"--kv-cache-dtype: {error}") from error


def _architecture(
    config: models.Architecture, request: Request, left: elsewhere.Elsewhere, findings: Findings
) -> None:  # fmt: skip
    model = request.model
    if not config.architectures and models.known(config.model_type):
        findings.warnings.append(("ModelNotChecked", f"model {model!r}: config.json names no architecture: vLLM picks the class of {config.model_type!r}"))  # fmt: skip  # noqa: E501
        return
    if not config.architectures:
        raise PreflightError("ModelUnsupported", f"model {model!r}: config.json names no architecture; give its class: --hf-overrides={{\"architectures\": [\"CLASS\"]}}")  # fmt: skip  # noqa: E501
    _custom_code(config, request)
    if config.auto != "auto" and request.dtype == "auto":
        findings.warnings.append(
            ("AutoIsQuantized", f"model {model!r}: kv-cache dtype 'auto' is {config.auto} here, for its "
             "quantization_config says so; use bfloat16 for 16 bits")
        )  # fmt: skip
    if config.doubt:
        findings.warnings.append(("ModelNotKnown", f"model {model!r}: {config.doubt}"))
    known = installed.known_architectures()
    if not known or any(a in known for a in config.architectures):
        return
    name = config.architectures[0]
    if left.classes is not None:
        findings.warnings.append(("ModelNotChecked", f"{left.classes}: architecture {name!r} is for vLLM to check"))
        return
    if config.custom_code or any(installed.known_to_transformers(a) for a in config.architectures):
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
    """Refuse a model that needs code from its repository, unless the user has set `--trust-remote-code`."""
    if not config.custom_code or request.arguments.on("--trust-remote-code"):
        return
    ours = installed.known_model_types()
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
    _capability(fmt, request, findings.config)
    if fmt.ours and request.model_dtype in ("float", "float32"):
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} on a GPU needs a model in 16 bits, and --dtype is {request.model_dtype!r}; use --dtype=bfloat16, or --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501


def _capability(fmt: Dtype, request: Request, config: models.Architecture | None) -> None:
    """Refuse a dtype that is known not to work on one of this machine's GPUs."""
    head_dim, latent = (None, None) if config is None else (config.head_dim, bool(config.latent))
    served = config.auto if config is not None and fmt.name == "auto" else fmt.name
    said = repr(fmt.name) if served == fmt.name else f"'auto', which this checkpoint makes {served},"
    for gpu in machine.gpus()[: memory.here(request)]:
        if gpu.capability is None:
            continue
        if (fault := hardware.gpu_fault(served, gpu.capability, head_dim, latent)) is not None:
            ours = gpu.capability >= hardware.OLDEST_GPU and not latent and not fmt.ours
            wide = "'auto'" if served == fmt.name else "'float16'"
            instead = f"{wide} or 'int8'" if ours else wide
            raise PreflightError("DtypeUnsupported", f"kv-cache dtype {said} {fault}, and {gpu.name} has {hardware.shown(gpu.capability)}; use {instead}")  # fmt: skip  # noqa: E501


def _disk(request: Request) -> None:
    """Refuse a disk for offloaded pages if an option is missing, another option excludes it, or it has no room."""
    if request.disk_path is None or request.disk_bytes is None:
        lacks, given = (options.DISK_PATH, options.DISK_SIZE)[:: 1 if request.disk_path is None else -1]
        raise PreflightError("BadArguments", f"{given} needs {lacks}: give both, or leave it out")
    if not request.arguments.on(options.OFFLOAD):
        raise PreflightError("BadArguments", f"{options.DISK_PATH} holds pages that do not fit in host memory: give {options.OFFLOAD}, too, or leave it out")  # fmt: skip  # noqa: E501
    if lacks := compat.lacks(compat.PINNED):
        raise PreflightError("BadArguments", f"{options.DISK_PATH} needs {lacks}; use such a runtime image, or leave it out")  # fmt: skip  # noqa: E501
    if request.arguments.on(options.TRANSFER):
        raise PreflightError("BadArguments", f"{options.TRANSFER}: {options.DISK_PATH} sets it; leave one of the two out")  # fmt: skip  # noqa: E501
    backend = request.arguments.value("--kv-offloading-backend") or "native"
    if backend != "native" or os.environ.get(options.SIMPLE_OFFLOAD, "0").strip() not in ("", "0"):
        named = f"--kv-offloading-backend {backend}" if backend != "native" else options.SIMPLE_OFFLOAD
        raise PreflightError("BadArguments", f"{named}: {options.DISK_PATH} is for vLLM's own offloading; leave one of the two out")  # fmt: skip  # noqa: E501
    if memory.nodes(request) > 1:
        raise PreflightError("BadArguments", f"{options.DISK_PATH}: an engine over {memory.nodes(request)} nodes (--nnodes) has host memory on each, and a disk would hold only one node's part; leave it out")  # fmt: skip  # noqa: E501
    engines_here = request.arguments.count("--data-parallel-size")
    if (error := disk_file.refused(options.DISK_PATH, request.disk_path, request.disk_bytes * engines_here)) is not None:  # fmt: skip  # noqa: E501
        raise error
