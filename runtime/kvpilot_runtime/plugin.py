"""vLLM loads this through the entry point `vllm.general_plugins`, in every one of its processes."""

from __future__ import annotations

from typing import Any

from kvpilot_kernels import formats
from kvpilot_runtime import calibration_info, compat, model_info, recent_info


def register() -> None:
    """Teach vLLM our dtypes, and which backend serves them; publish what is served; all else of vLLM stays."""
    from vllm.platforms import current_platform

    names = formats.own_names()
    compat.register_dtypes(names)
    if current_platform.is_cuda():
        compat.route_cuda_backends({name: f"kvpilot_runtime.cuda.{compat.backend_class(name)}" for name in names})
    else:
        compat.route_cpu_backends({name: f"kvpilot_runtime.cpu.{compat.backend_class(name)}" for name in names})
    compat.before_kv_cache("kvpilot_runtime.plugin.settle")
    model_info.publish()
    calibration_info.INFO.publish()
    recent_info.INFO.publish()


def settle(worker: Any) -> None:
    """In a worker that has loaded its model: calibrate it, and report what is served.

    Raises:
        UnsupportedModelError: as `self_calibration.calibrate`.
    """
    from kvpilot_runtime import recent, self_calibration
    from kvpilot_runtime.backend import our_layers

    self_calibration.calibrate(worker)
    recent.report(worker.vllm_config, our_layers(worker.vllm_config))
