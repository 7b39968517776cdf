"""Makes questions of a reconcile fail as an unforeseen error would: at their end, when the draft has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvpilot_operator.decide.questions import Questions
from kvpilot_operator.state.questions import Question

SECRET = "hunter2"  # what no condition and no log may repeat


@contextmanager
def failing(questions: Collection[Question], asked: set[Question] | None = None) -> Iterator[None]:
    """While it lasts, these questions raise; `asked` takes in those that were asked at all."""
    real = Questions.ask

    def ask(self: Questions, question: Question, answer: Callable[[], Any], otherwise: Any) -> Any:
        if asked is not None:
            asked.add(question)

        def broken() -> Any:
            answer()
            raise ValueError(f"invalid literal for int() with base 10: '{SECRET}'")

        return real(self, question, broken if question in questions else answer, otherwise)

    with patch.object(Questions, "ask", ask):
        yield
