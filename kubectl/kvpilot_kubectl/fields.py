"""Reading JSON that anybody may have written: an older or a newer operator, a script, nobody yet.

What is not there, or is of another type, reads as None or as empty, never as an error. Text is printable: messages
quote engines, and a terminal obeys what it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kvpilot_formats.untrusted import shown

Json = Any
"""A value as a JSON decoder returns it."""

_INT64 = 1 << 63


def at(value: Json, *path: str) -> Json:
    """What stands at this path of objects, or None."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text(value: Json, *path: str) -> str:
    """Return the text there, as people may read it; empty where there is none."""
    found = at(value, *path)
    return shown(found) if isinstance(found, str) else ""


def whole(value: Json, *path: str) -> int | None:
    """The whole number there, of 64 bits at most, as the API's are."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) and -_INT64 <= found < _INT64 else None


def items(value: Json, *path: str) -> Iterator[Mapping[str, Json]]:
    """The objects in the list there."""
    found = at(value, *path)
    yield from (one for one in (found if isinstance(found, list) else ()) if isinstance(one, Mapping))


def words(value: Json, *path: str) -> tuple[str, ...]:
    """The texts in the list there, without what is none."""
    found = at(value, *path)
    return tuple(one for one in map(text, found if isinstance(found, list) else ()) if one)


def moment(value: Json, *path: str) -> datetime | None:
    """The time there, in UTC."""
    try:
        found = datetime.fromisoformat(text(value, *path))
        return found.astimezone(UTC) if found.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def duration(span: timedelta) -> str:
    """A span as kubectl writes ages: its two largest units, such as 5m30s or 3d4h."""
    seconds = max(0, int(span.total_seconds()))
    units = ((seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    first = next((i for i, (number, _) in enumerate(units) if number), len(units) - 1)
    shown = [f"{number}{unit}" for number, unit in units[first : first + 2] if number]
    return "".join(shown) or "0s"


def ago(then: datetime | None, now: datetime) -> str:
    """How long ago, or in how long; empty where no time is known."""
    if then is None:
        return ""
    return f"{duration(now - then)} ago" if then <= now else f"in {duration(then - now)}"


def stamp(then: datetime | None) -> str:
    """The time as the API writes it; empty where none is known."""
    return "" if then is None else then.strftime("%Y-%m-%dT%H:%M:%SZ")
