"""vLLM loads this through the entry point `vllm.general_plugins`, in every one of its processes."""

from __future__ import annotations

from kvpilot_kernels import formats
from kvpilot_runtime import calibration_info, compat, model_info


def register() -> None:
    """Teach vLLM our dtypes, and which backend serves them; publish what is served; all else of vLLM stays."""
    from vllm.platforms import current_platform

    names = formats.own_names()
    compat.register_dtypes(names)
    if current_platform.is_cuda():
        compat.route_cuda_backends({name: f"kvpilot_runtime.cuda.{compat.backend_class(name)}" for name in names})
    else:
        compat.route_cpu_backends({name: f"kvpilot_runtime.cpu.{compat.backend_class(name)}" for name in names})
    compat.before_kv_cache("kvpilot_runtime.self_calibration.calibrate")
    model_info.publish()
    calibration_info.publish()
