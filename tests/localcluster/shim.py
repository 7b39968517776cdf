"""Stands between the node agent and one container process, so that the process survives the agent and its end is told.

Run as a script with a folder as its only argument, which holds spec.json: argv, env, cwd, log. It writes state.json
(pid and start time of the process) once it runs, and exit.json (exit code, times) when it has ended; both by rename. It
is the reaper of everything that the process starts: when the process ends, its descendants end too, as in a container.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def _write(path: Path, record: dict[str, Any]) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(record))
    scratch.replace(path)


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def _become(spec: dict[str, Any], complaint: int) -> None:
    """In the child: turn into the container's process, or tell why not through the pipe."""
    try:
        os.setsid()
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(spec["cwd"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        os.write(complaint, f"{spec['argv'][0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _end_descendants(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    # Those that had left the group have become our children, for we are their reaper.
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def main(folder: Path) -> None:
    """Run the process of spec.json to its end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spec = json.loads((folder / "spec.json").read_text())
    listen, complain = os.pipe()
    started = time.time()
    pid = os.fork()
    if pid == 0:
        _become(spec, complain)
    os.close(complain)
    _write(folder / "state.json", {"pid": pid, "start": _start_ticks(pid), "startedAt": started})
    complaint = os.read(listen, 4096).decode(errors="replace")
    status = 0
    while True:
        ended, status = os.wait()
        if ended == pid:
            break
    _end_descendants(pid)
    code = os.waitstatus_to_exitcode(status)
    record: dict[str, Any] = {"startedAt": started, "finishedAt": time.time(), "signal": 0, "exitCode": code}
    if code < 0:
        record |= {"signal": -code, "exitCode": 128 - code}
    if complaint:
        record |= {"exitCode": 128, "startError": complaint}
    _write(folder / "exit.json", record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
