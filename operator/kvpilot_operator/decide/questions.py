"""Rules, and how they are folded: what goes wrong in one is noted, and the others are still asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.state.questions import Question, unanswered

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
