"""Measure an engine step that prefills a new turn of one conversation while other sequences decode.

The figures are wall time, kernel time and time of host functions. `gpu_engine.py --beside 100,400` runs this
measurement in the engine's process. Users of the other sequences notice such a step as one long pause between two
tokens. So its wall time is the longest gap between two results after the request's arrival.
"""

import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_engine_driver import WARM_STEPS, DriveError, Driver, prompt

SEQUENCES, CONTEXT = 16, 8192
"""Number of sequences that decode, and number of cached tokens of each of them and of the conversation."""
REPEATS = 7
WARM = 8
"""Number of arrivals at the beginning that are not measured, because they compile kernels."""
STEPS = 6
"""Number of engine steps to observe after an arrival. The request runs in one of the first two steps."""
SHOWN = 30
"""Number of host functions in a result."""


class Beside:
    """Sequences that decode together, and the requests that join them for one engine step.

    Raises:
        DriveError: the sequences never decode together.
    """

    def __init__(self, driver: Driver, vocab: int) -> None:
        self._driver, self._engine, self._vocab = driver, driver.engine, vocab
        self._turns = itertools.count()
        self._names = driver.submit([self._fresh(CONTEXT) for _ in range(SEQUENCES)], driver.max_model_len - CONTEXT)
        quiet = 0
        while quiet < WARM_STEPS:
            if not self._engine.has_unfinished_requests():
                raise DriveError(f"{SEQUENCES} sequences never decoded together")
            quiet = quiet + 1 if len(self._engine.step()) == SEQUENCES else 0

    def close(self) -> None:
        """Abort the sequences that decode."""
        self._engine.abort_request(self._names)
        time.sleep(0.2)

    def gaps(self, steps: int = STEPS) -> list[float]:
        """Run this many engine steps, and return the seconds between the results of consecutive steps."""
        marks = [time.perf_counter()]
        for _ in range(steps):
            self._engine.step()
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in itertools.pairwise(marks)]

    def store(self) -> list[int]:
        """Compute a new context, so that the prefix cache holds it, without measurement. Return its tokens."""
        tokens = self._fresh(CONTEXT)
        (name,) = self._driver.submit([tokens], 1)
        while not any(output.request_id == name and output.finished for output in self._engine.step()):
            pass
        self.gaps()
        return tokens

    def arrive(self, tokens: list[int], new: int) -> None:
        """Submit a request. Its prompt is `tokens`, which are cached, followed by `new` other tokens."""
        self._driver.submit([tokens + self._fresh(new)], 1)

    def _fresh(self, count: int) -> list[int]:
        return prompt(f"beside/{next(self._turns)}", count, self._vocab)


def beside_case(driver: Driver, vocab: int, new: int) -> dict[str, Any]:
    """Measure steps that compute `new` tokens of one conversation while `SEQUENCES` others decode.

    Return these figures, times in milliseconds:

    - `step_ms`, `kernels_ms`: wall time of such a step, and time of its kernels.
    - `gaps_ms_of_repeats`: gaps between results after each arrival.
    - `decode_ms`, `decode_kernels_ms`: the same times of a step without the request.
    - `host`: slowest functions in the call that launches the step. cProfile slows Python down, so only their shares are
      meaningful.
    """
    beside = Beside(driver, vocab)
    gaps = []
    for _ in range(WARM + REPEATS):
        tokens = beside.store()
        beside.arrive(tokens, new)
        gaps.append([1e3 * gap for gap in beside.gaps()])
    decode = statistics.median(beside.gaps(4 * STEPS))
    quiet = kernels_ms(beside.gaps) / STEPS
    busy = []
    for _ in range(3):
        tokens = beside.store()
        beside.arrive(tokens, new)
        busy.append(kernels_ms(beside.gaps) - (STEPS - 1) * quiet)
    host = host_functions(beside, new)
    beside.close()
    return {
        "new": new,
        "sequences": SEQUENCES,
        "context": CONTEXT,
        "decode_ms": 1e3 * decode,
        "decode_kernels_ms": quiet,
        "step_ms": statistics.median(max(one) for one in gaps[WARM:]),
        "gaps_ms_of_repeats": gaps[WARM:],
        "kernels_ms": statistics.median(busy),
        "host": host,
    }


def kernels_ms(run: Callable[[], Any]) -> float:
    """Return the milliseconds of all kernels that run during `run`, by torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profiler.events() if event.device_type.name == "CUDA") / 1e3


def host_functions(beside: Beside, new: int) -> list[dict[str, Any]]:
    """Return the host functions that take the most time (without callees), as means over several requests."""
    profile = cProfile.Profile()
    for _ in range(REPEATS):
        tokens = beside.store()
        beside.arrive(tokens, new)
        profile.enable()
        beside.gaps(2)
        profile.disable()
        beside.gaps()
    rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    found = [
        {
            "function": f"{Path(file).name}:{line} {name}" if line else name,
            "calls": calls / REPEATS,
            "own_ms": 1e3 * own / REPEATS,
            "total_ms": 1e3 * total / REPEATS,
        }
        for (file, line, name), (_, calls, own, total, _) in rows
    ]
    return sorted(found, key=lambda row: -row["own_ms"])[:SHOWN]
