"""Real prometheus and promtool, to test rules and expressions, and to scrape."""

import shutil
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import cached, debian, link

_VERSION = "2.42"


def promtool() -> Path:
    """Return the path of promtool: from PATH, else Debian's 2.42 from the cache."""
    return _program("promtool")


def prometheus() -> Path:
    """Return the path of prometheus: from PATH, else Debian's 2.42 from the cache."""
    return _program("prometheus")


def _program(name: str) -> Path:
    found = shutil.which(name)
    return Path(found) if found else cached("prometheus", _VERSION, _fetch).with_name(name)


def _fetch(folder: Path) -> None:
    debian(["prometheus"], folder)
    for name in ("prometheus", "promtool"):
        link(folder / "usr/bin" / name, folder)
