"""Where vLLM calls us: its methods that are wrapped, once for a process.

On CPU no version lets a backend be chosen per dtype, so the platform's choice is wrapped: our dtypes get our backend,
all others what vLLM would have picked, which leaves stock behaviour (and layers that skip quantization) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime.engine import compat
from kvpilot_runtime.errors import UnsupportedModelError

Judge = Callable[[str, bool], None]
"""Refuses a layer of a KV-cache dtype of ours, or does nothing; told whether other layers stay in 16 bits."""


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
            compat.tell_cpu_blocks()
            cls._align_heterogeneous_kv_block_size(vllm_config, None)

    settle = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        """Stock CPU has no chunked prefill and no prefix caching under MLA, since its own backend reads no context; and
        it cuts images whose tokens attend to each other both ways, as if they did not.

        And its kernel for RoPE (0.32) rotates neither queries of several heads nor keys within a wider row as DeepSeek
        has them, in neighbours: plain torch does.
        """
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        settle(cls, vllm_config)
        if cache.cache_dtype in paths and vllm_config.model_config.is_mm_prefix_lm:
            scheduler.disable_chunked_mm_input = True
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


def around_scheduler(tell: str, hear: str) -> None:
    """Call two functions, given by import path, of every scheduler: one when it has made a step, with the step, one
    before it takes a step's results, with these."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.scheduler import Scheduler

    stock, update = Scheduler.schedule, Scheduler.update_from_output
    if getattr(stock, "_kvpilot_tells", None) is not None:
        return

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        resolve_obj_by_qualname(tell)(self, output)
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        resolve_obj_by_qualname(hear)(self, model_runner_output)
        return update(self, scheduler_output, model_runner_output)

    schedule._kvpilot_tells = tell  # type: ignore[attr-defined]
    Scheduler.schedule, Scheduler.update_from_output = schedule, update_from_output


def around_connectors(ours: str) -> None:
    """Let a function, given by import path, say which class is made for a connector: of vLLM's configuration, None for
    vLLM's own choice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname

    stock = KVConnectorFactory.create_connector.__func__
    if getattr(stock, "_kvpilot_asks", None) is not None:
        return

    def create_connector(cls: Any, config: Any, role: Any, kv_cache_config: Any) -> Any:
        chosen = resolve_obj_by_qualname(ours)(config)
        return stock(cls, config, role, kv_cache_config) if chosen is None else chosen(config, role, kv_cache_config)

    create_connector._kvpilot_asks = ours  # type: ignore[attr-defined]
    KVConnectorFactory.create_connector = classmethod(create_connector)


def around_layout(ours: str) -> None:
    """Let a function, given by import path, say which layout the KV cache should have for an engine's connector: of
    vLLM's configuration, None for what vLLM's own connector wants, which is all that vLLM asks."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends import utils

    stock = utils.get_kv_connector_cache_layout
    if getattr(stock, "_kvpilot_asks", None) is not None:
        return

    def get_kv_connector_cache_layout(config: Any) -> Any:
        return resolve_obj_by_qualname(ours)(config) or stock(config)

    get_kv_connector_cache_layout._kvpilot_asks = ours  # type: ignore[attr-defined]
    utils.get_kv_connector_cache_layout = get_kv_connector_cache_layout


def around_shutdown() -> None:
    """Let an engine that is told to end, and to finish what it has, finish requests that waited for its step, too.

    vLLM hands those back unanswered: its core takes requests between two steps, and none once it has been told.
    """
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    stock, reject = EngineCoreProc._handle_shutdown, EngineCoreProc._reject_add_in_shutdown
    if getattr(stock, "_kvpilot_takes", False):
        return

    def begins_to_finish(self: Any) -> bool:
        return bool(self.shutdown_state == EngineShutdownState.REQUESTED and self.vllm_config.shutdown_timeout)

    def _handle_shutdown(self: Any) -> bool:
        while begins_to_finish(self) and not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
        return bool(stock(self))

    def _reject_add_in_shutdown(self: Any, request: Any) -> bool:
        return not begins_to_finish(self) and bool(reject(self, request))

    _handle_shutdown._kvpilot_takes = True  # type: ignore[attr-defined]
    EngineCoreProc._handle_shutdown = _handle_shutdown
    EngineCoreProc._reject_add_in_shutdown = _reject_add_in_shutdown
