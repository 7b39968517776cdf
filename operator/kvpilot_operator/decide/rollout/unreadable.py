"""What is decided about a canary that an operator of another version wrote, and this one cannot read? Nothing.

It may have traffic, and what its stage asks for is not known here: every object stays as it is until it can be read.
"""

from __future__ import annotations

from kvpilot_operator.api.words import Action, ConditionType, Reason
from kvpilot_operator.decide.context import Context
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.snapshot import Snapshot


def unreadable(s: Snapshot) -> Cause | None:
    """Why nothing is decided, with the remedy; None where the canary can be read, or there is none."""
    if s.unreadable is None:
        return None
    key = s.key
    return Cause(
        Reason.CANARY_UNREADABLE,
        f"status.canary cannot be read by this operator ({s.unreadable.why}): one of another version has written it. "
        "Until it can be read its engines and traffic, and all else of the service, stay as they are. Put that version "
        "of the operator back; or remove the field, with which the trial ends and status.stable serves alone: kubectl "
        f"-n {key.namespace} patch qllm {key.name} --subresource=status --type=json -p "
        """'[{"op":"remove","path":"/status/canary"}]'""",
    )


def explain(c: Context) -> Context:
    """Say it once."""
    cause, before = unreadable(c.snapshot), c.before.condition(ConditionType.PROGRESSING)
    if cause is None or (before is not None and before.reason == cause.reason):
        return c
    return c.record(Action.HOLD, *cause, warning=True)
