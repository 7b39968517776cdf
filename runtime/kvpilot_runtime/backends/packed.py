"""What our attention backends have in common: which dtype has which class, the size of a page, what is refused.

vLLM knows a backend by the import path of its class and asks the class for its page size (`customize_spec`), so each
dtype has a class of its own. They are made from the table of formats when they are asked for by name, here and in
every process that loads or unpickles one: `kvpilot_runtime.backends.cpu.K4V4Backend` and
`kvpilot_runtime.backends.cuda.K4V4Backend`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from kvpilot_formats import formats
from kvpilot_formats.arguments import rules
from kvpilot_kernels.factors import Factors
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_runtime.calibration.of_engine import calibration_of
from kvpilot_runtime.config import carriers, offload, retention
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.recent.ring_layers import RecentLayer, Rings, attach
from kvpilot_runtime.speculation import drafts, has_draft_model, refuse_other_drafters
from kvpilot_runtime.vllm_api import contract
from kvpilot_runtime.vllm_api.compat import HeadMajorPages, backend_class

PREFILL_FROM_PAGES = "KVPILOT_PREFILL_FROM_PAGES"
"""Set to 1, a chunk reads itself back from its pages too: outputs then do not depend on how prompts were chunked,
cached or preempted (slightly less accurate; it is what the equivalence tests compare)."""


_REMEDIES = {
    "sliding window not supported": "a sliding-window layer is not supported (keep these in 16 bits: "
    "--kv-cache-dtype-skip-layers sliding_window)",
    "partial multimodal token full attention not supported": "images whose tokens attend to each other both ways are "
    "not supported (serve text alone: --language-model-only)",
    "batch invariance not supported": "batch invariance is not supported (unset VLLM_BATCH_INVARIANT)",
}


def classes_of(
    parent: type[Any], names: Callable[[], Iterable[str]], parse: Callable[[str], Any]
) -> Callable[[str], type[Any]]:
    """A module's `__getattr__`: the subclass of `parent` for the dtype that a class name stands for, made once.

    Args:
        names: the dtypes. parse: the format of one, which the subclass has as `fmt`.
    """

    @cache
    def find(name: str) -> type[Any]:
        for dtype in names():
            if name == backend_class(dtype):
                body = {"fmt": parse(dtype), "supported_kv_cache_dtypes": [dtype]}
                return type(name, (parent,), {**body, "__module__": parent.__module__, "__doc__": f"`{dtype}`."})
        raise AttributeError(f"module {parent.__module__!r} has no attribute {name!r}")

    return find


class PackedBackend(HeadMajorPages, AttentionBackend):  # type: ignore[misc]  # vLLM has no types for us
    """What all of our dtypes share on every platform."""

    fmt: ClassVar[formats.Format]

    @classmethod
    @abstractmethod
    def recent_backend(cls) -> type[RingBackend]:
        """The backend of the layers that have the rings."""

    @staticmethod
    def get_name() -> str:
        """The slot that vLLM's list of backends keeps for plugins; any other name is refused."""
        return "CUSTOM"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions that pages store, some of them with zeros behind: `formats.stored_dim`."""
        return [dim for dim in range(max(formats.HEAD_DIMS) + 1) if formats.stored_dim(dim)]

    @classmethod
    def supports_sink(cls) -> bool:
        """Layers whose softmax divides by one more logit."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Images whose tokens attend to each other both ways, but in a cache with a bound, which has other places."""
        return retention.asked() is None and contract.has_images()

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against this backend for a layer, with the remedy where there is one of its own."""
        return [_REMEDIES.get(reason, reason) for reason in super().validate_configuration(*args, **kwargs)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The page size of this dtype: `Format.row_bytes` per token and KV head.

        vLLM also asks for the page of a layer that stays in 16 bits, to make both one size: that one is left alone.

        Raises:
            UnsupportedModelError: heads of this dimension are not stored, or keys and values of different sizes.
        """
        if spec.dtype != torch.uint8:
            return spec
        if spec.head_size_v != spec.head_size:
            raise UnsupportedModelError(
                f"keys of {spec.head_size} and values of {spec.head_size_v} elements: kv-cache dtype {cls.fmt.name!r} "
                "needs both alike; use --kv-cache-dtype auto"
            )
        try:
            return replace(spec, state_content_bytes=cls.fmt.row_bytes(spec.head_size))
        except formats.UnsupportedHeadDimError as error:
            raise UnsupportedModelError(str(error)) from error


class RingBackend(HeadMajorPages, AttentionBackend):  # type: ignore[misc]
    """What stands for the ring layers: a builder of `Rings`, and pages as the layers beside have them."""

    @staticmethod
    def get_name() -> str:
        """As our other backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """vLLM asks for one of layers that attend; those of a ring never do."""
        raise NotImplementedError("nothing attends by a ring alone")


def our_layers(vllm_config: Any) -> dict[str, Any]:
    """The engine's layers that have packed pages, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(getattr(layer, "impl", None), PackedImpl)}


def only_ours(vllm_config: Any) -> bool:
    """Whether all layers that have a KV cache have packed pages."""
    every = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return all(
        isinstance(layer, RecentLayer) or isinstance(getattr(layer, "impl", None), PackedImpl) for layer in every
    )


