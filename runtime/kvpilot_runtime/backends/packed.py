"""Base classes of our attention backends: a class for each dtype, page sizes, and errors for unsupported features.

vLLM finds a backend by the import path of its class, and asks the class for its page size (`customize_spec`). So each
dtype has its own class, such as `kvpilot_runtime.backends.cuda.K4V4Backend`. `classes_of` creates these classes from
the table of formats, in each process that imports or unpickles one of them.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kvpilot_formats import formats
from kvpilot_formats.arguments import rules
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.residuals import Residuals
from kvpilot_runtime.calibration.of_engine import calibration_of
from kvpilot_runtime.config import connectors, offload
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.recent.residual_maps import ResidualMaps
from kvpilot_runtime.recent.window import keeps_all, window
from kvpilot_runtime.speculation import drafts, has_draft_model, refuse_other_drafters
from kvpilot_runtime.vllm_api.compat import backend_class, page_layouts

PREFILL_FROM_PAGES = "KVPILOT_PREFILL_FROM_PAGES"
"""Environment variable. If it is 1, prefill first stores a chunk's tokens, and then reads them back from their pages.

Outputs are then slightly less accurate than with the chunk's tokens in 16 bits. But they do not depend on the size of
chunks, on prefix hits or on preemption. Tests rely on this.
"""


def classes_of(
    parent: type[Any], names: Callable[[], Iterable[str]], parse: Callable[[str], Any]
) -> Callable[[str], type[Any]]:
    """Return a module's `__getattr__`. Given the class name of a dtype, it creates the dtype's subclass of `parent`.

    Args:
        names: function that returns the names of the dtypes.
        parse: function that returns a dtype's format, which becomes the subclass's `fmt`.
    """

    @cache
    def find(name: str) -> type[Any]:
        for dtype in names():
            if name == backend_class(dtype):
                body = {"fmt": parse(dtype), "supported_kv_cache_dtypes": [dtype]}
                return type(name, (parent,), {**body, "__module__": parent.__module__, "__doc__": f"`{dtype}`."})
        raise AttributeError(f"module {parent.__module__!r} has no attribute {name!r}")

    return find


class OurBackend(AttentionBackend):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Base of our backends. Its methods return class attributes that subclasses set.

    Attributes:
        block_step: block sizes are multiples of this many tokens.
        impl: class that computes the attention of one layer.
        builder: class that builds a batch's metadata.
        remedies: maps vLLM's reason against a backend to our message, which also names a remedy.
    """

    block_step: ClassVar[int]
    impl: ClassVar[type[AttentionImpl]]
    builder: ClassVar[type[AttentionMetadataBuilder]]
    remedies: ClassVar[dict[str, str]] = {}

    @staticmethod
    def get_name() -> str:
        """Return CUSTOM, the name that vLLM reserves for plugins, because vLLM refuses unknown names."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the class that computes one layer's attention."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """Return the class that builds a batch's metadata."""
        return cls.builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return `block_step`. A block size must be a multiple of it."""
        return [MultipleOf(cls.block_step)]

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Return vLLM's reasons why this backend cannot serve a layer, with our remedies instead where we have one."""
        remedies = {"batch invariance not supported": _NOT_INVARIANT, **cls.remedies}
        return [remedies.get(reason, reason) for reason in super().validate_configuration(*args, **kwargs)]


_NOT_INVARIANT = "batch invariance is not supported (unset VLLM_BATCH_INVARIANT)"


