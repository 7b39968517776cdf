"""Find options and variables that make vLLM use another config, other weights or other GPUs than preflight sees.

Preflight applies `--hf-overrides`, `--hf-config-path` and `--hf-token` when it reads the config. If another such option
is set, preflight skips the check that depends on it. So preflight never refuses an engine because of a number that vLLM
would not use.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from kvpilot_formats.arguments import Arguments
from kvpilot_formats.arguments.rules import Switch, first_on
from kvpilot_formats.models import Architecture
from kvpilot_runtime.preflight.request import Request, model_folder

MODELSCOPE, UNFOLDED = "VLLM_USE_MODELSCOPE", "VLLM_MLA_DISABLE"
CONFIG_PATH, OVERRIDES = "--hf-config-path", "--hf-overrides"

_CONFIG = (
    Switch("a config of another format", ("--config-format",), ("auto", "hf")),
    Switch("another class for the model", ("--model-class-overrides",), ("{}",)),
)
_WEIGHTS = (
    Switch("another loader", ("--load-format",), ("auto", "hf", "safetensors", "pt", "mistral", "npcache",
                                                  "fastsafetensors", "instanttensor")),
    Switch("weights that are quantized when they are loaded", ("--quantization", "--quantization-config")),
    Switch("weights in host memory", ("--cpu-offload-gb", "--offload-group-size"), ("0", "0.0")),
    Switch("a part of the model", ("--language-model-only", "--mm-encoder-only")),
)  # fmt: skip
_GPUS = (
    Switch("a choice of GPUs", ("--device-ids",)),
    Switch("GPUs of other machines", ("--distributed-executor-backend",), ("mp", "uni")),
)
_CLASSES = (Switch("model classes of another library", ("--model-impl",), ("auto", "vllm")),)


@dataclass(frozen=True)
class Elsewhere:
    """Flags for facts that only vLLM can check, because an option or a variable changes them."""

    config: bool = False
    weights: bool = False
    gpus: bool = False
    classes: bool = False


def look(request: Request, platform: str) -> Elsewhere:
    """Find out whether preflight can check the config, the weights, the GPUs and the class of the model."""
    arguments, folder, source = request.arguments, model_folder(request.model), config_source(request)
    modelscope = os.environ.get(MODELSCOPE, "").strip().lower() in ("1", "true")
    mistral = folder is not None and (folder / "params.json").is_file() and not (folder / "config.json").exists()
    config = (
        _by(arguments, _CONFIG, "VLLM_MODEL_REDIRECT_PATH")
        or (arguments.on(OVERRIDES) and not _is_object(arguments.value(OVERRIDES)))  # it names a function for vLLM
        or (modelscope and model_folder(source) is None)
        or (mistral and not arguments.on(CONFIG_PATH))
    )
    weights = _by(arguments, _WEIGHTS, "VLLM_HUMMING_ONLINE_QUANT_CONFIG")
    gpus = platform == "cuda" and _by(arguments, _GPUS, "CUDA_VISIBLE_DEVICES")
    return Elsewhere(config, weights, gpus, _by(arguments, _CLASSES) or _other_plugin())


def config_source(request: Request) -> str:
    """Return the folder or hub id that the model's config comes from."""
    return request.arguments.value(CONFIG_PATH) or request.model


def overrides(request: Request) -> dict[str, Any]:
    """Return the fields of the JSON in `--hf-overrides`; empty without this option."""
    return request.arguments.mapping(OVERRIDES)


def overridden(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with `changes` applied as vLLM applies them: merge objects, and replace other values."""
    merged = dict(raw)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = overridden(before, value)
        else:
            merged[key] = value
    return merged


def as_cached(config: Architecture) -> Architecture:
    """Return the architecture as vLLM caches it. With `VLLM_MLA_DISABLE`, vLLM stores keys and values, not latents."""
    unfolded = os.environ.get(UNFOLDED, "0").strip() not in ("", "0")
    return replace(config, latent=0, index_bytes=0) if unfolded else config


def asks_a_hub(request: Request) -> bool:
    """Return True if the model is in a folder, but an option names a tokenizer, config, draft or adapter on a hub."""
    arguments = request.arguments
    named = [arguments.value(option) for option in ("--tokenizer", CONFIG_PATH, "--spec-model")]
    named.append(arguments.mapping("--speculative-config").get("model"))
    named += [_adapter(item) for one in arguments.given if one.name == "--lora-modules" for item in one.values]
    # These method names may stand in place of a draft model. They need no hub.
    words = (None, "", "ngram", "[ngram]", "suffix")
    return any(one not in words and isinstance(one, str) and model_folder(one) is None for one in named)


def _adapter(text: str) -> str | None:
    if not text.startswith("{"):
        return text.partition("=")[2]
    try:
        path = json.loads(text).get("path")
    except (ValueError, RecursionError):
        return None
    return path if isinstance(path, str) else None


def _by(arguments: Arguments, switches: Iterable[Switch], variable: str = "") -> bool:
    """Return True if one of these options, or the environment variable, is set."""
    return first_on(arguments, switches) is not None or bool(os.environ.get(variable))


def _is_object(text: str | None) -> bool:
    try:
        return isinstance(json.loads(text or ""), dict)
    except (ValueError, RecursionError):
        return False


def _other_plugin() -> bool:
    """Return True if vLLM loads another plugin than ours, which may add model classes."""
    named = os.environ.get("VLLM_PLUGINS")
    chosen = None if named is None else named.split(",")
    return any(
        one.name != "kvpilot" and not one.value.startswith("vllm.") and (chosen is None or one.name in chosen)
        for one in entry_points(group="vllm.general_plugins")
    )
