"""Prepare everything that the demo needs, show the progress, and then run the demo.

    PYTHONPATH=demo:localcluster python3.11 -m kvpilot_demo.prepare [options of kvpilot_demo]

This module uses only the standard library, because it installs the packages itself. Two threads (lanes) work in
parallel. One compiles the control plane. The other installs packages, converts the model, and lets it answer a first
question.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvpilot_demo.checks import faults
from kvpilot_localcluster import build
from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.causes import PROXIES, cause

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
SAYS = "> "
"""Prefix of a stage's output lines that the screen shows."""
_NEWS = re.compile(r"\s*(\d+)% (.*)")
_WORTH_TELLING = 5.0
_PLAIN_EVERY = 15.0


@dataclass
class Stage:
    """One command of the preparation, and its progress.

    Attributes:
        title: name on the screen.
        command: the program and its arguments. Its output may report progress by lines such as ` 42% unpack`.
        seconds: expected CPU seconds, to estimate the remaining time.
    """

    title: str
    command: list[str]
    seconds: float
    fraction: float = 0.0
    note: str = ""

    def take_in(self, line: str) -> None:
        """Read a line of the command's output, and update the progress."""
        if found := _NEWS.match(line):
            self.fraction, self.note = min(int(found[1]) / 100, 0.99), found[2].strip()


class Lane:
    """Stages that run one after another in a thread. `news` has lines for the screen, such as finished stages."""

    def __init__(self, name: str, stages: list[Stage]) -> None:
        self.stages, self.log = stages, cache_folder() / f"first-run-{name}.log"
        self.at = stages[0]
        self.news: list[str] = []
        self.failed = False
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def left(self) -> float:
        """Return the expected CPU seconds of the remaining work."""
        return sum(stage.seconds * (1 - stage.fraction) for stage in self.stages)

    @property
    def line(self) -> str:
        """Return the progress of the running stage as one line."""
        stage = self.at
        return f"{stage.fraction:4.0%}  {stage.title}{f': {stage.note}' if stage.note else ''}"

    def stop(self) -> None:
        """End the running stage with all its child processes."""
        self._stopped = True
        while self.thread.is_alive():
            # Repeat, because the thread may be about to start another stage.
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGTERM)
            self.thread.join(0.1)

    def _run(self) -> None:
        with self.log.open("w") as log:
            for stage in self.stages:
                self.at, began = stage, time.monotonic()
                used = self._execute(stage, log)
                if used is None or self._stopped:
                    self.failed = True
                    return
                stage.fraction = 1.0
                took = time.monotonic() - began
                if took > _WORTH_TELLING:
                    self.news.append(f"{stage.title}: {took:.0f} s ({used:.0f} s of a processor)")

    def _execute(self, stage: Stage, log: IO[str]) -> float | None:
        """Run a stage. Return the CPU seconds that it took, or None if it failed."""
        # A session of its own lets `stop` end the command with all its children.
        self._process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for line in self._process.stdout or ():
            stage.take_in(line)
            log.write(line)
            log.flush()
            if line.startswith(SAYS):
                self.news.append(line.removeprefix(SAYS).strip())
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return None if self._process.returncode else usage.ru_utime + usage.ru_stime


def lanes(*, local: bool) -> list[Lane]:
    """Return the lanes (sequences of stages) of a first run. A stage whose result exists already ends at once."""
    install = [Stage("install packages", ["scripts/install.sh"], 60)]
    if not local:
        return [Lane("packages", install)]
    model = [str(PYTHON), "-m", "kvpilot_smallmodels.models", "smollm2-135m"]
    compiling = [sys.executable, "-c", "from kvpilot_localcluster.build import tell; tell(newer=False)"]
    stages = [*install, Stage("convert the model", model, 25)]
    if build.find(newer=False) is None:
        stages.append(Stage("a first answer", [str(PYTHON), "-m", "kvpilot_demo.preview"], 45))
    return [
        Lane("packages", stages),
        # Compile under `nice`, so that the model's first answer in the other lane does not wait.
        Lane("control-plane", [Stage("build a Kubernetes control plane", ["nice", *compiling], 400)]),
    ]


class Board:
    """Display of the lanes. It redraws lines in place, or with `plain` prints them from time to time."""

    def __init__(self, work: list[Lane], *, plain: bool) -> None:
        self._work, self._plain = work, plain
        self._began = time.monotonic()
        self._total = sum(lane.left for lane in work)
        self._drawn: list[str] = []
        self._told = 0.0

    def draw(self) -> None:
        """Print the news of all lanes, and redraw the line of progress."""
        for lane in self._work:
            while lane.news:
                self._clear()
                print(f"[{_clock(time.monotonic() - self._began)}] {lane.news.pop(0)}", flush=True)
        running = [lane.line for lane in self._work if lane.thread.is_alive()]
        if not running or (self._plain and time.monotonic() - self._told < _PLAIN_EVERY):
            return
        self._told = time.monotonic()
        self._clear()
        self._drawn = [f"{line[:90]:<92}" for line in running]
        self._drawn.append(f"      about {_clock(self._left())} left until the demo begins")
        print("\n".join(self._drawn), flush=True)

    def _left(self) -> float:
        """Estimate the remaining seconds from the speed so far. At the beginning, use the number of cores instead."""
        left, passed = sum(lane.left for lane in self._work), time.monotonic() - self._began
        done = self._total - left
        return left * passed / done if done > 0.05 * self._total else left / min(os.cpu_count() or 1, 4)

    def _clear(self) -> None:
        if self._drawn and not self._plain:
            print(f"\x1b[{len(self._drawn)}A\x1b[J", end="")
        self._drawn = []


def run(work: list[Lane], *, plain: bool) -> Lane | None:
    """Run all lanes in parallel, and end all their processes. Return a lane that failed, or None."""
    board = Board(work, plain=plain)
    try:
        for lane in work:
            lane.thread.start()
        while any(lane.thread.is_alive() for lane in work) and not any(lane.failed for lane in work):
            board.draw()
            time.sleep(0.5)
        failed = next((lane for lane in work if lane.failed), None)
    finally:
        for lane in work:
            lane.stop()
    board.draw()
    return failed


def main() -> int:
    """Prepare the demo, and replace this process by it. Return only if the demo cannot start."""
    status = prepare(options := sys.argv[1:])
    if status == 0:
        os.execv(PYTHON, [str(PYTHON), "-m", "kvpilot_demo", *options])  # noqa: S606
    return status


def prepare(options: list[str]) -> int:
    """Check the machine, and do the work of a first run. Return the exit status."""
    local = "--cluster" not in options
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = faults(local=local, installed=(cache_folder() / "uv").exists())
    for fault in found:
        print(f"demo: {fault}", file=sys.stderr)
    if found:
        return 1
    cache_folder().mkdir(parents=True, exist_ok=True)
    try:
        failed = run(lanes(local=local), plain="--plain" in options or not sys.stdout.isatty())
    except KeyboardInterrupt:
        print("stopped; nothing runs any more")
        return 130
    if failed is not None:
        why = cause(failed.log.read_text(errors="replace"))
        print(f"The demo failed at: {failed.at.title}\n  why: {why}\n  log: {failed.log}", file=sys.stderr)
        return 1
    if local:
        # The demo itself uses only loopback addresses, which a proxy could not reach.
        for name in PROXIES:
            os.environ.pop(name, None)
    return 0


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
