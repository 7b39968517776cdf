"""Build the timeline of a service from the decisions in its status and from its Events. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from kvpilot_kubectl.fields import Json, event_time, items, moment, text, whole
from kvpilot_operator.api.words import Action

_WARNINGS = (Action.ROLL_BACK, Action.HOLD)
_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision, or an Event. Events have no steps. `move` is a change of dtype, such as "auto -> k4v4".

    `steps` has the steps that the operator considered, as the status lists them (`options`).
    """

    time: datetime | None
    action: str
    reason: str
    message: str
    move: str = ""
    steps: tuple[Json, ...] = ()
    warning: bool = False
    event: bool = False
    count: int = 1


def entries(obj: Json, events: Iterable[Json]) -> tuple[Entry, ...]:
    """Return the decisions in a service's status and its Events, oldest first.

    Leave out Events that repeat a decision, or that belong to an earlier service of the same name.
    """
    uid = text(obj, "metadata", "uid")
    decided = [_decision(one) for one in items(obj, "status", "decisions")]
    said = {one.message for one in decided}
    told = [_event(one) for one in events if text(one, "involvedObject", "uid") == uid]
    # The status has the newest decision first. Reversing keeps the order of decisions with equal times.
    together = [*reversed(decided), *(one for one in told if one.message not in said)]
    return tuple(sorted(together, key=lambda one: one.time or _BEGINNING))


def _decision(one: Json) -> Entry:
    before, after = text(one, "fromDtype"), text(one, "toDtype")
    action = text(one, "action")
    return Entry(
        time=moment(one, "time"),
        action=action or "(no action)",
        reason=text(one, "reason"),
        message=text(one, "message"),
        move=f"{before} -> {after}".strip() if before != after else before,
        steps=tuple(items(one, "options")),
        warning=action in _WARNINGS,
    )


def _event(one: Json) -> Entry:
    return Entry(
        time=event_time(one),
        action=text(one, "reason") or "(no reason)",
        reason="",
        message=text(one, "message"),
        warning=text(one, "type") == "Warning",
        event=True,
        count=whole(one, "count") or 1,
    )
