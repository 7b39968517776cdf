"""checkov, which checks Kubernetes manifests against policies.

It has a hundred dependencies, so it gets its own virtual environment.
"""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import environment, tool

_VERSION = "3.3.30"


def checkov() -> Path:
    """Return the path of checkov: from PATH, else the pinned version from the cache."""
    return tool("checkov", _VERSION, partial(environment, [f"checkov=={_VERSION}"]))
