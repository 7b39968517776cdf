"""Cleaning of text that comes from engines, kubelets, API servers and tenants. Pure Python, for every package.

Pass such text through `shown`, or through `lines` to keep line breaks, before it goes to a status, an Event, a log or a
terminal. Shorten it only afterwards, because a password is recognised by the @ after it.
"""

from __future__ import annotations

import re

_HIDDEN = "***@"
# An address with a scheme: everything up to the last @ before its path. A password with a slash, as S3 has them, is
# recognised by a name and a colon without a port before it. Its length is bounded to keep the search linear.
_IN_ADDRESS = r'(?<=://)(?:[^\s/?#"<>]*@|[^\s/?#@:"<>]+:(?!\d{1,5}[/?#])[^\s"<>@]{0,256}@)'
# An address without a scheme, such as a proxy's: NAME:PASSWORD@HOST, but not an image's IMAGE:TAG@sha256:DIGEST.
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
    # Remove credentials first: invisible characters in a password would hide it from the pattern.
    return printable(without_credentials(text))


def shown(text: str) -> str:
    """Return the text on one line, without credentials and unprintable characters."""
    return lines(text).replace("\n", " ")
