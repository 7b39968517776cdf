"""vLLM loads this through the entry point `vllm.general_plugins`, in every one of its processes."""

from __future__ import annotations

from kvpilot_kernels import formats
from kvpilot_runtime import compat


def register() -> None:
    """Teach vLLM our dtypes and, on CPU, which backend serves them; everything else of vLLM stays as it is."""
    names = formats.own_names()
    compat.register_dtypes(names)
    compat.route_cpu_backends({name: f"kvpilot_runtime.backend.{name.upper()}Backend" for name in names})
