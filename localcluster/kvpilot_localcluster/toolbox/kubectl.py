"""kubectl, which includes kustomize."""

from functools import partial
from pathlib import Path

from kvpilot_localcluster.toolbox.fetch import tool
from kvpilot_localcluster.toolbox.kubelayer import unpack


def kubectl() -> Path:
    """Return kubectl on PATH, else 1.32."""
    return tool("kubectl", "1.32", partial(unpack, "kubectl"))
