"""What the API server would not have of a service, and when it is asked again.

It lives with the process: after a restart everything is written anew, and what is refused then is known again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.errors import Rejected
from kvpilot_operator.state.objects import Rejection

# A quota may be raised or a webhook mended at any time; nobody tells, so what was refused is written again in a while.
BACKOFF = Backoff(5.0, 60.0)

What = tuple[str, str]
"""Kind and name."""


class _Held(NamedTuple):
    rejection: Rejection
    content: bytes
    failures: int
    due: float


class Rejections:
    """Of one service, as far as anything was written of it; `clock` counts seconds."""

    __slots__ = ("_clock", "_held", "_written")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[What, _Held] = {}
        self._written = False

    def now(self) -> tuple[Rejection, ...] | None:
        """What is refused now; None where nothing was written yet.

        A baseline is written once, after a capture: it is refused until it may be tried again, and then decided upon.
        """
        if not self._written:
            return None
        now = self._clock()
        return tuple(one.rejection for one in self._held.values() if one.rejection.kind != "ConfigMap" or now < one.due)

    def waits(self, what: What, content: bytes) -> bool:
        """Whether this very content was refused, and it is too early to ask again."""
        one = self._held.get(what)
        return one is not None and one.content == content and self._clock() < one.due

    def note(self, what: What, content: bytes, error: Rejected) -> bool:
        """A write was refused; True where it was not known already."""
        before = self._held.get(what)
        rejection = Rejection(*what, error.reason, error.message, error.causes)
        again = before is not None and before.content == content
        failures = before.failures + 1 if before is not None and again else 0
        due = self._clock() + BACKOFF.pause(failures)
        self._held[what] = _Held(rejection, content, failures, due)
        self._written = True
        return before is None or before.rejection != rejection

    def accepted(self, what: What) -> None:
        """A write went through."""
        self._held.pop(what, None)
        self._written = True

    def keep(self, asked: Collection[What]) -> None:
        """Drop what nobody asks for any more, baselines excepted."""
        self._held = {what: one for what, one in self._held.items() if what in asked or what[0] == "ConfigMap"}
        self._written = True
