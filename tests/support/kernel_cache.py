"""Cache of compiled kernels between test runs: a Triton folder in kvpilot's cache.

Triton keys a program by the source of the kernel and of all it calls, its constants, the GPU, options and its own
version, and never removes one. The folder is named by a hash of every source file of kernels and formats, so that
programs of older kernels can be removed.
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
"""Seconds after which an unused folder is removed."""


def source_key(*packages: Path) -> str:
    """Return a hash of all source files below some folders, independent of the folders' own names."""
    files = [(package, one) for package in packages for one in sorted(package.rglob("*.py"))]
    told = "".join(f"{one.relative_to(top)} {hashlib.sha256(one.read_bytes()).hexdigest()}\n" for top, one in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def folder(*packages: Path) -> Path:
    """Return Triton's cache for the package's current kernels, and remove those of unused states."""
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