def refuse_unsupported_options(vllm_config: Any) -> None:
    """Refuse what no backend of ours does.

    Raises:
        UnsupportedModelError: a switch of `rules.BESIDE_ANY`, KV transfer other than to host memory, or that one beside
            sliding-window layers or chunked attention is on.
        UnsupportedEngineError: some layers stay in 16 bits, and this vLLM lacks what that needs.
    """
    dtype = vllm_config.cache_config.cache_dtype
    if getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        contract.refuse(dtype, contract.broken(""), skipping=True)
    refuse_beside_any(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    from vllm.platforms import current_platform

    carried = transfer.kv_connector in carriers.SERVED
    what = offload.unsupported(transfer, current_platform.device_type) or (
        carriers.beside(vllm_config) if carried else None
    )
    if what is not None:
        raise UnsupportedModelError(f"--kv-transfer-config: {what} is not supported with kv-cache dtype {dtype!r}; use "
                                    "--kv-offloading-size alone, or --kv-cache-dtype auto")  # fmt: skip
    asked = "--kv-transfer-config" if carried else "--kv-offloading-size"
    layers = vllm_config.compilation_config.static_forward_context.values()
    for name, what in (("sliding_window", "sliding-window layers"), ("attention_chunk_size", "chunked attention")):
        if any(getattr(layer, name, None) is not None for layer in layers):
            raise UnsupportedModelError(f"{asked} is not supported for a model with {what} and kv-cache "
                                        f"dtype {dtype!r}; leave one of the two out")  # fmt: skip


def refuse_beside_any(vllm_config: Any) -> None:
    """Refuse what goes with no cache of ours.

    Raises:
        UnsupportedModelError: a switch of `rules.BESIDE_ANY` is on.
    """
    if (found := rules.first_set(vllm_config, rules.BESIDE_ANY)) is not None:
        dtype = vllm_config.cache_config.cache_dtype
        raise UnsupportedModelError(f"{found[0]} ({found[1]}) is not supported with kv-cache dtype {dtype!r}; leave "
                                    "one of the two out")  # fmt: skip


class PackedBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """The builder of a batch's metadata.

    Raises (at start):
        UnsupportedModelError: as `refuse_unsupported_options`.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_unsupported_options(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Metadata of one batch.

        Raises:
            UnsupportedModelError: its tokens are to attend to later ones, which our kernels do not do.
        """
        if common_attn_metadata.causal is not True:  # False, or a tensor with a word for each sequence
            dtype = self.vllm_config.cache_config.cache_dtype
            raise UnsupportedModelError(
                f"attention to later tokens (causal=False) is not supported with kv-cache dtype {dtype!r}; use "
                "--kv-cache-dtype auto"
            )
        return self.describe(common_attn_metadata)

    @abstractmethod
    def describe(self, common: Any) -> Any:
        """What the layers' `forward` needs of a batch that vLLM describes as `CommonAttentionMetadata`."""


class PackedImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer over packed pages.

    `drafting` says that the layer is a draft model's: it has no window, and no factors but those of a calibration at
    start. `recent` and `ring` are the tokens of the recent window and the layer that has its pages, None until `attach`
    has settled it; `drafts` are tokens that a step may store and the next ones take back, for each sequence.

    Raises (at start):
        UnsupportedModelError: the layer needs ALiBi or a sliding window, or is not a decoder's; or drafts come from
            elsewhere than is served, or from a model beside layers that are not ours.
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
        # A draft is loaded once its model's layers have settled their window.
        self.drafting = has_draft_model(self._config) and any(
            layer.impl.recent is not None for layer in our_layers(self._config).values()
        )
        if self.drafting and not only_ours(self._config):
            refuse("a draft model beside layers that are not full attention, or stay in 16 bits,", "use ngram")
        self._calibration = None if self.drafting else calibration_of(self._config)
        self._factors: Factors | None = None
        self.calibrated: calibration_info.Outcome | None = None
        self.recent: int | None = None
        self.ring: RecentLayer | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM's word that all layers are there: the first of ours gives them their rings.

        vLLM says it again when weights were loaded anew, by `reload_weights` or by a trainer.
        """
        layers = our_layers(self._config)
        attach(self._config, layers)
        calibration_info.outdate([layer.impl for layer in layers.values()])

    def rings(self) -> Rings | None:
        """Of the step that runs; None where nothing is stored or there is no window."""
        found = get_forward_context().attn_metadata if self.ring is not None else None
        return found[self.ring.layer_name] if found and self.ring is not None else None

    def factors(self, layer: Any, device: torch.device | str = "cpu") -> Factors:
        """The factors of this layer and of this rank's KV heads: those of the file, or none that change anything.

        A layer that uses another layer's cache has that one's, with which its tokens were stored. Made once, on the
        device of the first call, and changed in place from then on: pages and captured graphs that read them see it.
        """
        if self._factors is None:
            if self._calibration is not None:
                found = self._calibration.for_layer(self.kv_sharing_target_layer_name or layer.layer_name)
            else:
                found = Factors.identity(self.num_kv_heads, self.head_size)
            self._factors = found.to(device)
        return self._factors

    def set_factors(self, layer: Any, found: Factors) -> None:
        """Put other numbers into the layer's factors."""
        # Where vLLM tried out graphs before, they were made in inference mode, and may be changed in it alone.
        with torch.inference_mode():
            self.factors(layer, found.key_mean.device).copy_(found)
