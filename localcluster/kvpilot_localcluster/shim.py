"""Shim between the node agent and one container's process. The process survives the agent, and the shim records its
end.

The script's only argument is a folder with spec.json (argv, env, cwd, log). The shim waits for a byte on standard
input, which the agent sends after it has recorded the shim. So an unrecorded shim starts nothing. The shim writes
state.json (pid and start time) when the process runs, and exit.json (exit code, times) as its last action. It writes
each file under another name and then renames it.

The shim passes SIGTERM on to the process, and kills the process at SIGUSR1. It is the subreaper of all descendants of
the process, in any session or group. As in a container, it ends only after all of them. Signals that arrive before the
process runs are not lost. If somebody kills the shim, the kernel kills the process.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL = signal.SIGUSR1
_HEARD = {signal.SIGCHLD, signal.SIGTERM, _KILL}
_libc = ctypes.CDLL(None)


def _write(path: Path, record: dict[str, Any]) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(record))
    scratch.replace(path)


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def _become(spec: dict[str, Any], complaint: int, shim: int) -> None:
    """Replace the forked child with the container's program. If that fails, send the reason through the pipe."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != shim:
            return
        os.setsid()
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(spec["cwd"])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        os.write(complaint, f"{spec['argv'][0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _end_descendants() -> None:
    # Kill orphaned descendants, too. As the subreaper, we are their parent.
    while True:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _reap(pid: int) -> int | None:
    """Reap all ended children. If the process is among them, return its wait status."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, pid):
            return status if ended else None


def _accompany(pid: int) -> int:
    """Pass signals on until the process has ended, and return its wait status."""
    while True:
        number = signal.sigwait(_HEARD)
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGTERM)
        elif number == _KILL:
            os.kill(pid, signal.SIGKILL)
        if (status := _reap(pid)) is not None:
            return status


def _run(folder: Path) -> dict[str, Any]:
    spec = json.loads((folder / "spec.json").read_text())
    listen, complain = os.pipe()
    started, shim = time.time(), os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(spec, complain, shim)
    os.close(complain)
    _write(folder / "state.json", {"pid": pid, "start": _start_ticks(pid), "startedAt": started})
    complaint = os.read(listen, 4096).decode(errors="replace")
    code = os.waitstatus_to_exitcode(_accompany(pid))
    record: dict[str, Any] = {"startedAt": started, "finishedAt": time.time(), "signal": 0, "exitCode": code}
    if code < 0:
        record |= {"signal": -code, "exitCode": 128 - code}
    if complaint:
        record |= {"exitCode": 128, "startError": complaint}
    return record


def main(folder: Path) -> None:
    """Run the process of spec.json until it has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not os.read(0, 1):
        return
    try:
        record = _run(folder)
    finally:
        _end_descendants()
    _write(folder / "exit.json", record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
