"""The status while it is being decided, with the journal entries and events that explain each change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

import msgspec

from kvpilot_operator.state.decision import Event
from kvpilot_operator.state.enums import Action
from kvpilot_operator.state.questions import Unanswered
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import MAX_DECISIONS, Canary, JournalEntry, Option, Stable, Status, clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What was observed of a service, and what has been decided so far. Frozen: every change returns a new one."""

    snapshot: Snapshot
    status: Status
    """As decided so far; `before` is what it was."""
    events: tuple[Event, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()

    @property
    def now(self) -> datetime:
        """The time of the reconcile."""
        return self.snapshot.now

    @property
    def before(self) -> Status:
        """The status as it was observed."""
        return self.snapshot.status

    @property
    def stable(self) -> Stable | None:
        """The revision that serves, as decided so far."""
        return self.status.stable

    @property
    def canary(self) -> Canary | None:
        """The canary in flight, as decided so far."""
        return self.status.canary

    @property
    def sides(self) -> tuple[str, ...]:
        """The revision that serves and the one on trial, as far as there are any."""
        return tuple(part.revision for part in (self.stable, self.canary) if part is not None)

    def set(self, **changes: Any) -> Self:
        """Replace fields of the status."""
        return replace(self, status=msgspec.structs.replace(self.status, **changes))

    def set_kv(self, **changes: Any) -> Self:
        """Replace fields of `status.kvCache`."""
        return self.set(kv_cache=msgspec.structs.replace(self.status.kv_cache, **changes))

    def set_canary(self, **changes: Any) -> Self:
        """Replace fields of `status.canary`; LookupError where there is none."""
        canary = in_flight(self)
        if changes.get("stage", canary.stage) != canary.stage:
            changes.setdefault("stage_time", self.now)
        if "message" in changes:
            changes["message"] = clip(changes["message"])
        return self.set(canary=msgspec.structs.replace(canary, **changes))

    def set_accuracy(self, **changes: Any) -> Self:
        """Replace fields of `status.accuracy`."""
        return self.set(accuracy=msgspec.structs.replace(self.status.accuracy, **changes))

    def record(
        self,
        action: Action,
        reason: str,
        message: str,
        *,
        from_dtype: str | None = None,
        to_dtype: str | None = None,
        warning: bool = False,
        event: str | None = None,
        options: tuple[Option, ...] = (),
    ) -> Self:
        """Write a decision into the journal and post it as an event (of reason `event` where that reads better)."""
        entry = JournalEntry(
            time=self.now,
            action=action,
            reason=reason,
            message=clip(message),
            from_dtype=from_dtype,
            to_dtype=to_dtype,
            options=options,
        )
        recorded = self.set(decisions=(entry, *self.status.decisions)[:MAX_DECISIONS])
        return recorded.event(event or reason, message, warning=warning)

    def event(self, reason: str, message: str, *, warning: bool = False) -> Self:
        """Post an event without a journal entry."""
        return replace(self, events=(*self.events, Event("Warning" if warning else "Normal", reason, clip(message))))


def in_flight(draft: Draft) -> Canary:
    """The canary that must be there; LookupError where there is none."""
    if draft.canary is None:
        raise LookupError("no canary is in flight")
    return draft.canary
