"""`make demo` and `make install` name a failure's cause and remedy in one line, and leave no process behind."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpilot_demo import checks, prepare
from kvpilot_demo.prepare import Lane, Stage
from kvpilot_demo.service import DemoError
from kvpilot_demo.user_cluster import plan
from kvpilot_localcluster import causes

ROOT = Path(__file__).parents[2]
DEAD = "http://name:secret@127.0.0.1:9"
"""Proxy that does not answer, because nothing listens on the discard port."""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder for PATH with the few programs that scripts need, and no others."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("bash", "env", "dirname", "cat", "sha256sum", "mkdir", "flock", "cmp", "cp", "nice"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    # A version manager's wrapper would look for other programs on PATH.
    (folder / "python3.11").symlink_to(Path(sys.base_prefix) / "bin" / "python3.11")
    return folder


def demo(tools: Path, cache: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make demo` with these programs on PATH, an empty cache and additional variables."""
    make = shutil.which("make")
    assert make is not None
    env = {"PATH": str(tools), "HOME": str(cache), "KVPILOT_CACHE": str(cache), **variables}
    return subprocess.run(
        [make, "--no-print-directory", "demo", "PLAIN=1", *options],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_an_error_names_missing_tools_and_their_packages(tools: Path, tmp_path: Path) -> None:
    done = demo(tools, tmp_path / "cache")
    assert done.returncode != 0
    assert "demo: not on PATH: " in done.stderr
    assert "dpkg-source (package dpkg-dev)" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_an_error_names_a_python_that_is_too_old(tools: Path, tmp_path: Path) -> None:
    (tools / "python3.11").unlink()
    (tools / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
    (tools / "python3").chmod(0o755)
    done = demo(tools, tmp_path / "cache")
    assert done.returncode != 0
    assert "Python 3.11 is needed" in done.stderr
    assert "found Python 3.9.2: install python3.11" in done.stderr


def test_a_proxy_that_does_not_answer_is_named_without_its_password(tools: Path, tmp_path: Path) -> None:
    done = demo(tools, tmp_path / "cache", HTTPS_PROXY=DEAD)
    assert "HTTPS_PROXY=http://***@127.0.0.1:9 does not answer" in done.stderr
    assert "correct it, or unset it" in done.stderr
    assert "secret" not in done.stderr + done.stdout


def test_a_port_that_another_program_holds_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))  # noqa: S104 - as a program that takes the port from every pod
        holder.listen()
        port = holder.getsockname()[1]
        assert f"port {port} is taken" in checks.taken("127.0.255.254", port)
    assert checks.taken("127.0.255.254", port) == ""


def test_a_disk_with_too_little_room_is_named_before_anything_is_written(tmp_path: Path) -> None:
    said = causes.no_room(tmp_path / "cache", 10_000_000)
    assert "GB free, and 10000000 GB are needed" in said
    assert "KVPILOT_CACHE" in said
    assert causes.no_room(tmp_path / "cache", 0) == ""


def test_an_error_names_a_disk_that_fills_up() -> None:
    done = subprocess.run(
        ["dd", "if=/dev/zero", "of=/dev/full", "count=1"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "the disk is full: free some GB" in causes.cause(done.stderr, {})


@pytest.mark.parametrize(("variables", "cause"), [
    ({}, "nothing could be fetched: check the network"),
    ({"HTTPS_PROXY": DEAD}, "nothing could be fetched through HTTPS_PROXY=http://***@127.0.0.1:9: correct it"),
])  # fmt: skip
def test_an_installation_without_a_network_is_explained(tmp_path: Path, variables: dict[str, str], cause: str) -> None:
    clone = tmp_path / "clone"
    for name in ("scripts", "localcluster"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, clone / name)
    offline = {
        "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1",
        "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "KVPILOT_CACHE": str(tmp_path / "cache"), **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["make", "--no-print-directory", "install"],
        cwd=clone, env={**os.environ, **offline}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("install: ")]
    assert cause in line
    assert f"log: {tmp_path / 'cache' / 'install.log'}" in line
    assert "secret" not in line


def test_the_last_line_of_a_log_is_the_cause_of_an_unknown_failure() -> None:
    assert causes.cause("compiling\nkube.go:7: undefined: x\n\n", {}) == "kube.go:7: undefined: x"


def test_no_process_runs_after_a_stage_of_the_demo_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPILOT_CACHE", str(tmp_path))
    pids = tmp_path / "pids"
    forever = ["bash", "-c", f"sleep 600 & echo $! >>{pids}; echo $$ >>{pids}; wait"]
    fails = ["bash", "-c", f"until [ -s {pids} ]; do sleep 0.05; done; echo ' 40% half'; echo broken; exit 3"]
    failed = prepare.run([Lane("long", [Stage("compile", forever, 10)]), Lane("short", [Stage("fetch", fails, 1)])],
                         plain=True)  # fmt: skip
    assert failed is not None
    assert (failed.at.title, failed.at.note) == ("fetch", "half")
    assert causes.cause(failed.log.read_text(), {}) == "broken"
    ended = time.monotonic() + 60
    for pid in map(int, pids.read_text().split()):
        while _runs(pid) and time.monotonic() < ended:
            time.sleep(0.05)
        assert not _runs(pid)


def test_stages_of_the_demo_run_in_order_and_their_output_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPILOT_CACHE", str(tmp_path))
    stages = [Stage("first", ["echo", "> Paris."], 1), Stage("second", ["echo", "raw log line"], 1)]
    assert prepare.run([Lane("only", stages)], plain=True) is None
    told = capsys.readouterr().out
    assert "Paris." in told
    assert "raw log line" not in told
    assert [stage.fraction for stage in stages] == [1.0, 1.0]


def test_a_cluster_without_kubectl_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DemoError, match="kubectl is not on PATH: install it"):
        plan("registry.example.com/kvpilot/runtime:0.1.0", "hf://a/b")


def test_a_cluster_run_without_an_image_is_explained() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpilot_demo", "--cluster", "--plain"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "IMAGE is missing" in done.stderr


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
