"""vLLM loads this through the entry point `vllm.general_plugins`, in every one of its processes."""

from __future__ import annotations

from typing import Any

from kvpilot_kernels import formats
from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime import calibration_info, compat, contract, hooks, model_info, offload, recent_info, retention
from kvpilot_runtime.vllm_parts import Feature


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
        hooks.around_attention("kvpilot_runtime.bounded.spec_of", "kvpilot_runtime.bounded.backend_of")
        if isinstance(bound, retention.HeavyHitters):
            hooks.around_scheduler("kvpilot_runtime.heavy_spec.tell", "kvpilot_runtime.heavy_spec.hear")
        retention.INFO.publish()
    if not any(one.part.feature is Feature.HOST for one in broken):
        offload.heed_from_host()
    if not any(one.part.feature is Feature.DRAIN for one in broken):
        hooks.around_shutdown()
    if any(one.part.feature is Feature.NAMES for one in broken):
        return
    paths = {name: f"kvpilot_runtime.{platform}.{compat.backend_class(name)}" for name in names}
    paths |= {name: f"kvpilot_runtime.latent_{platform}.{compat.backend_class(name)}" for name in latent.names()}
    compat.register_dtypes(tuple(paths))
    route = hooks.route_cuda_backends if platform == "cuda" else hooks.route_cpu_backends
    route(paths, lambda dtype, skipping: contract.refuse(dtype, broken, skipping))
    if any(one.part.feature is Feature.LAYERS for one in broken):
        return
    hooks.around_kv_cache("kvpilot_runtime.plugin.settle", "kvpilot_runtime.plugin.serve")
    hooks.around_connectors("kvpilot_runtime.carriers.connector_class")
    if compat.vllm_version() == compat.CARRIES:
        hooks.around_layout("kvpilot_runtime.carriers.layout")
    calibration_info.INFO.publish()
    recent_info.INFO.publish()


def settle(worker: Any) -> None:
    """In a worker that has loaded its model: calibrate it, and report what is served.

    Raises:
        UnsupportedModelError: as `refuse_unsupported_options` and `self_calibration.calibrate`.
    """
    from kvpilot_runtime import recent, self_calibration
    from kvpilot_runtime.backend import our_layers, refuse_unsupported_options

    if layers := our_layers(worker.vllm_config):
        refuse_unsupported_options(worker.vllm_config)  # before a connector that is not served asks for what it needs
    self_calibration.calibrate(worker)
    recent.report(worker.vllm_config, layers)
    if (bound := retention.asked()) is not None:
        retention.report(bound, worker.vllm_config.cache_config.block_size)
    offload.serve_on_cpu(worker.vllm_config)


def serve(worker: Any) -> None:
    """In a worker that has its KV cache: refuse what would be stored in others' pages, try the pages, weigh them, and
    tell other engines on which terms they can have them.

    Raises:
        UnsupportedModelError: as `refuse_other_groups` and `heavy.attach`.
        UnsupportedEngineError: as `page_check.check` and the connector's `agree`.
    """
    from kvpilot_runtime import carriers, page_check, speculation
    from kvpilot_runtime.backend import our_layers

    layers = our_layers(worker.vllm_config)
    drafting = {name for name, layer in layers.items() if layer.impl.drafting}
    if drafting:
        speculation.refuse_other_groups(
            worker.vllm_config, worker.model_runner.kv_cache_config.kv_cache_groups, drafting
        )
    page_check.check(worker)
    carriers.agree(worker, layers)
    if isinstance(bound := retention.asked(), retention.HeavyHitters):
        from kvpilot_runtime import heavy

        heavy.attach(worker, bound)
