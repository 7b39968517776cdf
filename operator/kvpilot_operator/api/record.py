"""Base of the API's structs, and the constraints of their fields for the generated CRD (`make generate`).

The CRD's schema takes a field's type, default and limits from the struct. A field's description is the docstring below
the field. If there is none, it is the description in the field's `Meta`, or the docstring of the field's struct. Put
CEL rules above a struct (`rules`), or into the `Meta` of a field.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

Json = Any
"""A value as a JSON decoder returns it."""

_WORDS = {"kl": "KL", "ttft": "TTFT", "itl": "ITL", "mib": "MiB", "gib": "GiB"}


@cache
def camel(name: str) -> str:
    """Return the name in the CRD (camelCase) of a Python field."""
    head, *rest = name.split("_")
    return head + "".join(_WORDS.get(part, part.capitalize()) for part in rest)


class Record(msgspec.Struct, frozen=True, rename=camel, omit_defaults=True):
    """The spec, the status, or a part of them. A field that has its default is not written."""

    def as_written(self) -> dict[str, Json]:
        """Return the record as JSON, without fields that have their defaults."""
        written: dict[str, Json] = msgspec.to_builtins(self)
        return written


class Rule(NamedTuple):
    """A CEL rule of the CRD (x-kubernetes-validations). Only the API server evaluates it."""

    field: str
    """Path from the struct to the field at fault, with a leading dot; "" for the value itself."""
    holds: str
    """CEL expression that is true for a valid value."""
    message: str
    """The mistake and its remedy. `{EXPRESSION}` inserts the value of a string with a length limit. It cannot insert a
    number, because the server assumes no limit for the length of string(integer)."""

    def as_written(self) -> dict[str, str]:
        """Return this rule as an entry of the CRD's x-kubernetes-validations."""
        written = {"rule": self.holds, **({"fieldPath": self.field} if self.field else {}), "message": self.message}
        parts = re.split(r"\{([^{}]*)\}", self.message)
        if len(parts) > 1:
            shown = [part if index % 2 else f"'{part}'" for index, part in enumerate(parts) if part]
            written["message"] = re.sub(r" ?\{[^{}]*\}", "", self.message)
            written["messageExpression"] = " + ".join(shown)
        return written


RULES: dict[type[Record], tuple[Rule, ...]] = {}
"""Rules by the struct that they check."""

_R = TypeVar("_R", bound=type[Record])


def rules(*given: Rule) -> Callable[[_R], _R]:
    """Attach CEL rules to a struct. The API server checks each value of this struct with them.

    Attach no rules to a struct if a field of this type has the default {}. The server checks {} against the rules
    before it fills in the nested defaults.
    """

    def attach(record: _R) -> _R:
        RULES[record] = given
        return record

    return attach


SET: dict[str, Json] = {"x-kubernetes-list-type": "set"}
"""`extra` of a list whose items are all different."""


def keyed_by(*fields: str) -> dict[str, Json]:
    """Return the schema keys (`Meta.extra`) of a list of type `map`, whose items these fields identify."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(fields)}


LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = f"{LABEL}([.]{LABEL})*"
Name = Annotated[str, Meta(min_length=1, max_length=253, pattern=f"^{NAME}$")]
"""Name of a Kubernetes object."""
Key = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")]
"""Key of a Secret or ConfigMap."""
Quantity = Annotated[str, Meta(max_length=32, pattern=r"^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")]
"""Quantity of a resource as Kubernetes writes it, such as 500m or 2Gi."""
Percent = Annotated[int, Meta(ge=0, le=100)]
Thousand = Annotated[int, Meta(ge=0, le=1000)]
Count = Annotated[int, Meta(ge=0)]
Word = Annotated[str, Meta(max_length=63)]
"""Field of a status that has one word."""
Text = Annotated[str, Meta(max_length=253)]
"""Field of a status that has a name or an address."""
ReasonText = Annotated[str, Meta(max_length=128, description="The cause, as one CamelCase word.")]
Message = Annotated[str, Meta(max_length=4096, description="The cause, in words and numbers.")]
