"""What ends a command: one line with the remedy, and the exit code."""

from __future__ import annotations

from kvpilot_formats.untrusted import lines

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130


class ToolError(Exception):
    """An object that is not there, or a request that is refused. The message says what to do, and may quote others."""

    code = REFUSED

    def __str__(self) -> str:
        return lines(super().__str__())


class UsageError(ToolError):
    """A wrong argument: its name, its value and the remedy."""

    code = USAGE


class Missing(ToolError):
    """The API server has no object of that name."""


class Forbidden(ToolError):
    """The user may not do this."""
