"""The status of a pass while it is being decided, with the journal entries and events that explain each change."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from kvpilot_operator.state.decision import Event
from kvpilot_operator.state.status import MAX_DECISIONS, JournalEntry, Option, Status, clip


@dataclass(slots=True)
class Draft:
    """Grows from the observed status to the decided one; lives for one call of `decide`."""

    now: datetime
    status: Status
    events: list[Event] = field(default_factory=list)

    def set(self, **changes: Any) -> None:
        """Replace fields of the status."""
        self.status = msgspec.structs.replace(self.status, **changes)

    def set_kv(self, **changes: Any) -> None:
        """Replace fields of `status.kvCache`."""
        self.set(kv_cache=msgspec.structs.replace(self.status.kv_cache, **changes))

    def set_canary(self, **changes: Any) -> None:
        """Replace fields of `status.canary`, which must be there."""
        canary = self.status.canary
        if canary is None:
            raise LookupError("no canary is in flight")
        if "stage" in changes and changes["stage"] != canary.stage:
            changes.setdefault("stage_time", self.now)
        if "message" in changes:
            changes["message"] = clip(changes["message"])
        self.set(canary=msgspec.structs.replace(canary, **changes))

    def set_accuracy(self, **changes: Any) -> None:
        """Replace fields of `status.accuracy`."""
        self.set(accuracy=msgspec.structs.replace(self.status.accuracy, **changes))

    def record(
        self,
        action: str,
        reason: str,
        message: str,
        *,
        from_dtype: str | None = None,
        to_dtype: str | None = None,
        warning: bool = False,
        event: str | None = None,
        options: tuple[Option, ...] = (),
    ) -> None:
        """Write the decision into the journal and post it as an event (of reason `event` where that reads better)."""
        entry = JournalEntry(
            time=self.now,
            action=action,
            reason=reason,
            message=clip(message),
            from_dtype=from_dtype,
            to_dtype=to_dtype,
            options=options,
        )
        self.set(decisions=(entry, *self.status.decisions)[:MAX_DECISIONS])
        self.event(event or reason, message, warning=warning)

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Post an event without a journal entry."""
        self.events.append(Event("Warning" if warning else "Normal", reason, clip(message)))
