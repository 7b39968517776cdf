"""A step as it is weighed: what it would lead to, and why it is ruled out, if it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpilot_operator.api.words import Action, Outcome
from kvpilot_operator.decide.steps.latency import Expected
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.status import Option, clip

# What the schema holds of a figure.
_MOST_PERCENT = 1_000_000
Closed = tuple[Outcome, str]
"""Why a step is ruled out, in one word and in more."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """An option with what only the choice needs to know: `open` where nothing rules it out."""

    option: Option
    open: bool
    fits: bool


def weighed(
    s: PolicyInput,
    action: Action,
    to: tuple[str, int],
    closed: Closed | None,
    tokens: int,
    use: int,
    limit: int,
    itl: Expected,
    times: float | None = None,
    late: str | None = None,
) -> Weighed:
    """What every step says: why it is ruled out, if it is, and what it would lead to; `times` of a change of dtype.

    `late` is the objective that it would not hold.
    """
    fits, (dtype, replicas) = use <= limit and late is None, to
    outcome, why = closed or (Outcome.POSSIBLE if fits else Outcome.INSUFFICIENT, late or "")
    who, gained = (f"{replicas} replicas", "") if times is None else (dtype, f" ({times:.2f}x)")
    when = " at the peak" if action in (Action.SCALE_IN, Action.DTYPE_UP) else ""
    text = f"{who} would hold {tokens} tokens{gained} and be {use}% full{when}; {itl.message}"
    option = option_of(action, to, outcome, f"{why}; {text}" if why else text, tokens)
    return Weighed(option, closed is None, fits)


def percent(part: float, whole: float) -> int:
    """A share in whole percent, rounded up, as large as the schema holds."""
    if whole <= 0:
        return 0 if part <= 0 else _MOST_PERCENT
    return min(_MOST_PERCENT, math.ceil(100 * part / whole - 1e-9))


def option_of(action: Action, to: tuple[str, int], outcome: Outcome, message: str, tokens: int) -> Option:
    """Return a step to a dtype and a number of replicas."""
    dtype, replicas = to
    return Option(
        action=action, dtype=dtype, replicas=replicas, outcome=outcome, message=clip(message), capacity_tokens=tokens
    )
