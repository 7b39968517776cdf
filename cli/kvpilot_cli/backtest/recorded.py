"""Read a recorded load from a CSV file: arrival time and lengths of each request. Other columns are ignored.

A recording does not show shared prefixes, so each request becomes a session of its own and finds no cached prefix.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.loads import DAY, STEP, Array, Session

COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens")
MOST_TOKENS = 10_000_000
_MOST_DAYS = 366
_MOST_NUMBER = 1e15
"""Largest accepted number. Larger floats cannot represent fractions of a second."""
_LONGEST = 80
"""Largest number of characters of a value that a message quotes."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_REMEDY = f"give the columns {', '.join(COLUMNS)}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests in order of arrival. The first arrives at 0 s."""

    name: str
    arrival: Array
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    left_out: int = 0
    """Number of requests that failed when they were recorded, with no prompt or no answer tokens."""

    @property
    def seconds(self) -> float:
        """Return the duration in seconds, a multiple of 60.

        It ends at least a minute after the last request arrives.
        """
        return float(self.arrival[-1] // STEP + 2) * STEP

    def sessions(self) -> Iterator[Session]:
        """Yield a session of a single turn for each request."""
        for number, (start, prompt, output) in enumerate(zip(self.arrival, self.prompt, self.output, strict=True)):
            yield Session(number, float(start), ((int(prompt), int(output), 0.0),))

    def scaled(self, size: float, seed: int) -> "Recorded":
        """Return a load with `size` times as many requests.

        Above 1, copies arrive within a minute of the original. Below 1, requests are drawn at random. The daily curve
        and bursts of minutes do not change, but the gaps between requests do.
        """
        if size == 1:
            return self
        chance = np.random.default_rng(seed)
        copies = int(size) + (chance.random(len(self.arrival)) < size % 1)
        of = np.repeat(np.arange(len(self.arrival)), copies)
        if not len(of):
            raise BacktestError(
                f"size: {size} leaves none of the {len(self.arrival)} requests of {self.name}; give a larger size"
            )
        is_copy = np.concatenate([[False], of[1:] == of[:-1]])
        arrival = self.arrival[of] + chance.uniform(0, STEP, len(of)) * is_copy
        order = np.argsort(arrival, kind="stable")
        return replace(self, arrival=arrival[order], prompt=self.prompt[of][order], output=self.output[of][order])

    def told(self) -> str:
        """Return one line that describes the recorded load for the report."""
        return (
            f"{self.name}: {len(self.arrival)} requests in {self.seconds / 3600:.2f} h, mean prompt "
            f"{self.prompt.mean():.0f} and answer {self.output.mean():.0f} tokens; "
            f"left out because they have no tokens: {self.left_out}"
        )


def read(path: Path) -> Recorded:
    """Return the requests in a CSV file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return parse(file, path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise BacktestError(f"recorded: {path} cannot be read ({error}); give a text file in UTF-8") from error


def parse(lines: Iterable[str], name: str) -> Recorded:
    """Return the requests in lines of CSV, the first of which is the header."""
    rows = csv.DictReader(lines, strict=True)
    try:
        given = [_request(row, f"{name} line {rows.line_num}") for row in rows]
    except csv.Error as error:
        raise BacktestError(f"recorded: {name} line {rows.reader.line_num}: {error}; {_REMEDY}") from error
    found = sorted((one for one in given if one[1] and one[2]), key=lambda one: one[0])
    if not found:
        raise BacktestError(f"recorded: {name}: no request with tokens; {_REMEDY}")
    table = np.array(found)
    arrival = table[:, 0] - table[0, 0]
    if arrival[-1] > _MOST_DAYS * DAY:
        raise BacktestError(
            f"recorded: {name}: arrival_seconds spans {arrival[-1] / DAY:.0f} days; give at most {_MOST_DAYS}, in "
            "seconds"
        )
    lengths = table[:, 1:].astype(np.int64)
    return Recorded(Path(name).stem, arrival, lengths[:, 0], lengths[:, 1], len(given) - len(found))


def _request(row: Mapping[str | None, str | None], where: str) -> tuple[float, float, float]:
    if None in row:
        raise BacktestError(f"recorded: {where}: it has more fields than the header; give as many")
    if not set(COLUMNS) <= row.keys():
        found = ", ".join(filter(None, row))
        raise BacktestError(f"recorded: {where}: columns {_shown(found)}; {_REMEDY}")
    arrival, prompt, output = ((column, row[column] or "") for column in COLUMNS)
    return _number(*arrival, where), _tokens(*prompt, where), _tokens(*output, where)


def _number(column: str, text: str, where: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text.strip()) else np.inf
    if not abs(value) < _MOST_NUMBER:
        raise BacktestError(f"recorded: {where}: {column}: {_shown(text)}; give a number, such as 12.5")
    return value


def _tokens(column: str, text: str, where: str) -> float:
    value = _number(column, text, where)
    if not (0 <= value <= MOST_TOKENS and value.is_integer()):
        raise BacktestError(
            f"recorded: {where}: {column}: {_shown(text)}; give a whole number of tokens from 0 to {MOST_TOKENS}"
        )
    return value


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}..."
