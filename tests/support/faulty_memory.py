"""A process that the kernel's OOM killer ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_limit(pid: int, mebibytes: int) -> Iterator[bool]:
    """Keep a process to so much memory while the block runs; False where this machine lets us limit nothing.

    Control groups of version 1 only, and only for root.
    """
    group = _MEMORY / f"kvpilot-fault-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes * 1024 * 1024))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        # Empty only once its process has ended.
        with contextlib.suppress(OSError):
            group.rmdir()
