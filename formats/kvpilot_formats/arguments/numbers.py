"""Parser of whole numbers in vLLM's command line."""

from __future__ import annotations

import math
import re

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def whole_number(text: str) -> int:
    """Parse a whole number as vLLM does: 8192, 8k (8,000), 8K (8,192), 2.5k.

    Raises:
        ValueError: vLLM would refuse it.
    """
    text = text.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if found is None:
        return int(text)
    if found[2] in _DECIMAL:
        number = float(found[1]) * _DECIMAL[found[2]]
        if math.isinf(number):
            raise ValueError(f"{text[:20]}... is beyond any number")
        return int(number)
    return int(found[1]) * _BINARY[found[2]]
