"""Find out whether this machine's processor supports vLLM's quantized KV-cache dtypes."""

import platform
from collections.abc import Iterable
from pathlib import Path


def can_serve_quantized(machine: str, flags: Iterable[str]) -> bool:
    """Return True if vLLM 0.32 serves its own quantized KV-cache dtypes on a processor: x86 needs AVX-512 or AMX."""
    return machine != "x86_64" or not {"avx512f", "amx_tile"}.isdisjoint(flags)


def serves_quantized() -> bool:
    """Return `can_serve_quantized` for this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return can_serve_quantized(platform.machine(), flags)
