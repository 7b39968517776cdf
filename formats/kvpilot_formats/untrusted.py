"""Clean and limit text from engines, kubelets, API servers and tenants. Pure Python, for every package.

Pass such text through `shown` before it goes to a status, an Event, a log or a terminal; `lines` keeps line breaks.
Shorten the text only afterwards, because a password is recognized by the @ after it.
"""

import math
import re
from collections.abc import AsyncIterator

_HIDDEN = "***@"
# Credentials in an address with a scheme: everything up to the last @ before the path. An S3 password may contain a
# slash, so NAME: also begins credentials, unless a port follows the colon. A length limit keeps the search linear.
_IN_ADDRESS = r'(?<=://)(?:[^\s/?#"<>]*@|[^\s/?#@:"<>]+:(?!\d{1,5}[/?#])[^\s"<>@]{0,256}@)'
# Credentials in an address without a scheme, such as a proxy's: NAME:PASSWORD@HOST. IMAGE:TAG@sha256:DIGEST looks
# similar but has none.
_BARE = r"(?<![\w./@-])[\w.+%~-]+:[^\s/@\"'<>:]+@(?!sha\d+:)(?=[\w\[])"
_CREDENTIALS = re.compile(f"{_IN_ADDRESS}|{_BARE}", re.ASCII)


def printable(text: str) -> str:
    """Replace each character that is neither printable nor a line break by a blank.

    Control characters change the terminal, bidirectional ones reorder text, and UTF-8 cannot encode lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def without_credentials(text: str) -> str:
    """Return the text with `***` for the user and password in each address."""
    return _CREDENTIALS.sub(_HIDDEN, text) if "@" in text else text


def lines(text: str) -> str:
    """Return the text without credentials and unprintable characters. Keep its line breaks."""
    # Remove credentials first: `printable` could put a blank into a password, which the pattern would then miss.
    return printable(without_credentials(text))


def shown(text: str) -> str:
    """Return the text on one line, without credentials and unprintable characters."""
    return lines(text).replace("\n", " ")


class KvpilotError(Exception):
    """Base class of the errors of operator and probes. It cleans their messages, which may quote other programs."""

    def __str__(self) -> str:
        return lines(super().__str__())


class OverBudget(KvpilotError):
    """Error for a sender that exceeds a limit in bytes. The operator's limits are in `kvpilot_operator.budget`."""


def whole(text: object, most: int) -> int | None:
    """Parse a number in ASCII digits. Return None for any other text, and for a number above `most`.

    `str.isdigit` accepts digits that `int` does not ("²"), and `int` refuses more than 4,300 of them.
    """
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        return None
    return int(digits)


async def read_body(chunks: AsyncIterator[bytes], most: float, where: str) -> bytes:
    """Return the whole body of an answer. Raise OverBudget, which names `where`, if it has more than `most` bytes."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > most:
            raise OverBudget(f"{where}: more than {most} bytes")
        body += chunk
    return bytes(body)


async def whole_lines(
    chunks: AsyncIterator[bytes], where: str = "", most: float = math.inf, longest: float = math.inf
) -> AsyncIterator[bytes]:
    """Yield the non-empty lines of a stream, without an incomplete last line. Raise OverBudget, which names `where`."""
    line = bytearray()
    async for chunk in chunks:
        most -= len(chunk)
        if most < 0:
            raise OverBudget(f"{where}: more bytes than its tokens can take")
        parts = chunk.split(b"\n")
        for i, part in enumerate(parts):
            if i:
                if line.strip():
                    yield bytes(line)
                line.clear()
            line += part
            if len(line) > longest:
                raise OverBudget(f"{where}: a line of more than {longest} bytes")
