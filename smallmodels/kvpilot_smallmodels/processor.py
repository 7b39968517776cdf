"""Abilities of this machine's processor."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path


def can_serve_quantized(machine: str, flags: Iterable[str]) -> bool:
    """Return True if vLLM 0.32 serves its own quantized KV-cache dtypes. On x86 they need AVX-512 or AMX."""
    return machine != "x86_64" or not {"avx512f", "amx_tile"}.isdisjoint(flags)


def serves_quantized() -> bool:
    """Return True if this machine can serve vLLM's quantized dtypes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return can_serve_quantized(platform.machine(), flags)
