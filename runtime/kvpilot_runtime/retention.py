"""Caches with a bound: which tokens of a sequence are kept, as kvpilot-serve is asked for it and as engines are told.

`SinksAndWindow` (StreamingLLM) keeps the first pages of a sequence and those of its last tokens. What a token attends
to follows from its position alone: the first `sink_pages`, and all from `first_page` on up to itself. So answers depend
neither on how a prompt was cut into chunks, nor on preemption, nor on what the prefix cache had.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvpilot_runtime.errors import PreflightError, UnsupportedModelError
from kvpilot_runtime.worker_info import WorkerInfo

ALL, SINKS_AND_WINDOW, HEAVY_HITTERS = "All", "SinksAndWindow", "HeavyHitters"
POLICIES = (ALL, SINKS_AND_WINDOW, HEAVY_HITTERS)

VARIABLE = "KVPILOT_RETENTION"
"""Environment variable that tells the engine's processes: `SinksAndWindow:4:1024`; absent or empty, all is kept."""

INFO = WorkerInfo(
    "kvpilot_retention_info", "Which tokens of a sequence the KV cache keeps; absent where it keeps all.",
    ("policy", "sink_tokens", "window_tokens", "page_tokens"), "KVPILOT_RETENTION_REPORT",
)  # fmt: skip


@dataclass(frozen=True)
class SinksAndWindow:
    """At least the first `sinks` tokens of a sequence and its last `window`, in whole pages; both are 1 or more.

    The first page is always kept: a table of kept pages alone begins with the sequence's first token.
    """

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"{SINKS_AND_WINDOW}:{self.sinks}:{self.window}"

    def sink_pages(self, page: int) -> int:
        """Pages of `page` tokens that the sinks take."""
        return -(-self.sinks // page)

    def first_page(self, position: int, page: int) -> int:
        """The first page after the sinks' that the token at `position`, or a later one, attends to."""
        return max(self.sink_pages(page), (position - self.window + 1) // page)

    def kept(self, page: int) -> int:
        """Tokens that one token attends to at most, in pages of `page` tokens."""
        return self.sink_pages(page) * page + self.window + page - 1


def parse(policy: str | None, sinks: int | None, window: int | None) -> SinksAndWindow | None:
    """What kvpilot-serve's options ask for, or the environment where they name no policy; None for all.

    Raises:
        PreflightError: BadArguments; values that are missing, or beside the wrong policy, or a policy that no engine
            serves.
    """

    def refuse(message: str) -> PreflightError:
        return PreflightError("BadArguments", message)

    given = {"--retention-sink-tokens": sinks, "--retention-window-tokens": window}
    if policy == HEAVY_HITTERS:
        raise refuse(f"--retention {HEAVY_HITTERS}: no engine serves it yet; use {SINKS_AND_WINDOW}, or leave it out")
    if policy is not None and policy not in POLICIES:
        raise refuse(f"--retention {policy!r} is not a policy; use one of {', '.join(POLICIES)}")
    if policy is None and sinks is None and window is None:
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
    """What the environment asks an engine for; None for all.

    Raises:
        UnsupportedModelError: it is not as kvpilot-serve writes it.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    policy, *numbers = text.split(":")
    if policy != SINKS_AND_WINDOW or len(numbers) != 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise UnsupportedModelError(
            f"{VARIABLE} is {text!r}; write {SINKS_AND_WINDOW}:SINKS:WINDOW, both in tokens and at least 1, or leave "
            "it out"
        )
    return SinksAndWindow(int(numbers[0]), int(numbers[1]))


def report(bound: SinksAndWindow, page: int) -> None:
    """Of a worker: tell metrics what is served, in pages of `page` tokens."""
    INFO.report(
        {"policy": SINKS_AND_WINDOW, "sink_tokens": str(bound.sinks), "window_tokens": str(bound.window),
         "page_tokens": str(page)}
    )  # fmt: skip
