"""Find out what this machine has: the platform of the installed vLLM, its GPUs, and the memory an engine may use."""

import importlib.metadata
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Gpu:
    """GPU: name, total and used memory in bytes, and compute capability such as (9, 0). Unknown values are None."""

    name: str
    total: int | None
    used: int | None
    capability: tuple[int, int] | None


def platform() -> Platform:
    """Return `cpu` if the installed vLLM is built for CPUs (`cpu` is in its version), otherwise `cuda`."""
    try:
        return "cpu" if "cpu" in importlib.metadata.version("vllm") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cuda"


def available_memory() -> int | None:
    """Return how many bytes this process may still use: the smaller of MemAvailable and the rest of its cgroup limit.

    Return None if neither is known.
    """
    free = [int(line.split()[1]) * 1024 for line in lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _figure("".join(lines(limit)[:1])), _figure("".join(lines(used)[:1]))
        if most is not None:
            free.append(max(0, most - (now or 0)))
    return min(free, default=None)


def shared_memory() -> int | None:
    """Return the free bytes in /dev/shm; 0 if it does not exist, None if it cannot be read."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, in its order; none if it is missing or fails."""
    fields = "name,memory.total,memory.used,compute_cap"
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=False,
        ).stdout  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return parse_gpus(out)


def may_have_gpus() -> bool:
    """Return True if an NVIDIA driver is installed, even if nvidia-smi cannot list its GPUs.

    A container without the driver's `utility` capability has GPUs but no nvidia-smi.
    """
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg"))


def parse_gpus(listing: str) -> list[Gpu]:
    """Parse csv lines of nvidia-smi: name, total memory in MiB, used memory in MiB, compute capability.

    A value that is not a number, such as [N/A] or [Insufficient Permissions], counts as unknown.
    """
    found = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 3)]
        if len(parts) == 4:  # other lines are messages of nvidia-smi
            name, total, used, capability = parts
            found.append(_gpu(name, _figure(total), _figure(used), capability))
    return found


def _gpu(name: str, total: int | None, used: int | None, capability: str) -> Gpu:
    major, minor = (_figure(part) for part in (capability.partition(".")[0], capability.partition(".")[2] or "0"))
    total = total or None  # 0 means unknown
    if used is not None and total is not None and used > total:
        used = None
    return Gpu(
        name if name and not name.startswith("[") else "GPU of unknown name",
        None if total is None else total * 2**20,
        None if used is None else used * 2**20,
        None if major is None or minor is None else (major, minor),
    )


def _figure(text: str) -> int | None:
    """Parse a decimal number; return None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def lines(path: str) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
