"""Faults of the disk tier while an engine serves. Each function applies one fault to a `DiskTier`.

The tier's file has no name, so the functions use its file descriptor in the engine's own process.
"""

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any


def truncated(tier: Any) -> None:
    """Truncate the tier's file to half its length."""
    opened = _file(tier)
    os.ftruncate(opened, os.fstat(opened).st_size // 2)


def garbled(tier: Any) -> None:
    """Overwrite every fourth memory page of the tier's file."""
    opened = _file(tier)
    other = os.open(f"/proc/self/fd/{opened}", os.O_WRONLY)  # without O_DIRECT, writes need no alignment
    for at in range(0, os.fstat(opened).st_size, 4 * 4096):
        os.pwrite(other, random.Random(at).randbytes(512), at)
    os.close(other)


def full(tier: Any) -> None:
    """Fill the disk: the kernel answers each write with ENOSPC, and old content is lost."""
    _replace(tier, "/dev/full", os.O_RDWR)


def read_only(tier: Any) -> None:
    """Let every write fail with an error. Reads still work."""
    _replace(tier, f"/proc/self/fd/{_file(tier)}", os.O_RDONLY)


def dead(tier: Any) -> None:
    """Let every read and every write fail with an error."""
    _replace(tier, "/", os.O_RDONLY | os.O_DIRECTORY)


def removed(tier: Any) -> None:
    """Remove the folder in which the file was created."""
    where = Path(f"/proc/self/fd/{_file(tier)}").readlink().parent
    assert list(where.iterdir()) == []
    shutil.rmtree(where)


def silent(tier: Any) -> None:
    """Accept reads and writes but never finish them, like a network disk whose server is gone."""
    never = threading.Event()
    file = tier._transfers._file
    file.read = file.write = lambda *_: never.wait()
    tier._transfers._patience = 1.0


def _file(tier: Any) -> int:
    opened: int = tier._transfers._file.fd
    return opened


def _replace(tier: Any, path: str, flags: int) -> None:
    other = os.open(path, flags)
    os.dup2(other, _file(tier))
    os.close(other)
