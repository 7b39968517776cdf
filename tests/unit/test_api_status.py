"""The CRD keeps every status field that the operator writes. The server prunes a field that it does not know."""

import json
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
import pytest

from kvpilot_operator.state.status import MAX_DECISIONS, MAX_DENIED, Status
from support.crd import root_schema, status_faults

SCHEMA = root_schema()["properties"]["status"]
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [found for part in typing.get_args(hint) for found in structs_in(part)]


def compare(struct: type[msgspec.Struct], schema: Mapping[str, Any], path: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    assert set(fields) == set(schema["properties"]), path
    for name, field in fields.items():
        child = schema["properties"][name]
        for inner in structs_in(field.type):
            compare(inner, child.get("items", child), f"{path}.{name}")


def full(struct: type[msgspec.Struct]) -> msgspec.Struct:
    """Return an instance with every field set."""
    return struct(**{field.name: value_of(field.type) for field in msgspec.structs.fields(struct)})


def value_of(hint: Any) -> Any:
    """Return a value of this type that is neither None nor an empty tuple."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return parts[0]
    if typing.get_origin(hint) is tuple:
        return (value_of(parts[0]),)
    if parts:
        return value_of(next(part for part in parts if part is not type(None)))
    if issubclass(hint, msgspec.Struct):
        return full(hint)
    if issubclass(hint, StrEnum):
        return next(iter(hint))
    return {int: 7, bool: True, str: "Some", datetime: NOW}[hint]


def on_the_wire(status: Status) -> Any:
    return json.loads(json.dumps(status.as_written()))


def test_status_has_exactly_the_fields_of_the_crd() -> None:
    compare(Status, SCHEMA, "status")


def test_a_full_status_is_accepted() -> None:
    status = full(Status)
    assert isinstance(status, Status)
    assert status_faults(on_the_wire(status)) == ()


def test_an_empty_status_is_accepted() -> None:
    assert status_faults(on_the_wire(Status())) == ()


@pytest.mark.parametrize(("path", "limit"), [("decisions", MAX_DECISIONS), ("kvCache.denied", MAX_DENIED)])
def test_the_operator_keeps_no_list_longer_than_the_crd_allows(path: str, limit: int) -> None:
    here = SCHEMA
    for name in path.split("."):
        here = here["properties"][name]
    assert limit <= here["maxItems"]
