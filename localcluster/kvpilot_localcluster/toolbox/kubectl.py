"""kubectl, which includes kustomize."""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import tool
from kvpilot_localcluster.toolbox.kubelayer import unpack


def kubectl() -> Path:
    """Return the path of kubectl: from PATH, else version 1.32 from the cache."""
    return tool("kubectl", "1.32", partial(unpack, "kubectl"))
