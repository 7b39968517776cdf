"""Folder of downloads and builds that a machine needs only once."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of downloads and builds: `KVPILOT_CACHE`, or `~/.cache/kvpilot`."""
    return Path(os.environ.get("KVPILOT_CACHE") or "~/.cache/kvpilot").expanduser()
