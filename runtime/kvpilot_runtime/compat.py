"""The only module that knows vLLM's versions: how each is taught our dtypes and our CPU backend.

Up to 0.32 the names of KV-cache dtypes are a closed `Literal`; 0.33 has a registry for them. On CPU no version lets a
backend be chosen per dtype, so the platform's choice is wrapped: our dtypes get our backend, all others what vLLM
would have picked, which leaves stock behaviour (and layers that skip quantization) alone.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, get_args

from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError

OLDEST, NEWEST = (0, 28), (0, 33)


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM.

    Raises:
        UnsupportedEngineError: vLLM is absent, or outside the versions that kvpilot was made for.
    """
    try:
        text = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError("vllm is not installed; install vllm 0.28 to 0.33 beside kvpilot") from None
    major, minor = (int(part) for part in text.split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise UnsupportedEngineError(
            f"vllm {text} is not supported: kvpilot works with 0.28 to 0.33; install one of these, or a newer kvpilot"
        )
    return major, minor


def register_dtypes(names: tuple[str, ...]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`, stored as bytes. Repeating it changes nothing."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))
    if vllm_version() >= (0, 33):
        from vllm.config import cache

        for name in names:
            if name not in get_args(cache.CacheDType):
                cache.register_kv_cache_dtype(name)
        return
    _extend_literal(names)


def _extend_literal(names: tuple[str, ...]) -> None:
    """Add values to the closed Literal in place, so that every module that imported it sees them."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig, CacheDType

    known = get_args(CacheDType)
    missing = tuple(n for n in names if n not in known)
    if not missing:
        return
    literal: Any = CacheDType
    literal.__args__ = known + missing
    # Both hold a validator that was compiled from the old list.
    rebuild_dataclass(CacheConfig, force=True)
    rebuild_dataclass(VllmConfig, force=True)


def route_cpu_backends(paths: Mapping[str, str]) -> None:
    """On the CPU platform, serve each KV-cache dtype in `paths` with the backend class at that import path."""
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, "_kvpilot_routed", False):
        return
    stock = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        path = paths.get(attn_selector_config.kv_cache_dtype or "auto")
        if path is None:
            return stock(cls, selected_backend, attn_selector_config, *args, **kwargs)
        if attn_selector_config.use_mla:
            raise UnsupportedModelError(
                "a model with multi-head latent attention is not supported with kv-cache dtype "
                f"{attn_selector_config.kv_cache_dtype!r}; use --kv-cache-dtype auto"
            )
        return path

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform._kvpilot_routed = True
