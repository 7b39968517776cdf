"""Resource quantities as Kubernetes writes them ("500m", "2Gi"); pure and exact."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)},
}


def parse(text: str) -> Fraction:
    """The value of a quantity.

    Raises:
        ValueError: it is not a quantity.
    """
    found = re.fullmatch(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a quantity: write a number and a suffix, e.g. 500m or 2Gi")
    return Fraction(found[1] + (found[2] or "")) * _SUFFIXES[found[3] or ""]


def divided(quantity: str, divisor: str) -> str:
    """A quantity in units of a divisor, rounded up, as resourceFieldRef gives it."""
    unit = parse(divisor)
    return str(math.ceil(parse(quantity) / (unit or 1)))


def limit_or_allocatable(container: Mapping[str, Any], resource: str, allocatable: Mapping[str, str]) -> str:
    """A resourceFieldRef's quantity: limits.X or requests.X of the container; without a limit, the node's own."""
    part, _, name = resource.partition(".")
    value = container.get("resources", {}).get(part, {}).get(name)
    if value is not None:
        return str(value)
    return allocatable.get(name, "0") if part == "limits" else "0"
