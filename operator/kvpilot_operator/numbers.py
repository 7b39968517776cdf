"""Parse whole numbers in text from other programs: arguments, labels, annotations, headers, labels of metrics."""

from __future__ import annotations


def whole(text: object, most: int) -> int | None:
    """Return the number from 0 to `most` in ASCII digits; None for any other text, and for larger numbers.

    `str.isdigit` accepts digits that `int` does not ("²"), and `int` refuses more than 4,300 of them.
    """
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        return None
    return int(digits)
