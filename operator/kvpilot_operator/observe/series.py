"""A parser of Prometheus' text format, which takes chunks of bytes and yields the wanted series.

Its time is linear in the bytes of any page, because the pattern's possessive quantifiers prevent backtracking.
docs/decisions/0013 compares it with prometheus_client's parser.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Set

from kvpilot_formats.untrusted import shown
from kvpilot_operator import budget
from kvpilot_operator.errors import ScrapeError

EXCERPT = 100

_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*+[ \t]*+=[ \t]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LINE = re.compile(
    rf"[a-zA-Z_:][a-zA-Z0-9_:]*+(?:[ \t]*+\{{[ \t]*+((?:{_LABEL}[ \t]*+(?:,[ \t]*+|(?=\}})))*+)\}})?+"
    r"[ \t]++(\S++)(?:[ \t]++-?\d++)?+",
    re.DOTALL,
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)


class SeriesReader(ABC):
    """A parser that takes a page in chunks, and calls `add` for each series with a `wanted` name."""

    def __init__(self, wanted: Set[bytes]) -> None:
        self._wanted = wanted
        self._rest = b""
        """The unfinished last line of the previous chunk."""
        self._bytes = 0
        self._lines = 0

    @property
    def work(self) -> int:
        """Parsing work so far, which estimates CPU time: one unit for each line, and one for each 128 bytes."""
        return self._lines + self._bytes // budget.METRICS_WORK_BYTES

    def steps(self, chunk: bytes) -> Iterator[None]:
        """Parse a chunk, METRICS_STEP_LINES lines per iteration. Raise ScrapeError for bad text or above a limit."""
        if self._bytes + len(chunk) > budget.METRICS.read_bytes:
            raise ScrapeError(f"more than {budget.METRICS.read_bytes} bytes")
        self._bytes += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._lines + len(lines) > budget.METRICS_LINES:
            raise ScrapeError(f"more than {budget.METRICS_LINES} lines")
        longest = max((*lines, self._rest), key=len)
        if len(longest) > budget.METRICS_LINE_BYTES:
            raise ScrapeError(f"a line of more than {budget.METRICS_LINE_BYTES} bytes: {_excerpt(longest)}")
        for start in range(0, len(lines), budget.METRICS_STEP_LINES):
            if start:
                yield
            step = lines[start : start + budget.METRICS_STEP_LINES]
            self._lines += len(step)
            for line in step:
                self._read(line)

    def end(self) -> None:
        """Parse the last line. Raise ScrapeError as `steps` does."""
        self._read(self._rest)

    @abstractmethod
    def add(self, name: str, labels: str, value: float) -> None:
        """Process one series: its name, the text between its braces (`labels`), and its value."""

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
        self.add(name[0].decode(), parts[1] or "", value)


def labels_of(text: str) -> dict[str, str]:
    """Return the labels of a series, from the text between its braces. Keep escapes as they are."""
    return dict(_PAIR.findall(text))


def _excerpt(line: bytes) -> str:
    return repr(shown(line.decode("utf-8", errors="replace"))[:EXCERPT])
