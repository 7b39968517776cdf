"""Image table: the local programs that replace container images."""

import fnmatch
import os
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.expand import expand

DEFAULT_TABLE = Path(__file__).with_name("images.yaml")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """Local program that replaces an image. images.yaml explains each field."""

    match: tuple[str, ...]
    entrypoint: tuple[str, ...]
    path: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()

    def environment(self, pod: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that the image sets. `pod` has POD_IP, POD_NAME and POD_NAMESPACE."""
        found = {name: expand(value, pod) for name, value in self.env.items()}
        ours = {
            name: value
            for name, value in os.environ.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.inherit)
        }
        path = ":".join([*self.path, ours.pop("PATH", _SYSTEM_PATH)])
        return {**ours, "PATH": path, "LANG": "C.UTF-8", **found}


def load(path: Path = DEFAULT_TABLE) -> list[Image]:
    """Read an image table.

    Raises:
        LocalClusterError: the file is not an image table; the message names the file and the entry.
    """
    folders = {
        "CACHE": str(cache_folder()),
        "VENV": sys.prefix,
        "HOME": str(Path.home()),
    }

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return string.Template(value).safe_substitute(folders)
        if isinstance(value, list):
            return tuple(fill(one) for one in value)
        if isinstance(value, dict):
            return {key: fill(one) for key, one in value.items()}
        return value

    try:
        return [Image(**fill(entry)) for entry in yaml.safe_load(path.read_text())["images"]]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise LocalClusterError(f"image table {path}: {error!r}; see {DEFAULT_TABLE} for its form") from None


def find(table: Sequence[Image], name: str) -> Image | None:
    """Return the first image of the table whose pattern matches, or None."""
    for image in table:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in image.match):
            return image
    return None
