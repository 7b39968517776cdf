"""Asks one question of a reconcile after another: what goes wrong in one is noted, the others are still answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.state.questions import Question, Unanswered, unanswered

T = TypeVar("T")

CONDITION = "ReconcileSucceeded"


class Questions:
    """The one place where an unexpected error of a decision is caught."""

    def __init__(self, draft: Draft, observed: Sequence[Unanswered]) -> None:
        self._draft = draft
        self._unanswered = list(observed)

    @property
    def unanswered(self) -> tuple[Unanswered, ...]:
        """The questions that had no answer so far, those of the observation included."""
        return tuple(self._unanswered)

    def failed(self, question: Question) -> bool:
        """Whether this one had none."""
        return any(one.question == question for one in self._unanswered)

    def ask(self, question: Question, answer: Callable[[], T], otherwise: T) -> T:
        """The answer; where it raises, `otherwise`, with the draft as it was before."""
        status, events = self._draft.status, len(self._draft.events)
        try:
            return answer()
        except Exception as error:
            self._draft.status = status
            del self._draft.events[events:]
            self._unanswered.append(unanswered(question, error))
            return otherwise


def line(unanswered: Sequence[Unanswered]) -> tuple[Literal["True", "False"], str, str]:
    """Status, reason and message of the condition that says which questions had no answer."""
    if not unanswered:
        return "True", "AllAnswered", "every question of the last reconcile was answered"
    named = ", ".join(dict.fromkeys(map(str, unanswered)))
    return (
        "False",
        f"{unanswered[0].question}Unanswered",
        f"not answered: {named}. What these decide stays as it is, and everything else goes on. The operator's log has "
        "more about it; where the API server gave no error of its own, please report it",
    )
