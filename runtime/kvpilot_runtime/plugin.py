"""vLLM plugin that adds our dtypes and options. The entry point `vllm.general_plugins` loads it in each process.

`register` adds the names of our dtypes to vLLM's data. It replaces functions of vLLM only in processes that need this:

- for a dtype of ours, when a configuration first uses it; child processes learn the dtype from `DTYPE`;
- for requests that load pages through a KV connector and for draining, if `kvpilot-serve` has set `options.SERVE`.
"""

import logging
import os
from typing import Any

from kvpilot_formats import dtypes, formats, latent
from kvpilot_runtime.calibration import info as calibration_info
from kvpilot_runtime.config import options
from kvpilot_runtime.metrics import model_info
from kvpilot_runtime.metrics.worker_info import RECENT_WINDOW, TOKENS_AT_8_BITS
from kvpilot_runtime.transfer import host
from kvpilot_runtime.vllm_api import compat, contract, hooks

BACKENDS = "kvpilot_runtime.backends"
"""Import path of our backends. vLLM loads a backend by its import path, so a process imports only those that it uses.
"""

DTYPE = "KVPILOT_DTYPE"
"""Environment variable that tells child processes which of our dtypes the engine uses."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def register() -> None:
    """Make our dtypes known to vLLM, and turn on the features that the environment requests.

    Raises:
        UnsupportedEngineError: as `serve_dtype` does.
    """
    try:
        compat.make_known((*formats.own_names(), *latent.names()), serve_dtype)
    except Exception as error:  # only log, because an engine with vLLM's own dtypes must start with any later vLLM
        log.error("No dtype of kvpilot can be chosen with vllm %s (%s: %s); use vllm %s", compat.version_text(),
                  type(error).__name__, error, compat.ADVISED)  # fmt: skip
    model_info.publish()
    if os.environ.get(options.SERVE):
        serve_requests()
    if dtype := os.environ.get(DTYPE):
        serve_dtype(dtype)


def serve_requests() -> None:
    """Let requests ask the engine to load pages through its connector, and let it finish waiting requests on drain.

    Engines with vLLM's own dtypes call this function, too, and must start with any later vLLM. So if this vLLM lacks a
    part that we need, only log the fault.
    """
    contract.tell(_platform())
    for serve_part in (host.heed_from_connector, hooks.around_shutdown, _offload_on_cpu):
        try:
            serve_part()
        except (ImportError, AttributeError) as error:
            log.error("vllm %s: %s; vLLM alone handles requests for a connector's pages, and requests that wait when "
                      "an engine ends: use vllm %s", compat.version_text(), error, compat.ADVISED)  # fmt: skip


def serve_dtype(dtype: str) -> None:
    """Set up vLLM for our dtypes, in this process and its future children. A second call changes nothing.

    Raises:
        UnsupportedEngineError: this vLLM is too old, or lacks a part that our dtypes need.
    """
    from kvpilot_runtime.transfer import terms

    platform = _platform()
    contract.tell(platform)
    contract.refuse(dtype)
    paths = {name: f"{BACKENDS}.{platform}.{compat.backend_class(name)}" for name in formats.own_names()}
    paths |= {name: f"{BACKENDS}.latent_{platform}.{compat.backend_class(name)}" for name in latent.names()}
    with contract.needed(dtype):
        compat.store_as_bytes(tuple(paths))
        hooks.route_backends(hooks.CUDA if platform == "cuda" else hooks.CPU, paths)
        hooks.share_pages(tuple(paths))
        hooks.around_kv_cache(settle, serve)
        if dtypes.parse(dtype).has_residuals:
            from kvpilot_runtime.recent import residual_maps, residual_scheduler

            residual_scheduler.require()
            hooks.carry_residual_pages(residual_scheduler.extend, residual_scheduler.changes, residual_maps.refine)
        hooks.around_connectors(terms.connector_class)
        if not compat.lacks(pinned=True):
            hooks.around_layout(terms.layout)
        _offload_on_cpu()
    calibration_info.INFO.publish()
    RECENT_WINDOW.publish()
    TOKENS_AT_8_BITS.publish()
    os.environ[DTYPE] = dtype


def _platform() -> str:
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda() else "cpu"


def _offload_on_cpu() -> None:
    """On the CPU platform, give vLLM's offloading a worker, because vLLM has none there."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        host.serve_on_cpu()


def settle(worker: Any) -> None:
    """Calibrate a worker that has loaded its model but has no KV cache yet, and report its settings.

    Raises:
        UnsupportedModelError: as `refuse_unsupported_options` and `at_start.calibrate` do.
    """
    from kvpilot_runtime.backends.packed import our_layers, refuse_unsupported_options
    from kvpilot_runtime.calibration import at_start
    from kvpilot_runtime.recent import window

    if layers := our_layers(worker.vllm_config):
        # Refuse unsupported options now, because an unsupported KV connector would later fail with an unclear message.
        refuse_unsupported_options(worker.vllm_config)
    for layer in layers.values():
        layer.impl.views = None  # They would keep the memory of vLLM's trial cache, which is not yet freed.
    at_start.calibrate(worker, layers)
    if layers:
        window.report(worker.vllm_config)


def serve(worker: Any) -> None:
    """Prepare a worker that has its KV cache: check its pages, and give the KV connector the engine's `terms.Terms`.

    Raises:
        UnsupportedModelError: as `make_maps` does.
        UnsupportedEngineError: as `page_check.check` and the connector's `agree` do.
    """
    from kvpilot_runtime.backends import page_check
    from kvpilot_runtime.backends.packed import make_maps, our_layers
    from kvpilot_runtime.transfer import terms

    layers = our_layers(worker.vllm_config)
    make_maps(layers.values(), worker.model_runner.kv_cache_config.num_blocks)
    page_check.check(worker)
    terms.agree(worker, layers)
