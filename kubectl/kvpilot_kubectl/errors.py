"""Errors that end a command. Each has one line for the user, and an exit code."""

from kvpilot_formats.untrusted import lines

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130


class ToolError(Exception):
    """A missing object or a refused request. The message names the remedy and may quote the server."""

    code = REFUSED

    def __str__(self) -> str:
        return lines(super().__str__())


class UsageError(ToolError):
    """A wrong argument. The message names the argument, its value and the remedy."""

    code = USAGE


class Missing(ToolError):
    """The API server does not have the requested object."""
