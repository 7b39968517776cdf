"""Engines that are forked from a process with vLLM behave as if they were started separately."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from own_environment import Asked, Told, serve

from support.own_process import QUIET, address, ask, begin, run, status

pytestmark = pytest.mark.timeout(1800)
HANGS = 900


def alive(number: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def numbers(file: Path) -> tuple[int, ...]:
    """Return the process IDs of a waiting process and of its child, once both are known."""
    deadline = time.monotonic() + HANGS
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return tuple(map(int, file.read_text().split()))


def gone(*processes: int) -> None:
    deadline = time.monotonic() + HANGS
    while any(map(alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_forked_processes_do_not_affect_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = serve(KVPILOT_RECENT_TOKENS="64")
    monkeypatch.chdir(tmp_path)
    second = serve(KVPILOT_CALIBRATION="off")
    assert (second.asker, second.mess) == (first.asker, False)
    environment = {**os.environ, **QUIET, "KVPILOT_PREFILL_FROM_PAGES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    alone = subprocess.run(
        [sys.executable, "-P", "-m", "own_environment"], input=json.dumps(asdict(Asked())),
        env={**environment, "KVPILOT_CALIBRATION": "off"}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    third = Told(**json.loads(alone.stdout.splitlines()[-1]))
    assert replace(second, number=third.number, asker=third.asker) == third
    assert second.folder == str(tmp_path)
    assert second.spawned[0]["KVPILOT_MESS"] == "1"
    assert first.environment["KVPILOT_RECENT_TOKENS"] == "64"
    assert "KVPILOT_CALIBRATION" not in first.environment


def test_an_error_in_the_process_reaches_its_parent() -> None:
    code, _, err = run("support.no_such_module", Asked())
    assert code == 1
    assert "No module named 'support.no_such_module'" in err
    with pytest.raises(RuntimeError, match=r"No module named 'support\.no_such_module'"):
        ask("support.no_such_module", Asked())


def test_a_process_and_its_children_end_after_a_signal_or_if_the_parent_ends(tmp_path: Path) -> None:
    for i, sent in enumerate((True, False)):
        file, question = tmp_path / f"numbers-{i}", tmp_path / f"question-{i}"
        question.write_text(json.dumps(asdict(Asked(str(file)))))
        with question.open() as stdin:
            told = begin(address(), "own_environment", [], os.environ, [stdin.fileno(), 1, 2])
        waiting = numbers(file)
        assert len(waiting) == 2
        assert all(map(alive, waiting))
        if sent:
            told.sendall(bytes([signal.SIGTERM]))
            assert status(told) == -signal.SIGTERM
        told.close()
        gone(*waiting)


def test_a_process_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    words = "import sys, own_environment, support.own_process as own; own.FORKS = 'bare_forks'"
    command = [sys.executable, "-P", "-c", f"{words}; own_environment.serve(sys.argv[1])", str(file)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as asker:
        waiting = numbers(file)
        server = int(Path(f"/proc/{waiting[0]}/stat").read_text().rpartition(")")[2].split()[1])
        asker.kill()
    gone(*waiting, server)
