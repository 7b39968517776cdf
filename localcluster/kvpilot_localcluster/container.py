"""Start, adopt, await and end one run of a container's process. All of its state is in the run's folder.

The folder holds the files of shim.py. If an agent is killed, the next agent finds one of three states there:

- An exit record: the run has ended.
- A running shim: the agent watches the shim again.
- Neither: the process was never started, or somebody killed its shim.

When a shim that was told to end the process is gone, the process and all its children have ended. Only then may the
folder be removed.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpilot_localcluster import procs
from kvpilot_localcluster.podstatus import Run

SHIM = Path(__file__).with_name("shim.py")
_LOG_BYTES, _LOG_LINES, _FILE_BYTES = 2048, 80, 4096


@dataclass(frozen=True)
class Command:
    """Command of a container: arguments, variables and working folder. Paths are those of this machine."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    folders: Mapping[str, str]
    """Map from container paths to paths of this machine, to rewrite later commands (probes and hooks)."""


class Process:
    """One run of one container, identified by its folder.

    Attributes:
        folder: folder with the run's records.
        log: file with the output of the process.
        killed: reason why the agent ended the process, for the pod's status; empty if it ended by itself.

    Args:
        policy: the container's terminationMessagePolicy.
    """

    def __init__(self, folder: Path, log: Path, policy: str = "File") -> None:
        self.folder = folder
        self.log = log
        self.killed = ""
        self._policy = policy
        self._shim: subprocess.Popen[bytes] | None = None

    @property
    def message_file(self) -> Path:
        """Return the file for the container's termination message."""
        return self.folder / "termination-log"

    def start(self, command: Command) -> None:
        """Start the shim, which then starts the process. From now on `end` works, even before the process runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.message_file.touch()
        spec = {**asdict(command), "env": {**command.env, procs.MARK: str(self.folder)}, "log": str(self.log)}
        file = self.folder / "spec.json"
        # Only the owner may read the file, because variables may hold secrets.
        file.touch(mode=0o600)
        file.write_text(json.dumps(spec))
        own = [sys.executable, "-I", "-S", str(SHIM), str(self.folder)]
        listen, tell = os.pipe()
        try:
            self._shim = procs.spawn(self.folder / "shim.json", own, log=self.folder / "shim.log", env={}, stdin=listen)
            # The shim is recorded now. This byte lets it start the process.
            os.write(tell, b"1")
        finally:
            os.close(listen)
            os.close(tell)

    def _record(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None
        return found

    @property
    def command(self) -> Command:
        """Return the command that this run was started with."""
        spec = self._record("spec.json") or {"argv": [], "env": {}, "cwd": "/", "folders": {}}
        return Command(spec["argv"], spec["env"], spec["cwd"], spec["folders"])

    @property
    def shim(self) -> procs.ProcessId | None:
        """Return the shim if it runs, else None.

        While the shim runs, the process will start, is running, or has children that run.
        """
        if self._shim is not None:
            self._shim.poll()
        return procs.read_record(self.folder / "shim.json")

    def run(self) -> Run | None:
        """Return the record of this run, or None if the process has not started yet."""
        name = f"local://{self.folder.parents[1].name}/{self.folder.parent.name}/{self.folder.name}"
        state, end = self._record("state.json"), self._record("exit.json")
        if end is not None:
            reason = "StartError" if "startError" in end else ""
            message = end.get("startError") or self._last_words(end["exitCode"])
            times = (end["startedAt"], end["finishedAt"])
            return Run(name, *times, end["exitCode"], end["signal"], message, reason)
        if state is None:
            return None
        return Run(name, state["startedAt"])

    def _last_words(self, exit_code: int) -> str:
        words = procs.tail(self.message_file, _FILE_BYTES)
        if not words and exit_code and self._policy == "FallbackToLogsOnError":
            lines = procs.tail(self.log, _LOG_BYTES).splitlines(keepends=True)
            words = "".join(lines[-_LOG_LINES:])
        return words

    async def started(self) -> Run:
        """Wait until the process has started or failed to start, and return its record."""
        while (found := self.run()) is None:
            if self.shim is None and self.run() is None:
                return self._lost()
            await asyncio.sleep(0.01)
        return found

    async def wait(self) -> Run:
        """Wait until the process and all its descendants have ended. An earlier agent may have started it."""
        while (shim := self.shim) is not None:
            await exited(shim.pid)
        found = self.run()
        return found if found is not None and found.finished is not None else self._lost()

    def _lost(self) -> Run:
        """Handle a shim that died without a record: kill its remaining processes, then write and return a record."""
        procs.kill_all_of(self.folder, self.log)
        state = self._record("state.json")
        now = time.time()
        reason = "somebody killed the shim of this process" if state else "the process was not started"
        record = {"startedAt": (state or {}).get("startedAt", now), "finishedAt": now, "signal": 0, "exitCode": 137}
        record["startError"] = " ".join(filter(None, [reason, procs.tail(self.folder / "shim.log")]))
        procs.write_atomically(self.folder / "exit.json", json.dumps(record))
        found = self.run()
        if found is None:
            raise AssertionError("a run with an exit record is known")
        return found

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if (found := self.shim) is not None:
            found.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all its descendants immediately."""
        if (found := self.shim) is not None:
            found.signal(signal.SIGUSR1)

    async def end(self, grace: float) -> Run:
        """Send SIGTERM, then SIGKILL after `grace` seconds, and return the record of the run."""
        self.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, grace)):
                return await self.wait()
        self.kill()
        return await self.wait()


async def exited(pid: int) -> None:
    """Wait until the process with this pid has ended. It need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
