"""Remember the refused objects of a service, and when to write them again."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.errors import Rejected
from kvpilot_operator.state.objects import Rejection

# Pauses before a refused write is retried. Retry after a time, because no watch reports a raised quota or a repaired
# webhook.
BACKOFF = Backoff(5.0, 60.0)

What = tuple[str, str]
"""(kind, name) of an object."""


class _Held(NamedTuple):
    rejection: Rejection
    content: bytes
    failures: int
    due: float


class Rejections:
    """The refused objects of one service. `clock` returns seconds."""

    __slots__ = ("_clock", "_held", "_written")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[What, _Held] = {}
        self._written = False

    def now(self) -> tuple[Rejection, ...] | None:
        """Return the API server's current refusals, or None if the operator has written nothing yet.

        Leave out a refused baseline once its retry is due. No reconcile retries it: only a new capture writes it.
        """
        if not self._written:
            return None
        now = self._clock()
        return tuple(one.rejection for one in self._held.values() if one.rejection.kind != "ConfigMap" or now < one.due)

    def waits(self, what: What, content: bytes) -> bool:
        """Return True if this content of the object was refused, and its retry is not due yet."""
        one = self._held.get(what)
        return one is not None and one.content == content and self._clock() < one.due

    def note(self, what: What, content: bytes, error: Rejected) -> bool:
        """Remember that the API server refused this object. Return True if the refusal is new or has changed."""
        before = self._held.get(what)
        rejection = Rejection(*what, error.reason, error.message, error.causes)
        again = before is not None and before.content == content
        failures = before.failures + 1 if before is not None and again else 0
        due = self._clock() + BACKOFF.pause(failures)
        self._held[what] = _Held(rejection, content, failures, due)
        self._written = True
        return before is None or before.rejection != rejection

    def accepted(self, what: What) -> None:
        """Forget that the API server refused an object, because it has now accepted a write of the object."""
        self._held.pop(what, None)
        self._written = True

    def keep(self, asked: Collection[What]) -> None:
        """Forget refusals of objects that are not in `asked`, the objects to write. Keep refusals of baselines."""
        self._held = {what: one for what, one in self._held.items() if what in asked or what[0] == "ConfigMap"}
        self._written = True
