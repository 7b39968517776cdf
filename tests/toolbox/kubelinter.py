"""kube-linter: it is in no package registry that this project uses, so only a user's own is run."""

from __future__ import annotations

import shutil
from pathlib import Path


def kube_linter() -> Path | None:
    """PATH's own kube-linter, or None."""
    found = shutil.which("kube-linter")
    return Path(found) if found else None
