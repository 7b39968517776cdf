"""The only module that knows vLLM's versions: how each is taught our dtypes and our CPU backend.

Up to 0.32 the names of KV-cache dtypes are a closed `Literal`; 0.33 has a registry for them. 0.28 asks a backend for
the shape of its cache, later versions for a layout. On CPU no version lets a backend be chosen per dtype, so the
platform's choice is wrapped: our dtypes get our backend, all others what vLLM would have picked, which leaves stock
behaviour (and layers that skip quantization) alone. No version sizes shared pages by the layers that have the dtype:
that is wrapped too.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from kvpilot_kernels.formats import Format
from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError

OLDEST, NEWEST = (0, 28), (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
"""The versions that kvpilot was made for; another one is served as far as it keeps to `contract`."""

RINGS_STAY_FROM = (0, 32)
"""From here on offloading leaves pages alone that stay out of prefix caching; before, it would look for rings' pages by
the hashes of prefixes (0.30; the source of 0.31 was not read)."""
SLEEP_FROM = (0, 30)
"""From here on sleep mode frees the KV cache alone; before, it took the steps' buffers, too."""

_BUILD = (10**6, 0)


def version_text() -> str:
    """The installed vLLM's own word for its version.

    Raises:
        UnsupportedEngineError: vLLM is absent.
    """
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError(f"vllm is not installed; install vllm {RANGE} beside kvpilot") from None


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM; a build without numbers counts as newer than any with.

    Raises:
        UnsupportedEngineError: vLLM is absent.
    """
    found = re.match(r"(\d+)\.(\d+)", version_text())
    return (int(found[1]), int(found[2])) if found else _BUILD


def tested() -> bool:
    """Whether the installed vLLM is of a version that kvpilot was made for."""
    return OLDEST <= vllm_version() <= NEWEST


def wakes_as_it_was() -> bool:
    """Whether sleep mode leaves an engine with our dtypes as it was; True where there is no vLLM to ask."""
    try:
        return vllm_version() >= SLEEP_FROM
    except UnsupportedEngineError:
        return True


def register_dtypes(names: tuple[str, ...]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`, stored as bytes in pages that 16-bit layers can share.

    Repeating it changes nothing.
    """
    import torch
    from vllm.config import cache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))
    _share_pages(names)
    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(names)
    else:
        _extend_literal(names)


def _register_handlers(names: tuple[str, ...]) -> None:
    """Register each name with vLLM's own registry (0.33), which takes a class as a decorator does."""
    import torch
    from vllm.config import cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Packed:
        """What vLLM asks of a dtype: bytes to store, and no mode of its generic kernels.

        `KVQuantMode.CUSTOM` would say the latter, but has the same value as a mode of another format and is taken for
        it. NONE is what older versions find for a name that they do not know.
        """

        name: str

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.NONE

    for name in names:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type(name, (Packed,), {"name": name}))


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


Judge = Callable[[str, bool], None]
"""Refuses a layer of a KV-cache dtype of ours, or does nothing; told whether other layers stay in 16 bits."""


def backend_class(dtype: str) -> str:
    """The name of the class that serves a dtype of ours, in the module of its platform."""
    return f"{dtype.upper()}Backend"


def route_cpu_backends(paths: Mapping[str, str], judge: Judge) -> None:
    """On the CPU platform, serve each KV-cache dtype in `paths` with the backend class at that import path."""
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, "_kvpilot_routed", False):
        return
    stock = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = _ours(cls, paths, judge, attn_selector_config)
        return found or stock(cls, selected_backend, attn_selector_config, *args, **kwargs)

    update = CpuPlatform.update_block_size_for_backend.__func__

    def update_block_size_for_backend(cls: Any, vllm_config: Any) -> None:
        """Size shared pages as GPU platforms do: stock CPU leaves that out and pads ours to a 16-bit page."""
        update(cls, vllm_config)
        dtype = vllm_config.cache_config.cache_dtype
        if vllm_config.cache_config.kv_cache_dtype_skip_layers and dtype in paths:
            judge(dtype, True)
            if vllm_version() < (0, 30):
                _tell_cpu_blocks()
            cls._align_heterogeneous_kv_block_size(vllm_config, None)

    settle = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        """Stock CPU has no chunked prefill and no prefix caching under MLA, since its own backend reads no context.

        And its kernel for RoPE (0.32) rotates neither queries of several heads nor keys within a wider row as DeepSeek
        has them, in neighbours: plain torch does.
        """
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        settle(cls, vllm_config)
        if cache.cache_dtype in latent.names():
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = asked
            ops = vllm_config.compilation_config.custom_ops
            if not {"-rotary_embedding", "+rotary_embedding"} & set(ops):
                ops.append("-rotary_embedding")

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.update_block_size_for_backend = classmethod(update_block_size_for_backend)
    CpuPlatform._kvpilot_routed = True


def route_cuda_backends(paths: Mapping[str, str], judge: Judge) -> None:
    """On a CUDA platform, serve each KV-cache dtype in `paths` with the backend class at that import path."""
    from vllm.platforms.cuda import CudaPlatformBase

    if getattr(CudaPlatformBase, "_kvpilot_routed", False):
        return
    stock = CudaPlatformBase.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = _ours(cls, paths, judge, attn_selector_config)
        return found or stock(cls, selected_backend, attn_selector_config, *args, **kwargs)

    CudaPlatformBase.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CudaPlatformBase._kvpilot_routed = True


