"""What can happen to the disk below host memory while an engine serves: each function does it to a `DiskTier`.

The file has no name, so it is reached by its descriptor, in the engine's own process.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any


def truncated(tier: Any) -> None:
    """The file is as long as before, of which half is left."""
    opened = _file(tier)
    os.ftruncate(opened, os.fstat(opened).st_size // 2)


def garbled(tier: Any) -> None:
    """Every fourth page of the disk has other bytes."""
    opened = _file(tier)
    other = os.open(f"/proc/self/fd/{opened}", os.O_WRONLY)  # whose writes need not begin at a page of memory
    for at in range(0, os.fstat(opened).st_size, 4 * 4096):
        os.pwrite(other, random.Random(at).randbytes(512), at)
    os.close(other)


def full(tier: Any) -> None:
    """No more can be written: the kernel says ENOSPC to each write, and what was there is gone."""
    _replace(tier, "/dev/full", os.O_RDWR)


def read_only(tier: Any) -> None:
    """Nothing can be written; what is there can be read."""
    _replace(tier, f"/proc/self/fd/{_file(tier)}", os.O_RDONLY)


def dead(tier: Any) -> None:
    """Nothing can be read or written any more."""
    _replace(tier, "/", os.O_RDONLY | os.O_DIRECTORY)


def removed(tier: Any) -> None:
    """The folder is gone."""
    where = Path(f"/proc/self/fd/{_file(tier)}").readlink().parent
    assert list(where.iterdir()) == []
    shutil.rmtree(where)


def silent(tier: Any) -> None:
    """The disk takes what it is asked, and never answers, as a network's does that has lost its server."""
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
