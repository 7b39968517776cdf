"""operator-courier, a Python package with some bundle checks of the Operator Framework.

Its successors check more, but no package index has them.
"""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import environment, tool

_VERSION = "2.1.11"


def courier() -> Path:
    """Return the path of operator-courier: from PATH, else the pinned version from the cache."""
    # Courier needs `semver.parse`, which semver 4 removed, and `pkg_resources`, which newer setuptools removed.
    packages = [f"operator-courier=={_VERSION}", "semver<4", "setuptools<81"]
    return tool("operator-courier", _VERSION, partial(environment, packages))
