"""Load the schema of this version's CRD, and apply defaults as the API server does."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

Json = Any


@cache
def root_schema() -> Mapping[str, Json]:
    """Return the schema of an object without its status and descriptions. `make generate` writes the file."""
    text = (resources.files("kvpilot_cli.validate") / "schema.json").read_text(encoding="utf-8")
    schema: Mapping[str, Json] = json.loads(text)
    return schema


def apply_defaults(obj: Mapping[str, Json]) -> dict[str, Json]:
    """Return `obj` as the server stores it: without unknown fields in its spec, and with defaults."""
    schema = root_schema()["properties"]["spec"]
    return {**obj, **({"spec": _defaulted(obj["spec"], schema)} if obj.get("spec") is not None else {})}


def unknown_fields(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the path of each field that the schema does not know, and the names that it knows there.

    kubectl refuses a manifest with such a field.
    """
    if isinstance(value, Mapping) and "properties" in schema:
        for name, item in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}", tuple(schema["properties"])
            else:
                yield from unknown_fields(item, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema["items"], f"{path}[{index}]")


def _defaulted(value: Json, schema: Mapping[str, Json]) -> Json:
    if isinstance(value, list) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    if not isinstance(value, Mapping) or "properties" not in schema:
        return dict(value) if isinstance(value, Mapping) else value
    fields = {name: (value.get(name), field) for name, field in schema["properties"].items()}
    given = {name: (field.get("default") if item is None else item, field) for name, (item, field) in fields.items()}
    return {name: _defaulted(item, field) for name, (item, field) in given.items() if item is not None}
