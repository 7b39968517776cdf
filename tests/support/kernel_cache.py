"""Where kernels that tests compile stay between runs: a folder of Triton's in kvpilot's cache.

Triton keys a program by the source of the kernel and of all it calls, its constants, the GPU, options and its own
version, and never removes one. The folder is named by every source file of kernels and formats, so that programs of
kernels as they were are told from those in use.
"""

import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path

import kvpilot_formats
import kvpilot_kernels
from kvpilot_localcluster.cache import cache_folder

PACKAGES = (Path(kvpilot_kernels.__file__).parent, Path(kvpilot_formats.__file__).parent)
UNUSED = 14 * 24 * 3600
"""Seconds after which a folder that no run has asked for is removed."""


def source_key(*packages: Path) -> str:
    """Name the state of all source files below some folders, whatever the folders' own names."""
    files = [(package, one) for package in packages for one in sorted(package.rglob("*.py"))]
    told = "".join(f"{one.relative_to(top)} {hashlib.sha256(one.read_bytes()).hexdigest()}\n" for top, one in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def folder(*packages: Path) -> Path:
    """Return Triton's cache of our kernels as they are now; those of other states go once they are not used."""
    cache = cache_folder() / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / source_key(*(packages or PACKAGES))
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found.mkdir(exist_ok=True)
        os.utime(found)
        for one in cache.iterdir():
            if one.is_dir() and one.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(one)
    return found
