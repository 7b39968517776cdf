"""Ring layers, which make vLLM allocate and address the rings of the recent window.

Each attention layer with one of our dtypes and its own cache gets a ring layer (`RecentLayer`). A ring layer has no
weights, only a KV cache: the pages of the rings. vLLM gives every KV-cache group a block table and a metadata builder.
So ring layers have their own block table, and their builder computes the ring slot of each token of an engine step.
`attach` adds the ring layers once the weights are loaded. Layers of a draft model get no ring layer.
"""

import logging
import os
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvpilot_formats import formats
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import RECENT_WINDOW
from kvpilot_runtime.speculation import drafts, spares

VARIABLE = "KVPILOT_RECENT_TOKENS"
"""Environment variable with the recent window in tokens, which kvpilot-serve sets; empty for the default."""

SUFFIX = ".recent"
"""Suffix that turns a layer's name into the name of its ring layer."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@dataclass
class Rings:
    """Metadata of an engine step for rings: where the residuals of its tokens go, and which blocks each ring has.

    Attributes:
        slots: int64 [tokens or more], slot for each token's residual; -1 for a token without a residual.
        table: int32 [sequences or more, ring_blocks] on a GPU and [tokens, ring_blocks] on a CPU, blocks of the rings;
            0 or negative for no block.
    """

    slots: torch.Tensor
    table: torch.Tensor


class RecentLayer(AttentionLayerBase):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Layer without weights whose KV cache is the ring pages of one attention layer, its `owner`."""

    def __init__(self, layer_name: str, owner: Any, recent: int) -> None:
        self.layer_name, self.owner, self.recent = layer_name, owner, recent
        self.kv_cache_dtype = owner.kv_cache_dtype
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> Any:
        """Return the backend of ring layers, whose builder creates `Rings`."""
        return self.owner.get_attn_backend().ring_backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the spec of the ring's pages.

        A ring also has room for a step's draft tokens. Otherwise rejected drafts would overwrite the oldest residuals,
        and the window would be shorter.
        """
        from kvpilot_runtime.recent.ring_spec import RingSpec

        page = self.owner.get_attn_backend().customize_spec(self.owner.get_kv_cache_spec(vllm_config))
        same = {f.name: getattr(page, f.name) for f in fields(RingSpec) if hasattr(page, f.name)}
        return RingSpec(**same, kept=self.recent + drafts(vllm_config), fmt=self.owner.impl.fmt.name)


def asked() -> int | None:
    """Return the recent window of the environment in tokens, or None. Raise UnsupportedModelError if it is invalid."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) not in formats.RECENT_CHOICES:
        raise UnsupportedModelError(
            f"{VARIABLE} is {text!r}; use one of {', '.join(map(str, formats.RECENT_CHOICES))}, or leave it out for "
            f"the default ({formats.default_windows()})"
        )
    return int(text)


def attach(config: Any, layers: dict[str, Any]) -> None:
    """Attach rings to an engine's layers, or turn its recent window off. `layers` are our layers, by name.

    Layers that are new in a later call belong to a draft model and get no rings. Their backend gets another name. vLLM
    has one metadata builder per backend name, and a builder plans steps either with or without a window.

    Raises:
        UnsupportedModelError: the requested window is longer than the context.
    """
    if any(layer.impl.recent is not None for layer in layers.values()):
        for layer in layers.values():
            if layer.impl.recent is None:  # This layer belongs to a draft model, so vLLM does not build `Rings` for it.
                layer.impl.recent, layer.attn_backend = 0, _of_drafts(layer.attn_backend)
        return
    fmt = formats.parse(config.cache_config.cache_dtype)
    context = config.model_config.max_model_len
    wanted = fmt.recent_tokens(asked(), context)
    if wanted > context:
        raise UnsupportedModelError(
            f"{VARIABLE} is {wanted}, but the context has {context} tokens (--max-model-len): a window must not be "
            "longer; use a smaller one, or 0"
        )
    reason = _cannot(config, layers) if wanted else ""
    recent = 0 if reason else wanted
    every = config.compilation_config.static_forward_context
    for name, layer in layers.items():
        layer.impl.recent = recent
        if recent and layer.impl.kv_sharing_target_layer_name is None:
            layer.impl.ring = every[name + SUFFIX] = RecentLayer(name + SUFFIX, layer, recent)
    first = next(iter(layers.values()))
    for i in range(spares(config, first) if recent else 0):
        name = f"spare.{i}{SUFFIX}"
        every[name] = RecentLayer(name, first, recent)
    for layer in layers.values():
        if recent and (target := layer.impl.kv_sharing_target_layer_name) is not None:
            layer.impl.ring = every[target + SUFFIX]
    if reason:
        log.warning("No recent window (%s): kv-cache dtype %r reads the last %d tokens with its own bits, which is "
                    "less accurate; to hide this warning, set %s to 0",
                    reason, fmt.name, wanted, VARIABLE)  # fmt: skip
    elif wanted < fmt.recent_tokens(asked()):
        log.info("The default recent window of kv-cache dtype %r, %d tokens, is cut to %d: the context is %d tokens",
                 fmt.name, fmt.window, wanted, context)  # fmt: skip


@cache
def _of_drafts(backend: type[Any]) -> type[Any]:
    """Return a subclass of the backend that has another name and is otherwise the same."""
    return type(f"{backend.__name__}OfDrafts", (backend,), {"__module__": backend.__module__})


def report(config: Any, layers: dict[str, Any]) -> None:
    """Report the engine's recent window to log and metrics."""
    if not layers:
        return
    dtype = config.cache_config.cache_dtype
    found = next(iter(layers.values())).impl.recent
    wanted = formats.parse(dtype).recent_tokens(asked())
    reason = ""
    if found is None:
        reason = "NotAttached"
        log.warning("No recent window: this model loader does not call its layers after loading")
    elif found < wanted:
        reason = _cannot(config, layers) or "ShortContext"
    log.info("Recent window: kv-cache dtype %s, %d tokens %s", dtype, found or 0, reason)
    RECENT_WINDOW.report({"dtype": dtype, "tokens": str(found or 0), "reason": reason})


def _cannot(config: Any, layers: dict[str, Any]) -> str:
    """Return why this engine cannot have rings, as one word for metrics. Return an empty string if it can."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return "HybridManagerOff"
    every = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    if any(type(layer) not in (Attention, RecentLayer) for layer in every):
        return "OtherLayers"
    if len({(layer.impl.num_kv_heads, layer.impl.head_size) for layer in layers.values()}) > 1:
        return "UnlikeLayers"
    return ""