def _ours(platform: Any, paths: Mapping[str, str], judge: Judge, asked: Any) -> str | None:
    """The path of our backend for a layer, or None where its KV-cache dtype is not ours.

    Raises:
        UnsupportedEngineError: as `judge`.
        UnsupportedModelError: our backend does not serve such a layer; with all of the backend's reasons.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    dtype = asked.kv_cache_dtype or "auto"
    if dtype not in paths:
        return None
    judge(dtype, False)
    backend = resolve_obj_by_qualname(paths[dtype])
    reasons = backend.validate_configuration(device_capability=platform.get_device_capability(), **asked._asdict())
    if reasons:
        raise UnsupportedModelError(
            f"kv-cache dtype {dtype!r} cannot serve this model: {', '.join(reasons)}; use --kv-cache-dtype auto"
        )
    return paths[dtype]


def around_kv_cache(before: str, after: str) -> None:
    """Call two functions, given by import path, in every worker that has loaded its model and measured its memory: one
    before it makes the KV cache, one when it has it and has not captured graphs. They take vLLM's worker."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    stock = WorkerWrapperBase.initialize_from_config
    if getattr(stock, "_kvpilot_calls", None) == (before, after):
        return

    def initialize_from_config(self: Any, kv_cache_configs: Any) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            resolve_obj_by_qualname(before)(self.worker)
        stock(self, kv_cache_configs)
        with set_current_vllm_config(self.vllm_config):
            resolve_obj_by_qualname(after)(self.worker)

    initialize_from_config._kvpilot_calls = before, after  # type: ignore[attr-defined]
    WorkerWrapperBase.initialize_from_config = initialize_from_config


def around_attention(spec_of: str, backend_of: str) -> None:
    """Let two functions, given by import path, say what vLLM is told of attention layers: their pages and backends.

    `spec_of` takes the layer, what the layer would have said, and vLLM's configuration; `backend_of` the first two.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.utils.import_utils import resolve_obj_by_qualname

    stock_spec, stock_backend = Attention.get_kv_cache_spec, Attention.get_attn_backend
    if getattr(stock_spec, "_kvpilot_asks", None) is not None:
        return

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        return resolve_obj_by_qualname(spec_of)(self, stock_spec(self, vllm_config), vllm_config)

    def get_attn_backend(self: Any) -> Any:
        return resolve_obj_by_qualname(backend_of)(self, stock_backend(self))

    get_kv_cache_spec._kvpilot_asks = spec_of  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec, Attention.get_attn_backend = get_kv_cache_spec, get_attn_backend


def _tell_cpu_blocks() -> None:
    """Before 0.30 the CPU backend says that it takes blocks of 16 tokens, and fails unless they are multiples of 32."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda: [MultipleOf(32)])


def _share_pages(names: tuple[str, ...]) -> None:
    """Let layers in 16 bits (`--kv-cache-dtype-skip-layers`) share the block pool with layers in a dtype of `names`.

    All pages of a pool have one size. vLLM takes the quantized layers' page for it and gives the others blocks of as
    many tokens as fit, but it asks the backend of the model's first layer for both sizes, which may be a 16-bit one.
    Here a layer that has the dtype answers, the page holds the smallest block of every backend, and a model without
    16-bit layers keeps its block size.
    """
    from vllm.platforms.interface import Platform

    stock = getattr(getattr(Platform, "_align_heterogeneous_kv_block_size", None), "__func__", None)
    if stock is None or getattr(Platform, "_kvpilot_shares_pages", False):
        return  # where it is not there, dtypes of ours are refused beside layers in 16 bits

    def align(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backend import MultipleOf

        dtype = vllm_config.cache_config.cache_dtype
        if dtype not in names:
            stock(cls, vllm_config, backend_cls)
            return
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
        quantized = [x.get_attn_backend() for x in layers if getattr(x, "kv_cache_dtype", None) == dtype]
        if not quantized or len(quantized) == len(layers):
            return
        backends = {x.get_attn_backend() for x in layers}
        sizes = [[getattr(s, "base", s) for s in b.get_supported_kernel_block_sizes()] for b in backends]
        smallest = MultipleOf(max(min(of_one) for of_one in sizes))
        owner = type("Owner", (quantized[0],), {"get_supported_kernel_block_sizes": staticmethod(lambda: [smallest])})
        stock(cls, vllm_config, owner)

    Platform._align_heterogeneous_kv_block_size = classmethod(align)
    Platform._kvpilot_shares_pages = True


def chunks_in_host_memory(spec: Any) -> int:
    """Chunks that a `CPUOffloadingSpec` holds; in 0.28 they are called blocks."""
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)


class HeadMajorPages:
    """What a backend with our pages says of its cache: uint8 [blocks, kv_heads, tokens, row_bytes], flat a head."""

    fmt: ClassVar[Format]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """From 0.29 on: blocks, then heads, then tokens."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """0.28: the same as a shape in bytes."""
        return num_blocks, num_kv_heads, block_size, cls.fmt.row_bytes(head_size)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """0.28: the same, for backends of other layers that can have it either way."""
        return "HND"


@dataclass(frozen=True)
class Drafter:
    """A model that drafts, as a runner holds it.

    Attributes:
        reads_states: the served model's states are an input of it. combines_states: of several of its layers.
        uses_mrope: positions have three dimensions, as the served model's do.
    """

    model: Any
    reads_states: bool
    combines_states: bool
    uses_mrope: bool


def drafter(runner: Any) -> Drafter:
    """The model that drafts in a worker's runner, of which 0.32 has two kinds: on a GPU it is "model runner V2"."""
    if (old := getattr(runner, "drafter", None)) is not None:
        return Drafter(old.model, old.pass_hidden_states_to_model, old.eagle3_use_aux_hidden_state, old.uses_mrope)
    new = runner.speculator
    return Drafter(new.model, new.method != "draft_model", runner.use_aux_hidden_state_outputs, uses_mrope=False)
