"""Lock files as pip reads them."""

import re
from pathlib import Path


def pinned(lock: Path) -> dict[str, str]:
    """Return the version of every package that a lock file pins, by name."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE))


def hashes(lock: Path) -> dict[str, int]:
    """Return the number of files that the lock permits for each package; 0 means any file."""
    packages = re.split(r"^(?=\w)", lock.read_text(), flags=re.MULTILINE)[1:]
    return {text.partition("==")[0]: len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) for text in packages}
