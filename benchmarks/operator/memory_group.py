"""Limit the memory of a process, by a control group of version 1 or 2 if possible, otherwise by RLIMIT_DATA.

RLIMIT_DATA limits a process's allocations. RLIMIT_AS would also count libraries, and memory that threads reserve but do
not use.
"""

import contextlib
import os
import resource
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Memory limit for one process and its children. A new process calls `joins` before it executes its program."""

    def __init__(self, mebibytes: int) -> None:
        self._bytes = mebibytes * 1024 * 1024
        self._folder = self._made()
        self.how = "RLIMIT_DATA" if self._folder is None else f"cgroup v{1 if self._v1 else 2}"

    @property
    def _v1(self) -> bool:
        return self._folder is not None and (self._folder / "memory.limit_in_bytes").exists()

    def joins(self) -> None:
        """Put the calling process and its later children under the memory limit."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self._bytes, self._bytes))

    def most_mib(self) -> float | None:
        """Return the peak memory in MiB, or None if it was not measured."""
        return self._read("memory.max_usage_in_bytes", "memory.peak")

    def kills(self) -> int:
        """Return how many processes of the group the kernel has killed."""
        if self._folder is None:
            return 0
        words = (self._folder / ("memory.oom_control" if self._v1 else "memory.events")).read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def close(self) -> None:
        """Remove the control group after its processes have ended."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def _read(self, *names: str) -> float | None:
        for name in names:
            file = (self._folder or _ROOT / "none") / name
            if file.exists():
                return round(int(file.read_text()) / 2**20, 1)
        return None

    def _made(self) -> Path | None:
        for parent, limit in ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")):
            folder = parent / f"kvpilot-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                if not (folder / limit).exists():
                    raise FileNotFoundError(f"{folder} is not a control group for memory")
                (folder / limit).write_text(str(self._bytes))
            except OSError:
                folder.rmdir()
                continue
            return folder
        return None
