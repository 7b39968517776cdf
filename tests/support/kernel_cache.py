"""Where kernels that tests compile stay between runs: a folder of Triton's in kvpilot's cache.

Triton keys a program by the source of the kernel and of all it calls, its constants, the GPU, options and its own
version, and never removes one. The folder is named by every source file of the package, so that programs of kernels as
they were are told from those in use.
"""

import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path

import kvpilot_kernels
from kvpilot_localcluster.cache import cache_folder

UNUSED = 14 * 24 * 3600
"""Seconds after which a folder that no run has asked for is removed."""


def source_key(package: Path) -> str:
    """A name for the state of all source files below a folder, whatever the folder's own name."""
    files = sorted(package.rglob("*.py"))
    told = "".join(f"{one.relative_to(package)} {hashlib.sha256(one.read_bytes()).hexdigest()}\n" for one in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def folder(package: Path = Path(kvpilot_kernels.__file__).parent) -> Path:
    """Triton's cache of the package's kernels as they are now; those of other states go once they are not used."""
    cache = cache_folder() / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / source_key(package)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found.mkdir(exist_ok=True)
        os.utime(found)
        for one in cache.iterdir():
            if one.is_dir() and one.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(one)
    return found
