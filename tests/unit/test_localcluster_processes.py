"""Processes of the local cluster's pods: their start, their reported state, and their complete removal."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpilot_localcluster import procs
from kvpilot_localcluster.container import SHIM, Command, Process
from kvpilot_localcluster.node import sweep
from kvpilot_localcluster.probes import Target, act
from kvpilot_localcluster.tasks import cancelled


def test_a_process_id_is_not_mistaken_for_another_with_the_same_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = procs.identify(child.pid)
        assert found is not None
        assert found.alive
        assert not procs.ProcessId(child.pid, found.start - 1).alive
        assert not procs.ProcessId(child.pid, found.start - 1).signal(signal.SIGKILL)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert not found.alive


def test_a_process_whose_first_thread_has_ended_runs_until_the_last_one_has() -> None:
    """Let the other threads exit late, as after a kill on a busy machine. Until then the process holds its port."""
    script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(900,)).start(); "
    child = subprocess.Popen([sys.executable, "-c", f"{script}ctypes.CDLL(None).pthread_exit(None)"])
    try:
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert procs.start_time(child.pid) is not None
    finally:
        child.kill()
    # The test does not reap the process: a zombie does not count as running.
    deadline = time.monotonic() + 60
    while procs.start_time(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert procs.start_time(child.pid) is None
    child.wait()


def shell(script: str) -> Command:
    return Command(["bash", "-c", script], {"PATH": "/usr/bin:/bin"}, "/", {})


async def test_a_run_returns_its_exit_code_and_last_output(tmp_path: Path) -> None:
    process = Process(tmp_path / "uid/c/0", tmp_path / "log", "FallbackToLogsOnError")
    process.start(shell("echo out; echo err >&2; exit 5"))
    run = await process.wait()
    assert (run.exit_code, run.message) == (5, "out\nerr\n")


async def test_a_process_ended_by_a_signal_has_an_exit_code_above_128(tmp_path: Path) -> None:
    process = Process(tmp_path / "uid/c/0", tmp_path / "log")
    process.start(shell("kill -9 $$"))
    run = await process.wait()
    assert (run.exit_code, run.signal) == (137, 9)


async def test_everything_that_a_process_started_ends_with_it(tmp_path: Path) -> None:
    process = Process(tmp_path / "uid/c/0", tmp_path / "log")
    process.start(shell("setsid sleep 600 & echo $!; sleep 600 & echo $!; exec sleep 0.2"))
    await process.wait()
    pids = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert len(pids) == 2
    assert [procs.start_time(pid) for pid in pids] == [None, None]


async def test_a_second_agent_sees_the_process_and_its_end(tmp_path: Path) -> None:
    Process(tmp_path / "uid/c/0", tmp_path / "log").start(shell("sleep 0.5; exit 4"))
    adopted = Process(tmp_path / "uid/c/0", tmp_path / "log")
    assert (await adopted.started()).finished is None
    assert (await adopted.wait()).exit_code == 4


def running(mark: Path) -> list[int]:
    """Return the processes, including shims, that have `mark` in their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(mark).encode() in (folder / "cmdline").read_bytes() and procs.start_time(int(folder.name)):
                found.append(int(folder.name))
    return found


async def until_running(mark: Path, number: int) -> None:
    """Wait for this many processes. A new process may have no arguments for a moment."""
    async with asyncio.timeout(30):
        while len(running(mark)) != number:
            await asyncio.sleep(0.01)


async def test_processes_of_a_killed_agent_are_cleaned_up(tmp_path: Path) -> None:
    process = Process(tmp_path / "pods/uid/c/0", tmp_path / "log")
    process.start(shell(f"exec tail -f /dev/null {tmp_path}/none"))
    await until_running(tmp_path, 2)
    await sweep(tmp_path, grace=1)
    assert running(tmp_path) == []
    assert list((tmp_path / "pods").iterdir()) == []


@pytest.mark.parametrize("start", range(0, 60, 6))
async def test_a_process_that_is_ended_while_it_starts_leaves_nothing(tmp_path: Path, start: int) -> None:
    process = Process(tmp_path / "pods/uid/c/0", tmp_path / "log")
    process.start(shell(f"tail -f /dev/null {tmp_path}/none & exec tail -f /dev/null {tmp_path}/none"))
    await asyncio.sleep(start / 1000)
    await sweep(tmp_path, grace=0)
    assert running(tmp_path) == []


async def test_a_process_that_its_shim_cannot_report_is_ended(tmp_path: Path) -> None:
    # The record cannot be written, as if the pod's folder disappears while the process starts.
    (tmp_path / "uid/c/0/state.part").mkdir(parents=True)
    process = Process(tmp_path / "uid/c/0", tmp_path / "log")
    process.start(shell(f"exec tail -f /dev/null {tmp_path}/none"))
    assert (await process.wait()).reason == "StartError"
    assert running(tmp_path) == []


async def test_a_shim_whose_agent_was_killed_before_it_wrote_its_record_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "uid/c/0"
    folder.mkdir(parents=True)
    spec = {"argv": ["touch", str(tmp_path / "ran")], "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/"}
    (folder / "spec.json").write_text(json.dumps({**spec, "log": str(tmp_path / "log")}))
    shim = await asyncio.create_subprocess_exec(
        sys.executable, str(SHIM), str(folder), stdin=asyncio.subprocess.DEVNULL
    )
    assert await shim.wait() == 0
    assert not (tmp_path / "ran").exists()
    process = Process(folder, tmp_path / "log")
    assert (await process.wait()).reason == "StartError"


@pytest.mark.parametrize("apart", ["", "setsid ", "env -i setsid "])
async def test_a_process_whose_shim_was_killed_is_ended_and_reported(tmp_path: Path, apart: str) -> None:
    process = Process(tmp_path / "uid/c/0", tmp_path / "log")
    wait = f"tail -f /dev/null {tmp_path}/none"
    process.start(shell(f"{apart}{wait} & exec {wait}"))
    await process.started()  # its shim records the start while the process already runs
    await until_running(tmp_path, 3)
    shim = process.shim
    assert shim is not None
    shim.signal(signal.SIGKILL)
    run = await process.wait()
    assert (run.exit_code, run.message) == (137, "somebody killed the shim of this process")
    await until_running(tmp_path, 0)


async def test_the_processes_of_an_exec_probe_end_with_it(tmp_path: Path) -> None:
    command = Command([], {"PATH": "/usr/bin:/bin"}, "/", {})
    handler = {"exec": {"command": ["sh", "-c", f"tail -f /dev/null {tmp_path}/none; true"]}}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await act(handler, Target("127.0.0.1", {}, command))
    await until_running(tmp_path, 0)


async def test_a_task_that_waits_for_a_cancelled_task_can_be_cancelled_itself() -> None:
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)

    async def caller(task: asyncio.Task[None]) -> str:
        await asyncio.sleep(0)
        await cancelled(task)
        return "went on"

    waiting = asyncio.create_task(caller(inner := asyncio.create_task(slow())))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting, inner})
    assert waiting.cancelled()
    assert inner.cancelled()
