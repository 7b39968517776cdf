"""Hooks into vLLM. Each function here wraps one or two functions of vLLM (`wrap`), once per process.

`plugin` calls a hook only in processes that use one of our dtypes or options. vLLM has no interface by which a plugin
can choose the backend of a dtype on a CPU. So `route_backends` wraps the function that chooses. Other dtypes keep the
backend that vLLM chooses.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvpilot_formats import latent
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.vllm_api import contract
from kvpilot_runtime.vllm_api.wrap import wrap

CPU, CUDA = "vllm.platforms.cpu:CpuPlatform", "vllm.platforms.cuda:CudaPlatformBase"


def route_backends(platform: str, paths: Mapping[str, str]) -> None:
    """Let vLLM use our backend for each KV-cache dtype in `paths`, on the platform `CPU` or `CUDA`.

    `paths` has the backend's import path by dtype.
    """

    def get_attn_backend_cls(
        stock: Any, cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = _ours(cls, paths, attn_selector_config)
        return found or stock(cls, selected_backend, attn_selector_config, *args, **kwargs)

    wrap(f"{platform}.get_attn_backend_cls", get_attn_backend_cls)
    if platform == CPU:
        _settle_cpu(paths)


def _settle_cpu(paths: Mapping[str, str]) -> None:
    """Let vLLM's CPU platform configure engines with these dtypes as GPU platforms do."""

    def update_block_size_for_backend(stock: Any, cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Set a common page size as GPU platforms do, if some layers stay in 16 bits.

        Otherwise the CPU platform would pad our pages to the size of a 16-bit page.
        """
        stock(cls, vllm_config, *args, **kwargs)
        dtype = vllm_config.cache_config.cache_dtype
        if vllm_config.cache_config.kv_cache_dtype_skip_layers and dtype in paths:
            cls._align_heterogeneous_kv_block_size(vllm_config, None)

    def check_and_update_config(stock: Any, cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Undo settings of vLLM's CPU platform that our backends do not need, and avoid a wrong RoPE kernel.

        For MLA, the platform turns off chunked prefill and prefix caching, because its own backend cannot read stored
        context. Our backend can, so turn them on. For images whose tokens attend in both directions, the platform
        allows chunks that split an image, so forbid them. The RoPE kernel of 0.32 gives wrong results for DeepSeek, so
        let plain torch replace it.
        """
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        stock(cls, vllm_config, *args, **kwargs)
        if cache.cache_dtype in paths and vllm_config.model_config.is_mm_prefix_lm:
            scheduler.disable_chunked_mm_input = True
        if cache.cache_dtype in latent.names():
            scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = asked
            ops = vllm_config.compilation_config.custom_ops
            if not {"-rotary_embedding", "+rotary_embedding"} & set(ops):
                ops.append("-rotary_embedding")

    wrap(f"{CPU}.update_block_size_for_backend", update_block_size_for_backend)
    wrap(f"{CPU}.check_and_update_config", check_and_update_config)


def _ours(platform: Any, paths: Mapping[str, str], asked: Any) -> str | None:
    """Return our backend's import path for a layer; None if the layer's dtype is not ours.

    Raises:
        UnsupportedModelError: our backend does not support the layer, which `asked` describes.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    dtype = asked.kv_cache_dtype or "auto"
    if dtype not in paths:
        return None
    with contract.needed(dtype):
        backend = resolve_obj_by_qualname(paths[dtype])
        reasons = backend.validate_configuration(device_capability=platform.get_device_capability(), **asked._asdict())
    if reasons:
        raise UnsupportedModelError(
            f"kv-cache dtype {dtype!r} cannot serve this model: {', '.join(reasons)}; use --kv-cache-dtype auto"
        )
    return paths[dtype]


def share_pages(names: tuple[str, ...]) -> None:
    """Let layers in 16 bits (`--kv-cache-dtype-skip-layers`) share the block pool with layers in a dtype of `names`.

    All pages of a pool have one size: that of the quantized layers. vLLM fits the blocks of other layers into it. But
    to find that size, vLLM asks the backend of the model's first layer, which may be in 16 bits. With this hook, vLLM
    asks the backend of a quantized layer, and makes a page large enough for the smallest block of every backend. The
    block size of a model without 16-bit layers does not change.
    """

    def align(stock: Any, cls: Any, vllm_config: Any, backend_cls: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backend import MultipleOf

        dtype = vllm_config.cache_config.cache_dtype
        if dtype not in names:
            stock(cls, vllm_config, backend_cls, *args, **kwargs)
            return
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
        quantized = [x.get_attn_backend() for x in layers if getattr(x, "kv_cache_dtype", None) == dtype]
        if not quantized or len(quantized) == len(layers):
            return
        backends = {x.get_attn_backend() for x in layers}
        sizes = [[getattr(s, "base", s) for s in b.get_supported_kernel_block_sizes()] for b in backends]
        smallest = MultipleOf(max(min(of_one) for of_one in sizes))
        owner = type("Owner", (quantized[0],), {"get_supported_kernel_block_sizes": staticmethod(lambda: [smallest])})
        stock(cls, vllm_config, owner, *args, **kwargs)

    wrap("vllm.platforms.interface:Platform._align_heterogeneous_kv_block_size", align)


def around_kv_cache(before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call `before` with each of vLLM's workers before the worker creates its KV cache, and `after` afterwards.

    At both times the worker has loaded the model and measured the memory, but not captured CUDA graphs.
    """

    def initialize_from_config(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            before(self.worker)
        made = stock(self, *args, **kwargs)
        with set_current_vllm_config(self.vllm_config):
            after(self.worker)
        return made

    wrap("vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config", initialize_from_config)


CHANGES = "kvpilot_residual_pages"
"""Attribute of vLLM's `SchedulerOutput` with the blocks whose residual pages have changed."""


def carry_residual_pages(
    extend: Callable[[Any], None], changes: Callable[[Any], Any], refine: Callable[[Any, Any], None]
) -> None:
    """Let `extend` prepare each scheduler. Carry its `changes` with each engine step to the workers, to `refine`.

    vLLM passes a scheduler's output to the workers before the step runs, to other processes as a pickle.
    """

    def prepare(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        extend(self)

    def schedule(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        step = stock(self, *args, **kwargs)
        if found := changes(self):
            setattr(step, CHANGES, found)
        return step

    def execute_model(stock: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if found := getattr(scheduler_output, CHANGES, None):
            refine(self.vllm_config, found)
        return stock(self, scheduler_output, *args, **kwargs)

    wrap("vllm.v1.core.sched.scheduler:Scheduler.__init__", prepare)
    wrap("vllm.v1.core.sched.scheduler:Scheduler.schedule", schedule)
    wrap("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", execute_model)


def around_connectors(ours: Callable[[Any], Any]) -> None:
    """Let `ours` choose a connector's class from vLLM's configuration. If it returns None, vLLM chooses."""

    def create_connector(stock: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = ours(config)
        return stock(cls, config, *args, **kwargs) if chosen is None else chosen(config, *args, **kwargs)

    factory = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
    wrap(f"{factory}.create_connector", create_connector)


def around_layout(ours: Callable[[Any], str | None]) -> None:
    """Let `ours` choose the KV cache's layout from vLLM's configuration. If it returns None, vLLM's connector does."""

    def get_kv_connector_cache_layout(stock: Any, vllm_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return (vllm_config and ours(vllm_config)) or stock(vllm_config, *args, **kwargs)

    wrap("vllm.v1.attention.backends.utils:get_kv_connector_cache_layout", get_kv_connector_cache_layout)


def around_shutdown() -> None:
    """Let an engine that drains also finish requests that still wait in the input queue of its core.

    vLLM's core reads this queue between engine steps. Without this hook, a draining core rejects requests from it.
    """
    from vllm.v1.engine.core import EngineShutdownState

    def begins_to_finish(self: Any) -> bool:
        return bool(self.shutdown_state == EngineShutdownState.REQUESTED and self.vllm_config.shutdown_timeout)

    def _handle_shutdown(stock: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
        while begins_to_finish(self) and not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
        return bool(stock(self, *args, **kwargs))

    def _reject_add_in_shutdown(stock: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
        return not begins_to_finish(self) and bool(stock(self, *args, **kwargs))

    wrap("vllm.v1.engine.core:EngineCoreProc._handle_shutdown", _handle_shutdown)
    wrap("vllm.v1.engine.core:EngineCoreProc._reject_add_in_shutdown", _reject_add_in_shutdown)
