"""Errors that end a command, with one line for the user and an exit code."""

from __future__ import annotations

from kvpilot_formats.untrusted import lines

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130


class ToolError(Exception):
    """A missing object or a refused request. The message names the remedy and may quote the server."""

    code = REFUSED

    def __str__(self) -> str:
        return lines(super().__str__())


class UsageError(ToolError):
    """A wrong argument, with its name, its value and the remedy."""

    code = USAGE


class Missing(ToolError):
    """An object that the API server does not have."""


class Forbidden(ToolError):
    """A request without the needed permission."""
