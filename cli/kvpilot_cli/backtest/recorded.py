"""Recorded load from CSV or JSON lines: arrival time and lengths of each request.

FORMS has the supported column names: our own, and those of published traces. Other columns are ignored. Traces do not
show shared prefixes, so each request becomes a session of its own and finds no cached prefix.
"""

import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.loads import DAY, STEP, Array, Session

MOST_TOKENS = 10_000_000
_MOST_DAYS = 366
_MOST_NUMBER = 1e15
"""Largest accepted number. Larger floats cannot represent fractions of a second."""
_LONGEST = 80
"""Largest number of characters of a value that a message quotes."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Form:
    """Column names of one trace format. `unit` is the unit of `arrival` in seconds, or None if it is a date with a
    time.
    """

    arrival: str
    prompt: str
    output: str
    unit: float | None

    @property
    def columns(self) -> tuple[str, str, str]:
        """Return the names of the three columns."""
        return self.arrival, self.prompt, self.output


FORMS = {
    "kvpilot": Form("arrival_seconds", "prompt_tokens", "output_tokens", 1.0),
    "Azure": Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", None),
    "BurstGPT": Form("Timestamp", "Request tokens", "Response tokens", 1.0),
    "Mooncake": Form("timestamp", "input_length", "output_length", 0.001),
}


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
        """Return the duration in whole minutes, in seconds. At least a minute remains for the last answers."""
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
                f"size: {size} leaves no request of {len(self.arrival)} requests of {self.name}; give more"
            )
        is_copy = np.concatenate([[False], of[1:] == of[:-1]])
        arrival = self.arrival[of] + chance.uniform(0, STEP, len(of)) * is_copy
        order = np.argsort(arrival, kind="stable")
        return replace(self, arrival=arrival[order], prompt=self.prompt[of][order], output=self.output[of][order])

    def told(self) -> str:
        """Describe the load in one line."""
        return (
            f"{self.name}: {len(self.arrival)} requests in {self.seconds / 3600:.2f} h, mean prompt "
            f"{self.prompt.mean():.0f} and answer {self.output.mean():.0f} tokens; "
            f"left out, without any: {self.left_out}"
        )


def read(path: Path) -> Recorded:
    """Read a file of recorded requests."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return parse(file, path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise BacktestError(f"recorded: {path} cannot be read ({error}); give a text file in UTF-8") from error


def parse(lines: Iterable[str], name: str) -> Recorded:
    """Parse lines of CSV with a header. If the first line begins with a brace, parse JSON objects."""
    lines = iter(lines)
    first = next(lines, "")
    rows = (_json if first.lstrip().startswith("{") else _csv)(itertools.chain([first], lines), name)
    form: Form | None = None
    found: list[tuple[float, int, int]] = []
    left_out = 0
    for where, row in rows:
        form = form or _form(row, where)
        arrival = _arrival(row, form, where)
        prompt, output = (_tokens(row, column, where) for column in (form.prompt, form.output))
        if prompt and output:
            found.append((arrival, prompt, output))
        else:
            left_out += 1
    if form is None or not found:
        raise BacktestError(f"recorded: {name}: no request with tokens; give {_columns()}")
    found.sort(key=lambda one: one[0])
    arrivals = np.array([one[0] for one in found])
    arrivals -= arrivals[0]
    if arrivals[-1] > _MOST_DAYS * DAY:
        raise BacktestError(
            f"recorded: {name}: {form.arrival} spans {arrivals[-1] / DAY:.0f} days; give at most {_MOST_DAYS}, and "
            f"check its unit: {_columns()}"
        )
    lengths = np.array([one[1:] for one in found], dtype=np.int64)
    return Recorded(Path(name).stem, arrivals, lengths[:, 0], lengths[:, 1], left_out)


def _csv(lines: Iterator[str], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = csv.DictReader(lines, strict=True)
    try:
        for row in rows:
            where = f"{name} line {rows.line_num}"
            if None in row:
                raise BacktestError(f"recorded: {where}: it has more fields than the header; give as many")
            yield where, row
    except csv.Error as error:
        raise BacktestError(f"recorded: {name} line {rows.reader.line_num}: {error}; give {_columns()}") from error


def _json(lines: Iterator[str], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BacktestError(f"recorded: {where}: {error}; give one JSON object a line") from error
        if not isinstance(row, dict):
            raise BacktestError(f"recorded: {where}: {_shown(row)} is not an object; give one JSON object a line")
        yield where, row


def _form(row: Mapping[str, Any], where: str) -> Form:
    for form in FORMS.values():
        if all(column in row for column in form.columns):
            return form
    found = ", ".join(str(column) for column in row)
    raise BacktestError(f"recorded: {where}: columns {_shown(found)}; give {_columns()}")


def _columns() -> str:
    return " or ".join(f"{', '.join(form.columns)} ({name})" for name, form in FORMS.items())


def _arrival(row: Mapping[str, Any], form: Form, where: str) -> float:
    if form.unit is not None:
        return form.unit * _number(row, form.arrival, where)
    value = row.get(form.arrival)
    try:
        if not isinstance(value, str):
            raise ValueError
        time = datetime.fromisoformat(value)
        # Any time zone will do, because only differences between times matter.
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise BacktestError(
            f"recorded: {where}: {form.arrival}: {_shown(value)}; give a date with a time, such as 2026-11-16 18:17:03"
        ) from error


def _number(row: Mapping[str, Any], column: str, where: str) -> float:
    value = given = row.get(column)
    if isinstance(given, str) and _NUMBER.fullmatch(given.strip()):
        value = float(given)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_NUMBER:
        raise BacktestError(f"recorded: {where}: {column}: {_shown(given)}; give a number, such as 12.5")
    return float(value)


def _tokens(row: Mapping[str, Any], column: str, where: str) -> int:
    number = _number(row, column, where)
    if not (0 <= number <= MOST_TOKENS and number.is_integer()):
        raise BacktestError(
            f"recorded: {where}: {column}: {_shown(row[column])}; give a whole number of tokens from 0 to {MOST_TOKENS}"
        )
    return int(number)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
