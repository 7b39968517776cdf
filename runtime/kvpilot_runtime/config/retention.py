"""Bounded caches (`--retention`): the tokens of a sequence that stay in the cache.

`SinksAndWindow` (StreamingLLM) keeps the first pages of a sequence and the pages of its last tokens. A token attends to
the first `sink_pages`, and to all pages from `first_page` up to its own. Its pages depend only on its position, so
chunks, preemption and prefix hits do not change answers.
"""

import os
import re
from dataclasses import dataclass

from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import WorkerInfo

VARIABLE = "KVPILOT_RETENTION"
"""Environment variable with the bound, for the engine's processes, such as `4:1024`: sinks and window, in tokens.

If it is unset or empty, the cache keeps all tokens.
"""

INFO = WorkerInfo(
    "kvpilot_retention_info", "Tokens of a sequence that the KV cache keeps; absent if it keeps all.",
    ("sink_tokens", "window_tokens", "page_tokens"), "KVPILOT_RETENTION_REPORT",
)  # fmt: skip


@dataclass(frozen=True)
class SinksAndWindow:
    """Bound that keeps the pages with the first `sinks` and the last `window` tokens of a sequence.

    `sinks` and `window` are at least 1. So the first page is always kept, and every table of kept pages begins with it.
    """

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"{self.sinks}:{self.window}"

    def sink_pages(self, page: int) -> int:
        """Return the number of pages of `page` tokens that hold the sinks."""
        return -(-self.sinks // page)

    def first_page(self, position: int, page: int) -> int:
        """Return the first page after the sinks' pages that the token at `position`, or a later token, attends to."""
        return max(self.sink_pages(page), (position - self.window + 1) // page)

    def kept(self, page: int) -> int:
        """Return the largest number of tokens that a token can attend to, if whole pages of `page` tokens are kept."""
        return self.sink_pages(page) * page + self.window + page - 1


def parse(text: str) -> SinksAndWindow | None:
    """Parse a bound such as `4:1024`; an empty text is None. Raise ValueError if the text is neither."""
    if not text.strip():
        return None
    if (found := re.fullmatch("([1-9][0-9]*):([1-9][0-9]*)", text.strip())) is None:
        raise ValueError(f"{text!r} is not a bound; write SINKS:WINDOW, both in tokens and at least 1, such as 4:1024")
    return SinksAndWindow(int(found[1]), int(found[2]))


def asked() -> SinksAndWindow | None:
    """Return the environment's bound; None keeps all tokens. Raise UnsupportedModelError if it cannot be read."""
    try:
        return parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise UnsupportedModelError(f"{VARIABLE}: {error}, or leave it out") from error


def report(bound: SinksAndWindow, page: int) -> None:
    """Report a worker's bound to metrics. `page` is the number of tokens of a page."""
    INFO.report({"sink_tokens": str(bound.sinks), "window_tokens": str(bound.window), "page_tokens": str(page)})
