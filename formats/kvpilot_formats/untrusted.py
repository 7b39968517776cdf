"""Text that others wrote: engines, kubelets, API servers, tenants. Pure Python, so that every package can import it.

Whoever shows such text, in a status, an Event, a log line or on a terminal, takes it through `shown`, or through
`lines` where line breaks count. Cut it afterwards: half an address has no @ to tell its password by.
"""

from __future__ import annotations

import re

_HIDDEN = "***@"
# An address with a scheme: everything up to the last @ before its path. A password may hold a slash, as those of S3 do:
# then it starts with a name and a colon that no port follows. Its length is bounded to keep the search linear.
_IN_ADDRESS = r'(?<=://)(?:[^\s/?#"<>]*@|[^\s/?#@:"<>]+:(?!\d{1,5}[/?#])[^\s"<>@]{0,256}@)'
# An address without one, as proxies and images have: NAME:PASSWORD@HOST, and not IMAGE:TAG@sha256:DIGEST.
_BARE = r"(?<![\w./@-])[\w.+%~-]+:[^\s/@\"'<>:]+@(?!sha\d+:)(?=[\w\[])"
_CREDENTIALS = re.compile(f"{_IN_ADDRESS}|{_BARE}", re.ASCII)


def printable(text: str) -> str:
    """Return the text with a blank for each character that is neither printable nor a line break.

    Control characters steer terminals, bidirectional ones change the order of what is read, and no UTF-8 writer takes
    half a surrogate pair.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def without_credentials(text: str) -> str:
    """Return the text with `***` for the user and password in each address."""
    return _CREDENTIALS.sub(_HIDDEN, text) if "@" in text else text


def lines(text: str) -> str:
    """Return the text printable and without credentials."""
    # Invisible characters in a password must not hide it from the pattern: the credentials go first.
    return printable(without_credentials(text))


def shown(text: str) -> str:
    """Return the text on one line, printable and without credentials."""
    return lines(text).replace("\n", " ")
