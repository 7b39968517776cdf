"""What a processor can do."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path


def can_serve_quantized(machine: str, flags: Iterable[str]) -> bool:
    """Whether vLLM 0.32 serves quantized KV-cache dtypes of its own: on x86 these need AVX-512 or AMX."""
    return machine != "x86_64" or not {"avx512f", "amx_tile"}.isdisjoint(flags)


def serves_quantized() -> bool:
    """The same of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return can_serve_quantized(platform.machine(), flags)
