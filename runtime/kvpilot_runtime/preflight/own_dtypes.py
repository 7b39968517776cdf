"""Preflight checks for our dtypes: options, recent window and model. Each check raises PreflightError for a fault."""

import os
from pathlib import Path

from kvpilot_formats import formats, hardware, latent, models
from kvpilot_formats.arguments import rules
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, speculation
from kvpilot_formats.dtypes import Dtype
from kvpilot_runtime.config import connectors, options
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import installed, machine
from kvpilot_runtime.preflight.request import CALIBRATION_OFF, Findings, Request, model_folder

_POOLING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "ForRewardModeling", "EmbeddingModel",
            "ForTextEncoding")  # fmt: skip
"""Suffixes of class names that vLLM serves as pooling models. These models do not decode."""


def check_options(fmt: Dtype, request: Request) -> None:
    """Refuse options that our dtypes do not support with any model."""
    every = (*request.others, f"--tensor-parallel-size={request.tensor_parallel}")
    if (found := options.refused(every, os.environ, machine.platform())) is not None:
        option, what = found
        raise PreflightError("BadArguments", f"{option}: {what} does not work with kv-cache dtype {fmt.name!r}; leave it out, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    _check_blocks(fmt, request, machine.platform())
    connector = connectors.SERVED.get(str(request.arguments.mapping(rules.TRANSFER).get("kv_connector")))
    if connector is not None and (lacks := installed.lacks(connector)):
        raise PreflightError("BadArguments", f"{options.TRANSFER}: {connector.name} with kv-cache dtype {fmt.name!r} needs {lacks}; use such a runtime image, or leave it out")  # fmt: skip  # noqa: E501
    named = request.calibration not in (None, CALIBRATION_OFF)
    if fmt.calibrated_only and request.calibration == CALIBRATION_OFF:
        raise PreflightError("BadArguments", f"KVPILOT_CALIBRATION=off: without calibration kv-cache dtype {fmt.name!r} is not accurate; unset it, so that the engine calibrates itself, or give a file of `kvpilot calibrate`")  # fmt: skip  # noqa: E501
    if named and not Path(request.calibration or "").is_file():
        raise PreflightError("BadArguments", f"KVPILOT_CALIBRATION={request.calibration!r}: there is no such file; check that its volume is mounted, or unset it: the engine then calibrates itself")  # fmt: skip  # noqa: E501


def _check_blocks(fmt: Dtype, request: Request, platform: machine.Platform) -> None:
    step = hardware.BLOCK_STEPS[platform]
    value = request.arguments.value("--block-size") or ""
    if value.isdecimal() and (not int(value) or int(value) % step):
        nearest = max(1, round(int(value) / step)) * step
        raise PreflightError("BadArguments", f"--block-size {value}: kv-cache dtype {fmt.name!r} on {'a CPU' if platform == 'cpu' else 'a GPU'} takes multiples of {step} tokens; use --block-size={nearest}, or leave it out")  # fmt: skip  # noqa: E501


def check_window(fmt: Dtype, request: Request, findings: Findings) -> None:
    """Refuse a recent window that is longer than the context, and warn if a window has no effect."""
    if not request.recent:
        return
    length = request.max_model_len or (findings.config.max_positions if findings.config is not None else None)
    if not fmt.has_residuals:
        findings.warnings.append(
            ("WindowUnused", f"--recent-tokens {request.recent}: kv-cache dtype {fmt.name!r} has no recent window; the "
             "option has no effect")
        )  # fmt: skip
    elif length is not None and isinstance(request.recent, int) and request.recent > length:
        raise PreflightError("BadArguments", f"--recent-tokens {request.recent} is more than the context of {length} tokens; use a smaller window ({', '.join(map(str, formats.RECENT_CHOICES))}), or a longer --max-model-len")  # fmt: skip  # noqa: E501


def check_own(fmt: Dtype, config: models.Architecture, request: Request, findings: Findings) -> None:
    """Refuse models that our backends do not support. Write into `findings` which layers stay in 16 bits."""

    def refuse(what: str, remedy: str = "use --kv-cache-dtype=auto") -> None:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} does not support {what}; {remedy}")

    what = models.unsupported(config)
    if config.latent and models.unsupported_latent(config) is None:
        instead = " or ".join(f"--kv-cache-dtype={name}" for name in ("auto", *latent.names()))
        refuse("multi-head latent attention, which has its own dtypes", f"use {instead}")
    if what is not None:
        refuse(what)
    if (pooled := _pooled(config, request)) is not None:
        refuse(f"pooling models, and vLLM would serve {pooled!r} as one")
    findings.disable_window = config.idle_window
    drafted = speculation(request.arguments).get("method") in DRAFT_MODELS
    if drafted and (config.layers != config.full_layers or config.state_layers or request.skip_layers):
        refuse("a draft model, EAGLE or MTP beside layers that are not full attention, or stay in 16 bits,", "speculate by ngram, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if config.layers != config.full_layers:
        kind = "sliding-window layers" if config.window_layers else "chunked attention"
        for option in filter(request.arguments.on, (options.OFFLOAD, options.TRANSFER)):
            refuse(f"{option} for a model with {kind}, whose requests can block each other forever while blocks are loaded", "leave it out, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if request.skip_layers and request.arguments.on(options.TRANSFER):
        refuse(f"{options.TRANSFER} beside layers that stay in 16 bits (--kv-cache-dtype-skip-layers)", "leave one of the two out, or use --kv-cache-dtype=auto")  # fmt: skip  # noqa: E501
    if request.skip_layers is None:
        # A model of unknown type may have sliding windows that its config.json does not show. The option is harmless
        # for a model without them.
        findings.skip_layers = (options.SLIDING,) if config.window_layers or config.doubt else ()
    elif config.window_layers and options.SLIDING not in request.skip_layers:
        refuse(f"the {config.window_layers} sliding-window layers of this model", f"keep them in 16 bits with --kv-cache-dtype-skip-layers={options.SLIDING}")  # fmt: skip  # noqa: E501


def check_latent(fmt: latent.LatentFormat, config: models.Architecture | None, request: Request) -> None:
    """Refuse options and models that our backend for multi-head latent attention does not support."""

    def refuse(what: str, remedy: str = "leave it out, or use --kv-cache-dtype=auto") -> None:
        raise PreflightError("DtypeUnsupported", f"kv-cache dtype {fmt.name!r} does not support {what}; {remedy}")

    if (found := rules.first_on(request.arguments, rules.BESIDE_LATENT)) is not None:
        refuse(f"{found[0]} ({found[1]})")
    if request.skip_layers:
        refuse("--kv-cache-dtype-skip-layers")
    if request.calibration not in (None, CALIBRATION_OFF):
        refuse(f"KVPILOT_CALIBRATION={request.calibration!r}: there are no static factors of latents")
    if config is None:
        return
    if (what := models.unsupported_latent(config)) is not None:
        refuse(what, "use --kv-cache-dtype=auto")
    if (pooled := _pooled(config, request)) is not None:
        refuse(f"pooling models, and vLLM would serve {pooled!r} as one", "use --kv-cache-dtype=auto")


def _pooled(config: models.Architecture, request: Request) -> str | None:
    """Return the model's class if vLLM would serve it for pooling (embedding, scoring, classification), else None."""
    if request.arguments.value("--runner") == "generate":
        return None
    folder, name = model_folder(request.model), next(iter(config.architectures), config.model_type)
    if folder is not None and (folder / "modules.json").exists():  # models of sentence-transformers have this file
        return name
    return name if name in installed.pooling_architectures() or name.endswith(_POOLING) else None
