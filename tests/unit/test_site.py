"""The site's script names what is missing before it installs anything. Its lock file has the versions of install.sh."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check"], "site: no browser at /nowhere/chromium: install chromium"),
        (["show"], "site: no action 'show': use build, serve, check or publish"),
        ([], "site: no action ''"),
        (["publish"], "site: publish needs a version"),
    ],
)
def test_a_wrong_call_of_site_sh_ends_with_the_remedy_and_installs_nothing(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "CHROMIUM": "/nowhere/chromium", "KVPILOT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "scripts/site.sh", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_has_the_versions_that_the_installer_requires() -> None:
    (asked,) = re.findall(r"(?m)^site=\((.+)\)$", (ROOT / "scripts/install.sh").read_text(encoding="utf-8"))
    locked = (ROOT / "scripts/site.lock").read_text(encoding="utf-8")
    for package in asked.split():
        assert f"{package} \\\n    --hash=sha256:" in locked