class PackedBackend(OurBackend):
    """Backend of packed pages, uint8 [blocks, kv_heads, tokens, row_bytes]. Each (block, KV head) is one page."""

    fmt: ClassVar[formats.Format]
    remedies: ClassVar[dict[str, str]] = {
        "sliding window not supported": "a sliding-window layer is not supported (keep these in 16 bits: "
        "--kv-cache-dtype-skip-layers sliding_window)",
        "partial multimodal token full attention not supported": "images whose tokens attend to each other both ways "
        "are not supported (serve text alone: --language-model-only)",
    }

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the cache layouts of vLLM in which the bytes of a page are contiguous."""
        return page_layouts()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported head sizes. The cache stores some of them with padding (`formats.stored_dim`)."""
        return [dim for dim in range(max(formats.HEAD_DIMS) + 1) if formats.stored_dim(dim)]

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: our kernels support attention sinks."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Return True: image tokens may attend in both directions."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with a page size of `Format.row_bytes` per token and KV head.

        Layers in 16 bits keep their page size.
        """
        if spec.dtype != torch.uint8:
            return spec
        if spec.head_size_v != spec.head_size:
            raise UnsupportedModelError(
                f"keys have {spec.head_size} elements and values {spec.head_size_v}, but kv-cache dtype "
                f"{cls.fmt.name!r} needs the same number; use --kv-cache-dtype auto"
            )
        try:
            return replace(spec, state_content_bytes=cls.fmt.row_bytes(spec.head_size))
        except formats.UnsupportedHeadDimError as error:
            raise UnsupportedModelError(str(error)) from error


def our_layers(vllm_config: Any) -> dict[str, Any]:
    """Return the engine's layers with packed pages, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(getattr(layer, "impl", None), PackedImpl)}


def only_ours(vllm_config: Any) -> bool:
    """Return True if all layers with a KV cache have packed pages."""
    every = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return all(isinstance(getattr(layer, "impl", None), PackedImpl) for layer in every)


def make_maps(layers: Iterable[Any], blocks: int) -> None:
    """Create the maps of residual pages. Raise UnsupportedModelError if vLLM has split the scheduler's `blocks`."""
    for layer in layers:
        if layer.impl.residuals(layer.kv_cache) is not None and len(layer.kv_cache) != blocks:
            size = layer.kv_cache.shape[2]
            raise UnsupportedModelError(f"a recent window with blocks that vLLM splits into {size} tokens is not "
                                        f"supported; set --block-size={size}, or --recent-tokens=0")  # fmt: skip


def refuse_unsupported_options(vllm_config: Any) -> None:
    """Raise UnsupportedModelError for options that packed pages do not support."""
    dtype = vllm_config.cache_config.cache_dtype
    refuse_beside(vllm_config, rules.BESIDE_ANY)
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    from vllm.platforms import current_platform

    between = transfer.kv_connector in connectors.SERVED
    what = offload.unsupported(transfer, current_platform.device_type) or (
        connectors.beside(vllm_config) if between else None
    )
    if what is not None:
        raise UnsupportedModelError(f"--kv-transfer-config: {what} is not supported with kv-cache dtype {dtype!r}; use "
                                    "--kv-offloading-size alone, or --kv-cache-dtype auto")  # fmt: skip
    asked = "--kv-transfer-config" if between else "--kv-offloading-size"
    layers = vllm_config.compilation_config.static_forward_context.values()
    for name, what in (("sliding_window", "sliding-window layers"), ("attention_chunk_size", "chunked attention")):
        if any(getattr(layer, name, None) is not None for layer in layers):
            raise UnsupportedModelError(f"{asked} is not supported for a model with {what} and kv-cache dtype "
                                        f"{dtype!r}; leave {asked} out, or use --kv-cache-dtype auto")  # fmt: skip


def refuse_beside(vllm_config: Any, switches: Iterable[rules.Switch]) -> None:
    """Raise UnsupportedModelError if one of `switches`, features that the engine's dtype does not support, is on."""
    if (found := rules.first_set(vllm_config, switches)) is not None:
        dtype = vllm_config.cache_config.cache_dtype
        raise UnsupportedModelError(f"{found[0]} ({found[1]}) is not supported with kv-cache dtype {dtype!r}; leave "
                                    "one of the two out")  # fmt: skip


class PackedBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of a batch's metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_unsupported_options(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of one batch."""
        if common_attn_metadata.causal is not True:  # `causal` may be False, or a tensor with a value per sequence
            dtype = self.vllm_config.cache_config.cache_dtype
            raise UnsupportedModelError(
                f"attention to later tokens (causal=False) is not supported with kv-cache dtype {dtype!r}; use "
                "--kv-cache-dtype auto"
            )
        return self.describe(common_attn_metadata)

    @abstractmethod
    def describe(self, common: Any) -> Any:
        """Return the metadata that `forward` needs, from vLLM's `CommonAttentionMetadata`."""


class PackedImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer over packed pages.

    Attributes:
        drafting: True for a draft model's layer, which has no factors from a file.
        loaded: True once the model's weights are loaded.
        read_back: True if `PREFILL_FROM_PAGES` is on.
        recent: tokens of the recent window.
        maps: the engine's maps of residual pages, in its first layer of ours.
        views: address of the layer's cache, and the backend's views of it; None before the first step.
        drafts: largest number of draft tokens per sequence and step.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        def refuse(what: str, remedy: str) -> None:
            raise UnsupportedModelError(f"{what} is not supported with kv-cache dtype {kv_cache_dtype!r}; {remedy}")

        if alibi_slopes is not None:
            refuse("a model with ALiBi", "use --kv-cache-dtype auto")
        if attn_type != AttentionType.DECODER:
            refuse(f"{attn_type} attention", "use --kv-cache-dtype auto")
        if sliding_window is not None:
            refuse("a sliding-window layer", "keep these in 16 bits: --kv-cache-dtype-skip-layers sliding_window")
        asked = sorted(name for name, given in unknown.items() if given not in (None, False, -1))
        if asked:
            refuse(f"an attention layer with {', '.join(asked)}", "use --kv-cache-dtype auto")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.fmt = formats.parse(kv_cache_dtype)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.read_back = os.environ.get(PREFILL_FROM_PAGES) == "1"
        self._config = get_current_vllm_config()
        refuse_other_drafters(self._config, kv_cache_dtype)
        self.drafts = drafts(self._config)
        # vLLM creates a draft model's layers after it has loaded the served model. So if any layer is loaded already,
        # this layer belongs to the draft model.
        layers = our_layers(self._config).values() if has_draft_model(self._config) else ()
        served = next((layer.impl for layer in layers if layer.impl.loaded), None)
        self.drafting, self.loaded = served is not None, False
        if self.drafting and not only_ours(self._config):
            refuse("a draft model beside layers that are not full attention, or stay in 16 bits,", "use ngram")
        self._calibration = None if self.drafting else calibration_of(self._config)
        self._factors: Factors | None = None
        self.recent: int = window(self._config) if served is None else served.recent
        self.maps = ResidualMaps()
        self.views: tuple[int, Any] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Note that the weights are loaded."""
        self.loaded = True

    def residuals(self, cache: torch.Tensor) -> Residuals | None:
        """Return the engine's map of residual pages for this layer's cache; None without a recent window."""
        if not self.recent:
            return None
        first = next((layer.impl for layer in our_layers(self._config).values()), self)
        blocks, size = cache.shape[0], cache.shape[2]
        newest = blocks if keeps_all() else self.fmt.recent_blocks(self.recent, size)
        found: Residuals = first.maps.of(blocks, self.fmt.residual_pages(self.head_size, size), newest, cache.device)
        return found

    def factors(self, layer: Any, device: torch.device | str = "cpu") -> Factors:
        """Return this layer's calibration factors for this rank's KV heads, from the calibration file.

        Without a file, return factors that change nothing until `set_factors` overwrites them. A layer that reads
        another layer's cache has that layer's factors. The first call creates the tensors on `device`. Later changes
        overwrite them in place, because pages and captured graphs hold their address.
        """
        if self._factors is None:
            if self._calibration is not None:
                found = self._calibration.for_layer(self.kv_sharing_target_layer_name or layer.layer_name)
            else:
                found = Factors.identity(self.num_kv_heads, self.head_size)
            self._factors = found.to(device)
        return self._factors

    def set_factors(self, layer: Any, found: Factors) -> None:
        """Overwrite the layer's calibration factors in place."""
        # A trial capture of graphs may have created the factors in inference mode. torch then allows changes in place
        # only in inference mode.
        with torch.inference_mode():
            self.factors(layer, found.key_mean.device).copy_(found)
