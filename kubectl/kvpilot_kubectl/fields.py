"""Read fields of untrusted JSON. An operator of another version or a script may have written it, or it is empty.

If a value is missing or has another type, the functions return None or an empty value, and raise no error. They make
text printable, because messages quote engines, whose control characters could change the terminal.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kvpilot_formats.untrusted import shown

Json = Any
"""A value as a JSON decoder returns it."""

_INT64 = 1 << 63


def at(value: Json, *path: str) -> Json:
    """Return the value at this path of keys in nested objects, or None."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text(value: Json, *path: str) -> str:
    """Return the text at this path in printable form, or the empty string."""
    found = at(value, *path)
    return shown(found) if isinstance(found, str) else ""


def whole(value: Json, *path: str) -> int | None:
    """Return the integer at this path, or None. An integer of more than 64 bits counts as missing."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) and -_INT64 <= found < _INT64 else None


def items(value: Json, *path: str) -> Iterator[Mapping[str, Json]]:
    """Yield the objects in the list at this path."""
    found = at(value, *path)
    yield from (one for one in (found if isinstance(found, list) else ()) if isinstance(one, Mapping))


def words(value: Json, *path: str) -> tuple[str, ...]:
    """Return the texts in the list at this path. Leave out other values."""
    found = at(value, *path)
    return tuple(one for one in map(text, found if isinstance(found, list) else ()) if one)


def moment(value: Json, *path: str) -> datetime | None:
    """Return the time at this path in UTC, or None."""
    try:
        found = datetime.fromisoformat(text(value, *path))
        return found.astimezone(UTC) if found.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def duration(span: timedelta) -> str:
    """Return a duration as kubectl writes ages, in its two largest units, such as 5m30s or 3d4h."""
    seconds = max(0, int(span.total_seconds()))
    units = ((seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    first = next((i for i, (number, _) in enumerate(units) if number), len(units) - 1)
    shown = [f"{number}{unit}" for number, unit in units[first : first + 2] if number]
    return "".join(shown) or "0s"


def ago(then: datetime | None, now: datetime) -> str:
    """Return the distance from now, such as "5m ago" or "in 3d", or the empty string without a time."""
    if then is None:
        return ""
    return f"{duration(now - then)} ago" if then <= now else f"in {duration(then - now)}"


def stamp(then: datetime | None) -> str:
    """Return the time as the API writes it, or the empty string."""
    return "" if then is None else then.strftime("%Y-%m-%dT%H:%M:%SZ")
