"""What each part of a spec is: a frozen struct whose fields have the CRD's names in snake_case."""

from functools import cache
from typing import Any

import msgspec

Json = Any
"""A value as a JSON decoder returns it."""

_WORDS = {"kl": "KL", "ttft": "TTFT", "itl": "ITL", "mib": "MiB", "gib": "GiB"}


@cache
def camel(name: str) -> str:
    """The CRD's name of a field."""
    head, *rest = name.split("_")
    return head + "".join(_WORDS.get(part, part.capitalize()) for part in rest)


class Part(msgspec.Struct, frozen=True, rename=camel, omit_defaults=True):
    """A part of the spec, or the whole."""

    def as_written(self) -> dict[str, Json]:
        """The part as JSON, as the CRD has it, without what was left out."""
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Json])
