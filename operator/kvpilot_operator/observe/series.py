"""The lines of a page in Prometheus' text format: from chunks of bytes to the wanted series, one by one.

The time is linear in the bytes of any page: one search finds the lines, and their first name classifies them. A line is
at most `METRICS_LINE_BYTES` long, and the expressions that read it cannot go back (possessive quantifiers). Only the
line that a chunk ends in is held. docs/decisions/0013 compares it with prometheus_client's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set

from kvpilot_formats.untrusted import shown
from kvpilot_operator.budget import (
    METRICS,
    METRICS_LINE_BYTES,
    METRICS_LINES,
    METRICS_STEP_LINES,
    METRICS_WORK_BYTES,
)
from kvpilot_operator.errors import ScrapeError

# Called for each wanted series: its name, the text between the braces, and the value.
OnSeries = Callable[[str, str, float], None]

EXCERPT = 100

_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*+[ \t]*+=[ \t]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LINE = re.compile(
    rf"[a-zA-Z_:][a-zA-Z0-9_:]*+(?:[ \t]*+\{{[ \t]*+((?:{_LABEL}[ \t]*+(?:,[ \t]*+|(?=\}})))*+)\}})?+"
    r"[ \t]++(\S++)(?:[ \t]++-?\d++)?+",
    re.DOTALL,
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)


class SeriesReader:
    """Takes a page in chunks, and calls `on_series` for each series with a `wanted` name."""

    def __init__(self, wanted: Set[bytes], on_series: OnSeries) -> None:
        self._wanted = wanted
        self._on_series = on_series
        self._rest = b""
        """Unfinished last line of the last chunk."""
        self._bytes = 0
        self._lines = 0

    @property
    def work(self) -> int:
        """Return the lines so far, plus a line for each 128 bytes: parsing time is proportional to it."""
        return self._lines + self._bytes // METRICS_WORK_BYTES

    def steps(self, chunk: bytes) -> Iterator[None]:
        """Read the next bytes in steps of METRICS_STEP_LINES lines, one per iteration.

        Raises:
            ScrapeError: more bytes or lines than a page may have, or a line that is too long or cannot be read.
        """
        if self._bytes + len(chunk) > METRICS.read_bytes:
            raise ScrapeError(f"more than {METRICS.read_bytes} bytes")
        self._bytes += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._lines + len(lines) > METRICS_LINES:
            raise ScrapeError(f"more than {METRICS_LINES} lines")
        longest = max((*lines, self._rest), key=len)
        if len(longest) > METRICS_LINE_BYTES:
            raise ScrapeError(f"a line of more than {METRICS_LINE_BYTES} bytes: {_excerpt(longest)}")
        for start in range(0, len(lines), METRICS_STEP_LINES):
            if start:
                yield
            step = lines[start : start + METRICS_STEP_LINES]
            self._lines += len(step)
            for line in step:
                self._read(line)

    def close(self) -> None:
        """Read the last line; raises ScrapeError, as `steps` does."""
        self._read(self._rest)

    def _read(self, line: bytes) -> None:
        name = _NAME.match(line)
        if name is None or name[0] not in self._wanted:
            return
        text = line.decode("utf-8", errors="replace").rstrip()
        parts = _LINE.fullmatch(text)
        try:
            if parts is None:
                raise ValueError("not a series and its value")
            value = float(parts[2])
        except ValueError as error:
            raise ScrapeError(f"not Prometheus text: {_excerpt(line)}: {shown(str(error))[:EXCERPT]}") from error
        self._on_series(name[0].decode(), parts[1] or "", value)


def labels_of(text: str) -> dict[str, str]:
    """Return the labels of a series, from the text between its braces; escapes are left as they are."""
    return dict(_PAIR.findall(text))


def _excerpt(line: bytes) -> str:
    return repr(shown(line.decode("utf-8", errors="replace"))[:EXCERPT])
