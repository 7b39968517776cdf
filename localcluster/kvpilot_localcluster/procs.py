"""Child processes with a unique identity: the pid together with the start time.

The kernel may give the pid of an ended process to another one. Together with the start time (clock ticks since boot,
field 22 of /proc/PID/stat) the pid is unique. So a record is safe to use even if its writer was killed by kill -9.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "LOCALCLUSTER_RUN"
"""Environment variable that holds the run's folder, in every process of a container, probes and hooks included."""


@dataclass(frozen=True)
class ProcessId:
    """Identity of one process: its pid and its start time in clock ticks since boot."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Return True if exactly this process, or a thread of it, still runs. A zombie counts as ended."""
        return start_time(self.pid) == self.start

    def signal(self, number: int, *, group: bool = False) -> bool:
        """Send a signal to the process, or to the process group that it leads. Return False if it has ended."""
        if not self.alive:
            return False
        try:
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, or None if it is missing or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    # The main thread becomes a zombie when it ends. The process keeps its sockets until its last thread ends.
    over = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return None if over else int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None."""
    start = start_time(pid)
    return None if start is None else ProcessId(pid, start)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new text, even after a crash."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def read_record(path: Path) -> ProcessId | None:
    """Return the process that a record file names if it still runs, else None."""
    try:
        record = json.loads(path.read_text())
        found = ProcessId(int(record["pid"]), int(record["start"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return found if found.alive else None


def kill_all_of(*places: Path) -> set[int]:
    """Kill our processes that belong to one of these folders or log files. Wait for their end, and return their pids.

    This finds processes by the variable `MARK`, even without a record or a living parent. A process that sets its title
    overwrites its environment, so this also finds processes by the files to which they write.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + 10
    # Repeat until none is found: processes may have started others meanwhile, and killed ones take a moment to end.
    while (found := _all_of([os.fsencode(place) for place in places])) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.005)
    return killed


def _all_of(places: Sequence[bytes]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if any(told == place or told.startswith(place + b"/") for told in _told(entry) for place in places):
            found.append(int(entry.name))
    return found


def _told(entry: Path) -> Iterator[bytes]:
    """Yield the paths in a process's environment and open files that show to which container or record it belongs."""
    mark = MARK.encode() + b"="
    # Other users' processes cannot be read, and any process may end meanwhile.
    with contextlib.suppress(OSError):
        for variable in (entry / "environ").read_bytes().split(b"\0"):
            if variable.startswith(mark):
                yield variable.removeprefix(mark)
    for number in ("1", "2"):
        with contextlib.suppress(OSError):
            yield os.fsencode((entry / "fd" / number).readlink())


def spawn(
    record: Path,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own.

    Args:
        record: file for the process's identity.
        command: the program and its arguments.
        log: file to which the process's output is appended.
        env: all environment variables; None for those of this process.
        cwd: working folder; None for that of this process.
        stdin: file descriptor of the process's standard input.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if env is None else dict(env),
            cwd=cwd,
        )
    identity = identify(child.pid)
    if identity is not None:
        write_atomically(record, json.dumps({"pid": identity.pid, "start": identity.start, "command": command[0]}))
    return child


def end(record: Path, *, grace: float = 10.0) -> bool:
    """End the process group of a record: SIGTERM, then SIGKILL after `grace` seconds. Return True if it ran."""
    found = read_record(record)
    if found is not None:
        found.signal(signal.SIGTERM, group=True)
        deadline = time.monotonic() + grace
        while found.alive and time.monotonic() < deadline:
            # A child of ours stays a zombie until we reap it. Parents of other processes reap theirs.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.pid, os.WNOHANG)
            time.sleep(0.02)
        found.signal(signal.SIGKILL, group=True)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.pid, 0)
    record.unlink(missing_ok=True)
    return found is not None


def tail(path: Path, limit: int = 2000) -> str:
    """Return at most the last `limit` bytes of a file as text, or the empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
