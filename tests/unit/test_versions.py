"""Every kvpilot command prints the installed version of kvpilot."""

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

SCRIPTS = sorted(one.name for one in entry_points(group="console_scripts") if one.value.startswith("kvpilot_"))
PROGRAMS = {
    **{name: [str(Path(sys.executable).with_name(name))] for name in SCRIPTS},
    "kvpilot_demo": [sys.executable, "-m", "kvpilot_demo"],
}


def test_the_project_installs_exactly_these_four_commands() -> None:
    assert SCRIPTS == ["kubectl-kvpilot", "kvpilot", "kvpilot-operator", "kvpilot-serve"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_command_prints_its_version_and_does_nothing_else(name: str) -> None:
    done = subprocess.run([*PROGRAMS[name], "--version"], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{name.replace('kubectl-', 'kubectl ')} {version('kvpilot')}\n"
