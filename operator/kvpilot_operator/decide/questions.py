"""Rules, and how they are folded: what goes wrong in one is noted, and the others are still asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.state.questions import Question, Unanswered, unanswered

D = TypeVar("D", bound=Draft)

CONDITION = "ReconcileSucceeded"


def unchanged(draft: D) -> D:
    """Leave everything as the rules before have it."""
    return draft


@dataclass(frozen=True, slots=True)
class Rule(Generic[D]):
    """One step of a decision, a pure function. `otherwise`, which never fails, stands where `answer` raises."""

    question: Question
    answer: Callable[[D], D]
    otherwise: Callable[[D], D] = unchanged


def fold(draft: D, rules: Sequence[Rule[D]]) -> D:
    """Every rule in turn, each on what the ones before it returned; an unexpected error is caught here alone."""
    for rule in rules:
        try:
            draft = rule.answer(draft)
        except Exception as error:
            kept = rule.otherwise(draft)
            draft = replace(kept, unanswered=(*kept.unanswered, unanswered(rule.question, error)))
    return draft


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
