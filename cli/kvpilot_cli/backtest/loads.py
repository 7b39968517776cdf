"""Make synthetic loads of a service from a seed: sessions with several turns. Lengths are in tokens.

The seed determines the start, turns, lengths and pauses of every session, so every policy gets the same sessions. A
turn starts after the previous answer and a pause. So on a slow service a session takes longer, and a timeout ends it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpilot_cli.backtest.costs import BacktestError

Array = NDArray[np.float64]
STEP = 60.0
"""Seconds in which the rate of new sessions is constant."""
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths and pauses of one kind of load. Lengths are lognormal, with a median and the sigma of the logarithm."""

    first_prompt: float
    """Median tokens of a session's first prompt."""
    next_prompt: float
    """Median tokens that each later turn adds to the conversation."""
    output: float
    sigma: float
    turns: float
    """Mean number of turns in a session; geometrically distributed."""
    pause: float
    """Mean seconds between an answer and the next turn, beyond a minimum of one second; exponentially distributed."""
    max_length: int = 65536
    """Largest sum of prompt and answer. A session ends before a turn that would exceed it."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. Each turn is (prompt, output, pause before it), and its prompt contains all earlier turns."""

    number: int
    start: float
    turns: tuple[tuple[int, int, float], ...]


class Asked(Protocol):
    """Load of one service, as a sequence of sessions."""

    @property
    def name(self) -> str:
        """Return the load's name for reports."""

    @property
    def seconds(self) -> float:
        """Return the load's duration in seconds."""

    def sessions(self) -> Iterator[Session]:
        """Yield all sessions in order of start. Every call yields the same sessions."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one Shape. `rate` has the new sessions per second in each STEP."""

    name: str
    shape: Shape
    rate: Array
    seed: int = 0

    @property
    def seconds(self) -> float:
        """Return the duration of the load in seconds."""
        return len(self.rate) * STEP

    def sessions(self) -> Iterator[Session]:
        """Yield all sessions in order of start. Every call yields the same sessions."""
        number = 0
        for i, rate in enumerate(self.rate):
            chance = np.random.default_rng((self.seed, i))
            count = int(chance.poisson(rate * STEP))
            starts = np.sort(chance.uniform(i * STEP, (i + 1) * STEP, count))
            for start, turns in zip(starts, self._turns(chance, count), strict=True):
                yield Session(number, float(start), turns)
                number += 1

    def _turns(self, chance: np.random.Generator, count: int) -> list[tuple[tuple[int, int, float], ...]]:
        shape = self.shape
        lengths = chance.geometric(1 / shape.turns, count)
        total = int(lengths.sum())
        spread = np.exp(shape.sigma * chance.standard_normal((2, total)))
        pauses = 1.0 + (chance.exponential(shape.pause, total) if shape.pause else np.zeros(total))
        result, at = [], 0
        for length in lengths:
            turns: list[tuple[int, int, float]] = []
            context = 0
            for k in range(length):
                median = shape.first_prompt if k == 0 else shape.next_prompt
                prompt = context + max(1, int(median * spread[0, at + k]))
                output = max(1, int(shape.output * spread[1, at + k]))
                if k and prompt + output > shape.max_length:
                    break
                output = min(output, shape.max_length // 2)
                prompt = min(prompt, shape.max_length - output)
                turns.append((prompt, output, float(pauses[at + k]) if k else 0.0))
                context = prompt + output
            at += length
            result.append(tuple(turns))
        return result


AGENTS = Shape(first_prompt=6000, next_prompt=900, output=220, sigma=0.7, turns=18, pause=5.0)
CHAT = Shape(first_prompt=1800, next_prompt=250, output=260, sigma=0.8, turns=4, pause=45.0)
RAG = Shape(first_prompt=6000, next_prompt=0, output=120, sigma=0.5, turns=1, pause=0.0)
NAMES = ("agents", "chat", "rag", "bursts")


def synthetic(name: str, days: float, seed: int, size: float = 1.0, zone: float = 0.0) -> Load:
    """Return the load with this name, out of NAMES.

    - `agents`: contexts that grow to tens of thousands of tokens over many turns with short pauses, even at night.
    - `chat`: medium contexts and quiet nights.
    - `rag`: long prompts, short answers, no prefix to reuse.
    - `bursts`: chat at a third of the rate, with six bursts a day on average. A burst lasts ten minutes and has five
      times as many sessions.

    `size` scales the rate: in bf16, the busiest hour of size 1 needs a few H200s. The day begins `zone` hours later
    than the simulation's.
    """
    if name not in NAMES:
        raise BacktestError(f"trace: {name!r} is unknown: use one of {', '.join(NAMES)}, or all")
    if not 0 < days <= 366:
        raise BacktestError(f"days: {days}; give more than 0 and at most 366")
    steps = max(1, round(days * DAY / STEP))
    chance = np.random.default_rng((seed, NAMES.index(name), 7))
    hours = (np.arange(steps) + 0.5) * STEP / 3600
    shape, peak, depth = {
        "agents": (AGENTS, 0.4, 0.25),
        "chat": (CHAT, 6.5, 0.75),
        "rag": (RAG, 7.5, 0.5),
        "bursts": (CHAT, 2.2, 0.5),
    }[name]
    # The load is highest at 14:00 and lowest at 02:00.
    curve = 1 - depth * (1 + np.cos((hours - zone - 2) * 2 * np.pi / 24)) / 2
    # Multiply the daily curve by noise of about a tenth, with a new value every half hour.
    knots = np.arange(0.0, hours[-1] + 1.0, 0.5)
    rate = peak * size * curve * np.exp(0.1 * np.interp(hours, knots, chance.standard_normal(len(knots))))
    if name == "bursts":
        for start in np.flatnonzero(chance.random(steps) < 6 * STEP / DAY):
            rate[start : start + 10] = np.maximum(rate[start : start + 10], 5 * peak * size * curve[start])
    return Load(name, shape, rate, seed)


def cut(load: Load, start: float, seconds: float) -> Load:
    """Return the part of a load that begins at `start` and lasts `seconds`, for a short trial run."""
    return replace(load, rate=load.rate[int(start // STEP) : int((start + seconds) // STEP)])
