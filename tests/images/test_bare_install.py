"""`pip install .` without extras, in a new environment: each command works, or names the extra that it needs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"
WORKING = {
    "kvpilot --version": 0,
    "kvpilot plan Qwen3-8B --gpu L4": 0,
    "kvpilot plan --list": 0,
    f"kvpilot probe --baseline {NOBODY} --candidate {NOBODY}": 2,
    "kvpilot-operator --version": 0,
    "kvpilot-serve --version": 0,
    "kvpilot-serve --model=/nowhere": 78,
    "kubectl-kvpilot --version": 0,
}
LACKING = {
    "kvpilot backtest": "cli",
    "kvpilot validate -f service.yaml": "cli",
    "kvpilot calibrate --help": "runtime",
    "kvpilot-operator --namespace=models": "operator",
    "kubectl-kvpilot status": "kubectl",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with only kvpilot and its dependencies. Prefer cached packages."""
    env = tmp_path_factory.mktemp("bare") / "env"
    uv = subprocess.run([ROOT / "scripts/uv.sh"], capture_output=True, text=True, check=True).stdout.strip()
    cache = Path(os.environ.get("KVPILOT_CACHE") or Path.home() / ".cache/kvpilot") / "uv"
    environment = {**os.environ, "UV_CACHE_DIR": str(cache)}
    subprocess.run([uv, "venv", "-q", "-p", "3.11", env], env=environment, check=True)
    locked = ["--constraint", ROOT / "docker/operator.lock", "-p", env / "bin/python"]
    install = [uv, "pip", "install", "-q", *locked, ROOT]
    if subprocess.run([*install, "--offline"], env=environment, capture_output=True, check=False).returncode:
        subprocess.run(install, env=environment, check=True)
    return env / "bin"


def run(bare: Path, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = line.split()
    return subprocess.run(
        [bare / program, *arguments], capture_output=True, text=True, check=False, cwd=folder, timeout=600
    )


@pytest.mark.parametrize("line", WORKING)
def test_a_command_works_without_any_extra(bare: Path, line: str, tmp_path: Path) -> None:
    done = run(bare, line, tmp_path)
    assert done.returncode == WORKING[line], done.stderr
    assert "Traceback" not in done.stderr
    assert "is not installed" not in done.stderr


@pytest.mark.parametrize("line", LACKING)
def test_a_command_that_needs_more_names_the_extra_in_one_line(bare: Path, line: str, tmp_path: Path) -> None:
    done = run(bare, line, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert "not installed" in said
    assert f"pip install 'kvpilot[{LACKING[line]}]'" in said
