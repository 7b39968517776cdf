"""Bounded caches (`--retention`): the tokens of a sequence that stay in the cache.

`SinksAndWindow` (StreamingLLM) keeps the first pages of a sequence and the pages of its last tokens. A token attends to
the first `sink_pages`, and to all pages from `first_page` up to its own. Its pages depend only on its position, so
chunks, preemption and prefix hits do not change answers.
"""

import os
from dataclasses import dataclass

from kvpilot_runtime.errors import PreflightError, UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import WorkerInfo

ALL, SINKS_AND_WINDOW = "All", "SinksAndWindow"
POLICIES = (ALL, SINKS_AND_WINDOW)

VARIABLE = "KVPILOT_RETENTION"
"""Environment variable with the policy, for the engine's processes: POLICY:SINKS:WINDOW, in tokens.

An example is `SinksAndWindow:4:1024`. If it is unset or empty, the cache keeps all tokens.
"""

INFO = WorkerInfo(
    "kvpilot_retention_info", "Tokens of a sequence that the KV cache keeps; absent if it keeps all.",
    ("policy", "sink_tokens", "window_tokens", "page_tokens"), "KVPILOT_RETENTION_REPORT",
)  # fmt: skip


@dataclass(frozen=True)
class SinksAndWindow:
    """Bound that keeps the pages with the first `sinks` and the last `window` tokens of a sequence.

    `sinks` and `window` are at least 1. So the first page is always kept, and every table of kept pages begins with it.
    """

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"{SINKS_AND_WINDOW}:{self.sinks}:{self.window}"

    def sink_pages(self, page: int) -> int:
        """Return the number of pages of `page` tokens that hold the sinks."""
        return -(-self.sinks // page)

    def first_page(self, position: int, page: int) -> int:
        """Return the first page after the sinks' pages that the token at `position`, or a later token, attends to."""
        return max(self.sink_pages(page), (position - self.window + 1) // page)

    def kept(self, page: int) -> int:
        """Return the largest number of tokens that a token can attend to, if whole pages of `page` tokens are kept."""
        return self.sink_pages(page) * page + self.window + page - 1


def parse(policy: str | None, sinks: int | None, window: int | None) -> SinksAndWindow | None:
    """Return the bound that the options set, or without options the bound of the environment. None keeps all tokens.

    Raises:
        PreflightError: the bound is invalid.
    """

    def refuse(message: str) -> PreflightError:
        return PreflightError("BadArguments", message)

    given = {"--retention-sink-tokens": sinks, "--retention-window-tokens": window}
    if policy is not None and policy not in POLICIES:
        raise refuse(f"--retention {policy!r} is not a policy; use one of {', '.join(POLICIES)}")
    if policy is None and all(value is None for value in given.values()):
        try:
            return asked()
        except UnsupportedModelError as error:
            raise refuse(str(error)) from error
    if policy in (ALL, None):
        for option, value in given.items():
            if value is not None:
                raise refuse(f"{option} {value} is for --retention {SINKS_AND_WINDOW} alone; add that, or leave the "
                             "option out")  # fmt: skip
        return None
    if sinks is None or window is None:
        missing = next(option for option, value in given.items() if value is None)
        raise refuse(f"--retention {SINKS_AND_WINDOW} needs {missing}: add it, in tokens (4 sinks are what models "
                     "usually need)")  # fmt: skip
    return SinksAndWindow(sinks, window)


def asked() -> SinksAndWindow | None:
    """Return the environment's bound; None keeps all tokens. Raise UnsupportedModelError if it cannot be read."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    policy, *numbers = text.split(":")
    if all(n.isdecimal() and int(n) for n in numbers):
        values = [int(n) for n in numbers]
        if policy == SINKS_AND_WINDOW and len(values) == 2:
            return SinksAndWindow(*values)
    raise UnsupportedModelError(
        f"{VARIABLE} is {text!r}; write {SINKS_AND_WINDOW}:SINKS:WINDOW, both in tokens and at least 1, or leave it out"
    )


def report(bound: SinksAndWindow, page: int) -> None:
    """Report a worker's bound to metrics. `page` is the number of tokens of a page."""
    INFO.report(
        {"policy": SINKS_AND_WINDOW, "sink_tokens": str(bound.sinks), "window_tokens": str(bound.window),
         "page_tokens": str(page)}
    )  # fmt: skip
