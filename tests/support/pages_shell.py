"""Shell blocks of documentation pages, run in bash against the local cluster, as a reader pastes them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kvpilot_localcluster.toolbox.helm import helm
from kvpilot_localcluster.toolbox.kubectl import kubectl

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The API server reports CRDs in the form of Kubernetes 1.20, without CEL rules, so clients must not validate against
# them.
_PROGRAM = """#!/bin/sh
for word in "$@"; do
  case $word in apply | install | upgrade) exec {program} "$@" {unchecked} ;; esac
done
exec {program} "$@"
"""


def section(page: str, title: str) -> str:
    """Return the text below a heading of a page of docs/."""
    text = (DOCS / page).read_text()
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def blocks(text: str, language: str = "sh") -> list[str]:
    """Return the code blocks of a text in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Shell:
    """Bash of a user with kubectl, Helm and `kubectl kvpilot`, in a folder of its own.

    Commands use `chart` in place of charts/kvpilot.
    """

    def __init__(self, folder: Path, kubeconfig: Path, chart: Path, **variables: str) -> None:
        self.folder, self._chart = folder, chart
        programs = folder / "programs"
        programs.mkdir()
        unchecked = {"helm": (helm(), "--disable-openapi-validation"), "kubectl": (kubectl(), "--validate=false")}
        for name, (program, option) in unchecked.items():
            (programs / name).write_text(_PROGRAM.format(program=program, unchecked=option))
            (programs / name).chmod(0o755)
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        self._env = {"PATH": path, "KUBECONFIG": str(kubeconfig), "HOME": str(folder), "NO_COLOR": "1", **variables}

    def __call__(self, script: str, **variables: str) -> str:
        """Run a code block in bash, and return its stdout. Raise an error if it fails."""
        done = subprocess.run(
            ["bash", "-euc", script.replace("charts/kvpilot", str(self._chart))],
            cwd=self.folder, env={**self._env, **variables}, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def remove_kvpilot(self) -> None:
        """Remove the operator and the CRD that other tests have installed."""
        self(f"kubectl delete -k {ROOT}/config/base --ignore-not-found")
