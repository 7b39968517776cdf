"""File systems of a given size, for tests that fill a disk."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_volume(where: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` (as in mount's options) in a folder. Skip the test if mounts are not allowed."""
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True, check=False
    )
    if mounting.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)
