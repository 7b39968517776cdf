"""Preflight: check a request to start an engine, before vLLM is imported or a GPU is used.

The check takes well under a second for a model in a folder. For a model on the hub it first fetches config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpilot_formats import dtypes, formats, hardware, latent, models
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, speculation
from kvpilot_formats.dtypes import Dtype
from kvpilot_formats.models import weights as weight_files
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import elsewhere, hub, installed, machine, memory, own_dtypes
from kvpilot_runtime.preflight.request import Findings, Request, model_folder

CPU_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""Dtypes of vLLM that its CPU backend implements. With other dtypes it starts, but its answers are wrong."""


def check(request: Request) -> Findings:
    """Check a request's model, dtype, options and memory. Raise PreflightError at the first fault.

    Return the warnings, the model's architecture, and the arguments of vLLM that follow from the architecture.
    """
    findings = Findings(skip_layers=request.skip_layers or ())
    platform = machine.platform()
    fmt = _dtype(request.dtype)
    folder = model_folder(request.model)
    left = elsewhere.look(request, platform)
    config = None if left.config else model_folder(elsewhere.config_source(request))
    if config is not None:
        _architecture(config, request, left, findings)
    if not left.gpus:
        _platform_dtype(fmt, platform, request, findings)
    if request.arguments.on(options.OFFLOAD):
        memory.check_offload(request, platform)
    if fmt.ours:
        own_dtypes.check_options(fmt, request)
    own_dtypes.check_window(fmt, request, findings)
    if config is None and not left.config:
        token = request.arguments.value("--hf-token")
        if (file := hub.config_file(elsewhere.config_source(request), request.revision, token)) is not None:
            _architecture(file, request, left, findings)
    if isinstance(fmt, latent.LatentFormat):
        own_dtypes.check_latent(fmt, findings.config, request)
    elif fmt.ours and findings.config is not None:
        own_dtypes.check_own(fmt, findings.config, request, findings)
    elif fmt.ours and request.skip_layers is None:
        findings.skip_layers = (options.SLIDING,)  # this option is harmless for models without sliding-window layers
    if folder is not None and findings.config is not None and not left.gpus:
        weights = weight_bytes(folder) + _draft_bytes(request, folder) if not left.weights else 0
        # With fit_length, vLLM chooses the longest context that fits, so check only that one token fits.
        sized = replace(request, max_model_len=1) if request.fit_length else request
        memory.check(fmt, findings.config, weights, sized, platform)
    return findings


def _draft_bytes(request: Request, model: Path) -> int:
    """Return the size in bytes of a draft model's weights if the draft model has its own folder, else 0."""
    asked = speculation(request.arguments)
    folder = model_folder(asked.get("model", "")) if asked.get("method") in DRAFT_MODELS else None
    return 0 if folder is None or folder == model or not asked.get("model") else weight_bytes(folder)


def _dtype(name: str) -> Dtype:
    if name in formats.VLLM_DTYPES_LEFT_OUT:
        # vLLM checks these dtypes itself. Assume the smallest page size, to refuse nothing that might fit.
        return replace(formats.parse("nvfp4"), name=name)
    try:
        return dtypes.parse(name)
    except formats.UnknownFormatError as error:
        raise PreflightError("DtypeUnsupported", f"--kv-cache-dtype: {error}") from error


def _architecture(path: Path, request: Request, left: elsewhere.Elsewhere, findings: Findings) -> None:
    """Read the model's config, a file or its folder, into `findings`. Refuse or warn by its architectures."""
    config = findings.config = elsewhere.as_cached(read_config(path, elsewhere.overrides(request)))
    model = request.model
    if not config.architectures and models.known(config.model_type):
        return  # vLLM picks the model class by `model_type`
    if not config.architectures:
        raise PreflightError("ModelUnsupported", f"model {model!r}: config.json names no architecture; give its class: --hf-overrides={{\"architectures\": [\"CLASS\"]}}")  # fmt: skip  # noqa: E501
    _custom_code(config, request)
    if config.auto != "auto" and request.dtype == "auto":
        findings.warnings.append(
            ("AutoIsQuantized", f"model {model!r}: by its quantization_config, kv-cache dtype 'auto' is {config.auto}; "
             "use bfloat16 for 16 bits")
        )  # fmt: skip
    if config.doubt:
        findings.warnings.append(("ModelNotKnown", f"model {model!r}: {config.doubt}"))
    known = installed.known_architectures()
    if not known or left.classes or any(a in known for a in config.architectures):
        return
    if config.custom_code or any(installed.known_to_transformers(a) for a in config.architectures):
        return  # vLLM serves it by transformers' class, and says so
    name = config.architectures[0]
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
    """Refuse a dtype if one of this machine's GPUs is known not to support it."""
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


def read_config(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> models.Architecture:
    """Read `config.json` (`path` is the file or its folder), and apply `changes`, the fields of `--hf-overrides`."""
    try:
        if not path.exists():
            raise models.ConfigError("there is no such folder", missing=True)
        return models.read(elsewhere.overridden(models.load(path / "config.json" if path.is_dir() else path), changes))
    except models.ConfigError as error:
        if error.missing:
            raise PreflightError("ModelNotFound", f"model {str(path)!r}: {error}; give a folder with config.json and weights, and check that its volume is mounted") from None  # fmt: skip  # noqa: E501
        raise PreflightError("ModelUnsupported", f"model {str(path)!r}: {error}") from error


def weight_bytes(folder: Path) -> int:
    """Return the size in bytes of the weights that vLLM's default loader reads."""
    try:
        return weight_files.weight_bytes(folder)
    except models.ConfigError as error:
        raise PreflightError("ModelNotFound", f"model {str(folder)!r}: {error}") from error
