"""What could not be observed of a service, apart from the rest: one object that cannot be read is one question less."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from kvpilot_operator.errors import ClusterError, Throttled
from kvpilot_operator.state.questions import Question, Unanswered, unanswered

T = TypeVar("T")

# The API server itself is away (0), overloaded or behind something that is: nothing of that service can be read.
_AWAY = (0, 429, 502, 503, 504)


async def observed(question: Question, reading: Awaitable[T], otherwise: T, failed: list[Unanswered]) -> T:
    """What was read; where that fails, `otherwise`, with the reason added to `failed`.

    Raises:
        ClusterError: the API server answers nobody now; the whole reconcile is to be tried again.
    """
    try:
        return await reading
    except Exception as error:
        # An error with a type of its own is about what was asked for, not about who was asked.
        if isinstance(error, Throttled) or (type(error) is ClusterError and error.status in _AWAY):
            raise
        failed.append(unanswered(question, error))
        return otherwise
