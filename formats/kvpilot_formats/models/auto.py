"""KV-cache dtype that vLLM chooses for `auto`: a checkpoint may request a quantized cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_LEGACY_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def auto_dtype(raw: Mapping[str, Any], latent: bool = False) -> str:
    """Return the dtype that `auto` becomes in vLLM 0.32, or `auto` for the model's own dtype.

    Args:
        raw: a config.json from `load`, with hf_quant_config.json in place of its quantization_config.
        latent: True for multi-head latent attention, whose layers ignore compressed-tensors schemes.
    """
    scheme = _part(raw, "quantization_config")
    if _by_modelopt(scheme):
        return _of_modelopt(scheme)
    scheme = scheme or _part(raw, "compression_config") or _part(_part(raw, "text_config"), "quantization_config")
    method = str(scheme.get("quant_method")).lower()
    if (
        method in ("compressed-tensors", "compressed_tensors")
        and scheme.get("kv_cache_scheme") is not None
        and not latent
    ):
        return "fp8"
    return "auto"


def _by_modelopt(scheme: Mapping[str, Any]) -> bool:
    if str(scheme.get("quant_method")).lower().startswith("modelopt"):
        return True
    # ModelOpt before 0.31 wrote its settings to a separate file, which does not name a method.
    inner = _part(scheme, "quantization")
    written = _part(scheme, "producer").get("name") == "modelopt" or "modelopt_quant_config" in inner
    return written and str(inner.get("quant_algo")).upper() in _LEGACY_ALGORITHMS


def _of_modelopt(scheme: Mapping[str, Any]) -> str:
    inner = _part(scheme, "quantization") or scheme
    fields = ("kv_cache_scheme", "kv_cache_quant_algo")
    found = next((part[field] for field in fields for part in (inner, scheme) if part.get(field)), None)
    if isinstance(found, Mapping):
        bits = found.get("num_bits") if found.get("type") == "float" else None
        found = "fp8" if bits == 8 and found.get("dynamic") is False else "nvfp4" if bits == 4 else None
    return _MODELOPT.get(found.lower(), "auto") if isinstance(found, str) else "auto"


def _part(raw: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = raw.get(field)
    return value if isinstance(value, Mapping) else {}
