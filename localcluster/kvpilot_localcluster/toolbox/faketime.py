"""libfaketime, a library for LD_PRELOAD that gives a program another wall clock."""

import shutil
from pathlib import Path

from kvpilot_localcluster.errors import BuildFailed
from kvpilot_localcluster.toolbox.fetch import cached, debian, link

_VERSION = "0.9.10"
_LIBRARY = "lib/*/faketime/libfaketime.so.1"


def libfaketime() -> Path:
    """Return the library of the installed `faketime`, else fetch it from Debian into the cache."""
    if shutil.which("faketime") and (installed := _library(Path("/usr"))):
        return installed

    def fetch(folder: Path) -> None:
        debian(["faketime", "libfaketime"], folder)
        link(folder / "usr/bin/faketime", folder)

    home = cached("faketime", _VERSION, fetch).parents[1]
    found = _library(home / "usr")
    if found is None:
        raise BuildFailed(f"the package libfaketime was fetched and holds no {_LIBRARY}")
    return found


def _library(root: Path) -> Path | None:
    return next(iter(sorted(root.glob(_LIBRARY))), None)
