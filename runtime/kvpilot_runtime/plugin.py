"""vLLM loads this through the entry point `vllm.general_plugins`, in every one of its processes."""

from __future__ import annotations

from typing import Any

from kvpilot_kernels import formats
from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_runtime.config import retention
from kvpilot_runtime.engine import compat, contract, hooks
from kvpilot_runtime.engine.vllm_parts import Feature
from kvpilot_runtime.metrics import model_info
from kvpilot_runtime.recent import info as recent_info
from kvpilot_runtime.transfer import host

BACKENDS, BOUNDED, TRANSFER = (f"kvpilot_runtime.{package}" for package in ("backends", "bounded", "transfer"))
"""vLLM, and what is wrapped in it, get import paths: no process imports what it does not need."""


def register() -> None:
    """Teach vLLM our dtypes, and which backend serves them; publish what is served; all else of vLLM stays.

    A vLLM that lacks what this stands on keeps its own dtypes, and says what it lacks.

    Raises:
        UnsupportedEngineError: a cache with a bound is asked for, and this vLLM cannot be told of it.
        UnsupportedModelError: what is asked for cannot be read.
    """
    from vllm.platforms import current_platform

    names = formats.own_names()
    platform = "cuda" if current_platform.is_cuda() else "cpu"
    broken = contract.broken(platform)
    contract.tell(broken)
    model_info.publish()
    if (bound := retention.asked()) is not None:
        contract.refuse_bound(str(bound), broken, heavy=isinstance(bound, retention.HeavyHitters))
        hooks.around_attention(f"{BOUNDED}.attention.spec_of", f"{BOUNDED}.attention.backend_of")
        if isinstance(bound, retention.HeavyHitters):
            hooks.around_scheduler(f"{BOUNDED}.heavy_spec.tell", f"{BOUNDED}.heavy_spec.hear")
        retention.INFO.publish()
    if not any(one.part.feature is Feature.HOST for one in broken):
        host.heed_from_host()
    if not any(one.part.feature is Feature.DRAIN for one in broken):
        hooks.around_shutdown()
    if any(one.part.feature is Feature.NAMES for one in broken):
        return
    paths = {name: f"{BACKENDS}.{platform}.{compat.backend_class(name)}" for name in names}
    paths |= {name: f"{BACKENDS}.latent_{platform}.{compat.backend_class(name)}" for name in latent.names()}
    compat.register_dtypes(tuple(paths))
    route = hooks.route_cuda_backends if platform == "cuda" else hooks.route_cpu_backends
    route(paths, lambda dtype, skipping: contract.refuse(dtype, broken, skipping))
    if any(one.part.feature is Feature.LAYERS for one in broken):
        return
    hooks.around_kv_cache("kvpilot_runtime.plugin.settle", "kvpilot_runtime.plugin.serve")
    hooks.around_connectors(f"{TRANSFER}.terms.connector_class")
    if compat.vllm_version() == compat.CARRIES:
        hooks.around_layout(f"{TRANSFER}.terms.layout")
    calibration_info.INFO.publish()
    recent_info.INFO.publish()


def settle(worker: Any) -> None:
    """In a worker that has loaded its model: calibrate it, and report what is served.

    Raises:
        UnsupportedModelError: as `refuse_unsupported_options` and `at_start.calibrate`.
    """
    from kvpilot_runtime.backends.packed import our_layers, refuse_unsupported_options
    from kvpilot_runtime.calibration import at_start
    from kvpilot_runtime.recent import ring_layers

    if layers := our_layers(worker.vllm_config):
        refuse_unsupported_options(worker.vllm_config)  # before a connector that is not served asks for what it needs
    at_start.calibrate(worker, layers)
    ring_layers.report(worker.vllm_config, layers)
    if (bound := retention.asked()) is not None:
        retention.report(bound, worker.vllm_config.cache_config.block_size)
    host.serve_on_cpu(worker.vllm_config)


def serve(worker: Any) -> None:
    """In a worker that has its KV cache: refuse what would be stored in others' pages, try the pages, weigh them, and
    tell other engines on which terms they can have them.

    Raises:
        UnsupportedModelError: as `refuse_other_groups` and `heavy.attach`.
        UnsupportedEngineError: as `page_check.check` and the connector's `agree`.
    """
    from kvpilot_runtime import speculation
    from kvpilot_runtime.backends import page_check
    from kvpilot_runtime.backends.packed import our_layers
    from kvpilot_runtime.transfer import terms

    layers = our_layers(worker.vllm_config)
    drafting = {name for name, layer in layers.items() if layer.impl.drafting}
    if drafting:
        speculation.refuse_other_groups(
            worker.vllm_config, worker.model_runner.kv_cache_config.kv_cache_groups, drafting
        )
    page_check.check(worker)
    terms.agree(worker, layers)
    if isinstance(bound := retention.asked(), retention.HeavyHitters):
        from kvpilot_runtime.bounded import heavy

        heavy.attach(worker, bound)
