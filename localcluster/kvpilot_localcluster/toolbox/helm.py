"""Real helm, to lint, render and install the chart."""

import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kvpilot_localcluster.manifests import objects
from kvpilot_localcluster.toolbox.fetch import tool
from kvpilot_localcluster.toolbox.kubelayer import unpack


class HelmRefused(Exception):
    """Error for a command that helm refused. It has Helm's own message."""


def helm() -> Path:
    """Return Helm 3 on PATH, else 3.17.2."""
    return tool("helm", "3.17.2", partial(unpack, "helm"))


def run_helm(*arguments: str | Path, values: Mapping[str, Any] | None = None, timeout: float = 900) -> str:
    """Run helm with these values and return its output.

    Raises:
        HelmRefused: helm failed.
    """
    command = [helm(), *arguments, *(("--values", "-") if values is not None else ())]
    text = yaml.safe_dump(dict(values)) if values is not None else None
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=timeout)
    if done.returncode:
        raise HelmRefused(f"{done.stderr}{done.stdout}")
    return done.stdout


def render(
    chart: Path, values: Mapping[str, Any], *flags: str, release: str = "kvpilot", namespace: str = "kvpilot-system"
) -> list[dict[str, Any]]:
    """Return the objects that Helm renders from a chart with these values.

    Raises:
        HelmRefused: the values or a template are wrong.
    """
    text = run_helm("template", release, chart, "--namespace", namespace, *flags, values=values)
    return objects(text)
