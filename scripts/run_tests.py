"""Run parts of the tests in parallel, continue after failures, and print a summary.

    python scripts/run_tests.py                         # every part
    python scripts/run_tests.py --jobs 1 unit kernels   # these parts, one after the other
    python scripts/run_tests.py --long e2e              # only tests marked `long`
    python scripts/run_tests.py --quick                 # check and unit, without tests marked `slow`

A part is a folder of tests/, or `check` (format, lint, types, import contracts, generated files, prose). Each line of
output has the name of its part. The last line is `N passed, N failed`. The exit code is 0 only if all parts passed.
"""

import argparse
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# Longest parts come first, so that none runs alone at the end. Three of the first five compute (runtime, kernels and
# unit), and two mostly wait.
PARTS = ("runtime", "kernels", "faults", "e2e", "unit", "chart", "cluster", "scale", "check", "monitoring", "images")
LONG = ("e2e", "faults", "chart", "monitoring", "images", "runtime", "kernels")
QUICK = ("unit", "check")


@dataclass(frozen=True)
class Outcome:
    """The result of a part. `failures` are names of failed tests, or the reason why the part itself failed."""

    part: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    seconds: float


def command(part: str, report: Path, options: tuple[str, ...]) -> list[str]:
    """Return the command that runs a part with more options of pytest, and writes its results to `report`."""
    if part == "check":
        return ["make", "--no-print-directory", "check"]
    # Durations show which tests made a slow run slow.
    return [sys.executable, "-m", "pytest", f"tests/{part}", f"--junitxml={report}", "--durations=10", *options]


def outcome(part: str, status: int, report: Path, seconds: float) -> Outcome:
    """Read a part's report. The part itself failed if no test ran, or if it ended with an error but no test failed."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 (pytest's own)
    except (OSError, ElementTree.ParseError):
        cases = []  # the part was killed before or while it wrote the report
    failed = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = sum(one.find("skipped") is not None for one in cases)
    passed = len(cases) - len(failed) - skipped
    failures = [f"{one.get('classname', '').replace('.', '/')}.py::{one.get('name')}" for one in failed]
    if part == "check":
        passed = int(status == 0)
    if status and not failures:
        failures = [f"{part} ended with exit code {status}"]
    if not status and not passed:
        failures = [f"{part} ran no test"]
    return Outcome(part, passed, skipped, tuple(failures), seconds)


class Run:
    """Waiting and running parts, and the outcomes of finished parts."""

    def __init__(self, parts: list[str], options: tuple[str, ...], folder: Path) -> None:
        self.outcomes: list[Outcome] = []
        self._options = options
        self._folder = folder
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._printing = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._ended = False
        self._parts = parts

    def wait(self, jobs: int) -> None:
        """Run all parts, `jobs` at a time."""
        for part in self._parts:
            self._waiting.put(part)
        self._workers = [threading.Thread(target=self._work) for _ in range(jobs)]
        for worker in self._workers:
            worker.start()
        self._join()

    def _join(self) -> None:
        # If a signal interrupts Thread.join(), Python treats a running thread as finished. So poll instead.
        while any(worker.is_alive() for worker in self._workers):
            time.sleep(0.1)

    def _work(self) -> None:
        while not self._ended:
            try:
                part = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._run(part)

    def _run(self, part: str) -> None:
        report, began = self._folder / f"{part}.xml", time.monotonic()
        self._say(part, "started")
        with subprocess.Popen(
            command(part, report, self._options),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Ctrl-C reaches only this process, which then lets each part clean up once.
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            self._running[part] = process
            for line in process.stdout or ():
                self._say(part, line.rstrip())
        del self._running[part]
        seconds = time.monotonic() - began
        self._say(part, f"ended with exit code {process.returncode} after {seconds:.0f} s")
        self.outcomes.append(outcome(part, process.returncode, report, seconds))

    def _say(self, part: str, words: str) -> None:
        with self._printing:
            print(f"{part:<10} | {words}", flush=True)

    def end(self) -> None:
        """Let running parts clean up and end, and start no other."""
        self._ended = True
        for process in list(self._running.values()):
            process.send_signal(signal.SIGINT)
        self._join()


def summary(parts: list[str], outcomes: list[Outcome], seconds: float) -> str:
    """Return the names of all failures, a table of parts, and one line with the sums."""
    of = {one.part: one for one in outcomes}
    lines = [f"FAILED {name}" for part in parts if part in of for name in of[part].failures]
    lines += [f"FAILED {part} did not run to its end" for part in parts if part not in of]
    failed = len(lines)
    lines += ["", f"{'part':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for part in parts:
        if part in of:
            one = of[part]
            lines.append(f"{part:<12}{one.passed:>8}{len(one.failures):>8}{one.skipped:>9}{one.seconds:>9.0f}")
    passed, skipped = sum(one.passed for one in outcomes), sum(one.skipped for one in outcomes)
    lines.append(f"{'together':<12}{passed:>8}{failed:>8}{skipped:>9}{seconds:>9.0f}")
    return "\n".join([*lines, "", f"{passed} passed, {failed} failed"])


def main() -> int:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of parts that run at a time (default %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--long", action="store_true", help="run only tests marked `long`")
    which.add_argument("--quick", action="store_true", help="leave out tests marked `slow`; two processes a part")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: use at least 1")
    wanted = options.parts or (LONG if options.long else QUICK if options.quick else PARTS)
    chosen: tuple[str, ...] = ("-m=long" if options.long else "-m=not long",)
    if options.quick:
        chosen = ("-m=not long and not slow", "-n2")
    parts = [part for part in PARTS if part in wanted]
    began = time.monotonic()
    # A shell may start this with Ctrl-C ignored. Parts would inherit that unless it is handled here.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kvpilot-tests-") as folder:
        run = Run(parts, chosen, Path(folder))
        try:
            run.wait(options.jobs)
        except KeyboardInterrupt:
            run.end()
    print(f"\n{summary(parts, run.outcomes, time.monotonic() - began)}", flush=True)
    return int(any(one.failures for one in run.outcomes) or len(run.outcomes) < len(parts))


if __name__ == "__main__":
    sys.exit(main())
