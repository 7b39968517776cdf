"""What this machine's processor can do."""

from __future__ import annotations

import platform
from pathlib import Path


def serves_quantized() -> bool:
    """Whether vLLM 0.32 serves quantized KV-cache dtypes of its own here: on x86 these need AVX-512 or AMX."""
    if platform.machine() != "x86_64":
        return True
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not {"avx512f", "amx_tile"}.isdisjoint(flags)
