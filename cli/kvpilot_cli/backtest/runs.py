"""Run every load under every policy on two processes, and tell the progress on stderr once it takes long."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from kvpilot_cli.backtest.compare import Row, Starter, run
from kvpilot_cli.backtest.costs import Profile
from kvpilot_cli.backtest.loads import Asked
from kvpilot_cli.backtest.service import Objective
from kvpilot_operator.api.spec import Spec

PROCESSES = 2
QUIET_SECONDS, PERIOD_SECONDS = 5.0, 10.0
_POLL_SECONDS = 0.5

Job = tuple[Asked, str, Starter, Spec, Profile, Objective]

_shares: Any = None
"""Shares of the runs that are done, in shared memory; set in each worker process."""


class Progress:
    """Teller of progress: nothing for the first seconds, then a line every few."""

    def __init__(self, runs: int, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._out, self._clock = runs, out, clock
        self._began = clock()
        self._next = self._began + QUIET_SECONDS

    def tell(self, shares: Sequence[float]) -> None:
        """Print the share of all runs that is done, if a line is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + PERIOD_SECONDS
        share, over = sum(shares) / self._runs, sum(one >= 1 for one in shares)
        spent = now - self._began
        left = f", about {_time(spent / share - spent)} left" if share > 0.01 else ""
        text = f"backtest: {share:.0%}, {over} of {self._runs} runs done in {_time(spent)}{left}"
        print(text, file=self._out, flush=True)


def run_all(jobs: Sequence[Job]) -> list[Row]:
    """Return a row for each job, in their order."""
    progress = Progress(len(jobs), sys.stderr)
    if len(jobs) == 1:
        return [run(*jobs[0], progress=lambda share: progress.tell([share]))]
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(jobs), lock=False)
    with context.Pool(PROCESSES, initializer=_share, initargs=(shares,)) as pool:
        results = [pool.apply_async(_run, (index, job)) for index, job in enumerate(jobs)]
        for result in results:
            while not result.ready():
                result.wait(_POLL_SECONDS)
                progress.tell(shares[:])
        return [result.get() for result in results]


def _share(shares: Any) -> None:
    global _shares
    _shares = shares


def _run(index: int, job: Job) -> Row:
    def progress(share: float) -> None:
        _shares[index] = min(share, 1.0)

    row = run(*job, progress=progress)
    progress(1.0)
    return row


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
