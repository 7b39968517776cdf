"""What this machine offers: the platform of the installed vLLM, and the memory that an engine may take."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, memory in bytes, and compute capability such as (9, 0)."""

    name: str
    total: int
    used: int
    capability: tuple[int, int]


def platform() -> Platform:
    """What the installed vLLM was built for: its version carries `+cpu` when it is the CPU build."""
    try:
        return "cpu" if "cpu" in importlib.metadata.version("vllm") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cuda"


def available_memory() -> int:
    """Bytes that this process may still take: the machine's MemAvailable, or less where a cgroup limits it."""
    free = [int(line.split()[1]) * 1024 for line in lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = lines(limit), lines(used)
        if most and now and most[0].isdigit():
            free.append(max(0, int(most[0]) - int(now[0])))
    return min(free, default=0)


def shared_memory() -> int:
    """Bytes that are free in /dev/shm; 0 where there is none."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver shows, in its order; empty without a driver."""
    fields = "name,memory.total,memory.used,compute_cap"
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(out)


def parse_gpus(listing: str) -> list[Gpu]:
    """GPUs from nvidia-smi's csv lines `name, MiB, MiB, capability`; lines that say [N/A] are left out."""
    found = []
    for line in listing.splitlines():
        try:
            name, total, used, capability = (part.strip() for part in line.rsplit(",", 3))
            major, _, minor = capability.partition(".")
            found.append(Gpu(name, int(total) * 2**20, int(used) * 2**20, (int(major), int(minor or 0))))
        except ValueError:
            continue
    return found


def lines(path: str) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
