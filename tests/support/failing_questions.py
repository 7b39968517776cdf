"""Inject an unexpected error into a question (one step) of a reconcile.

The error is raised after the question's rule has computed an answer, which is lost.
"""

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from kvpilot_operator.decide.context import Draft
from kvpilot_operator.decide.decide import Rule
from kvpilot_operator.state.questions import Question

SECRET = "hunter2"  # neither conditions nor logs may contain this text

# The package attribute of the same name is the function, not the module.
decide = importlib.import_module("kvpilot_operator.decide.decide")


@contextmanager
def failing(questions: Collection[Question], asked: set[Question] | None = None) -> Iterator[None]:
    """Make the rules of these questions raise in the block. `asked` collects the questions that were reached."""

    def watched(rule: Rule[Draft]) -> Rule[Draft]:
        def answer(draft: Draft) -> Draft:
            if asked is not None:
                asked.add(rule.question)
            answered = rule.answer(draft)
            if rule.question in questions:
                raise ValueError(f"invalid literal for int() with base 10: '{SECRET}'")
            return answered

        return replace(rule, answer=answer)

    with (
        patch.object(decide, "RULES", tuple(map(watched, decide.RULES))),
        patch.object(decide, "REFUSED", tuple(map(watched, decide.REFUSED))),
    ):
        yield
