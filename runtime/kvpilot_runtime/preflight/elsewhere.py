"""Find options and variables that make vLLM use another config, other weights or other GPUs than preflight sees.

Preflight applies `--hf-overrides`, `--hf-config-path` and `--hf-token` when it reads the config. If another such option
is set, preflight skips the check that depends on it, and names the option in a warning. So preflight never refuses an
engine because of a number that vLLM would not use.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
_VARIABLES = {
    "config": ("VLLM_MODEL_REDIRECT_PATH",),
    "weights": ("VLLM_HUMMING_ONLINE_QUANT_CONFIG",),
    "gpus": ("CUDA_VISIBLE_DEVICES",),
}


@dataclass(frozen=True)
class Elsewhere:
    """Facts that preflight cannot check on this machine.

    Each field names the option or variable that prevents a check. It is None if preflight can check the fact.
    """

    config: str | None = None
    weights: str | None = None
    gpus: str | None = None
    classes: str | None = None

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield a warning, as (reason, message), for each item that preflight cannot check."""
        for reason, what, by in (
            ("ModelNotChecked", "the model's architecture and size are", self.config),
            ("WeightsNotChecked", "the weights' size is", self.weights if self.config is None else None),
            ("MachineNotKnown", "the GPUs that the engine takes are", self.gpus),
        ):
            if by is not None:
                yield reason, f"{by}: {what} for vLLM to check"


def look(request: Request, platform: str) -> Elsewhere:
    """Return the options and variables that keep preflight from checking config, weights, GPUs or model class."""
    arguments, folder = request.arguments, model_folder(request.model)
    config = _by(arguments, _CONFIG, _VARIABLES["config"]) or _unreadable(arguments)
    modelscope = os.environ.get(MODELSCOPE, "").strip().lower() in ("1", "true")
    if config is None and model_folder(config_source(request)) is None and modelscope:
        config = f"{MODELSCOPE} (a model that is not on the Hugging Face hub)"
    mistral = folder is not None and (folder / "params.json").is_file() and not (folder / "config.json").exists()
    if config is None and mistral and not arguments.on(CONFIG_PATH):
        config = "params.json without config.json (Mistral's format)"
    weights = _by(arguments, _WEIGHTS, _VARIABLES["weights"])
    gpus = _by(arguments, _GPUS, _VARIABLES["gpus"]) if platform == "cuda" else None
    return Elsewhere(config, weights, gpus, _by(arguments, _CLASSES, ()) or _plugin())


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


def _by(arguments: Arguments, switches: Iterable[Switch], variables: Iterable[str]) -> str | None:
    if (found := first_on(arguments, switches)) is not None:
        return f"{found[0]} ({found[1]})"
    return next((name for name in variables if os.environ.get(name)), None)


def _unreadable(arguments: Arguments) -> str | None:
    """Return `--hf-overrides` if its value names a function for vLLM to call, and is not a JSON object; else None."""
    return OVERRIDES if arguments.on(OVERRIDES) and not _is_object(arguments.value(OVERRIDES)) else None


def _is_object(text: str | None) -> bool:
    try:
        return isinstance(json.loads(text or ""), dict)
    except (ValueError, RecursionError):
        return False


def _plugin() -> str | None:
    """Name a vLLM plugin other than ours, which may add model classes; None if there is none."""
    named = os.environ.get("VLLM_PLUGINS")
    chosen = None if named is None else named.split(",")
    for one in entry_points(group="vllm.general_plugins"):
        if one.name != "kvpilot" and not one.value.startswith("vllm.") and (chosen is None or one.name in chosen):
            return f"the plugin {one.name}"
    return None
