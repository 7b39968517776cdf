"""The installed CRD, and the API server's defaulting for tests without a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvpilot_operator.state.status import Status

Json = Any

CRD = Path(__file__).parents[2] / "crds" / "kvpilot.io_quantizedllmservices.yaml"


@cache
def load_crd() -> dict[str, Json]:
    """Return the CustomResourceDefinition of the checkout."""
    crd: dict[str, Json] = yaml.load(CRD.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return crd


def root_schema() -> Mapping[str, Json]:
    """Return the structural schema of the only served version."""
    schema: Mapping[str, Json] = load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def apply_defaults(obj: Mapping[str, Json]) -> dict[str, Json]:
    """Return `obj` as the server stores it: without unknown fields in its spec, and with defaults."""
    schema = root_schema()["properties"]["spec"]
    return {**obj, **({"spec": _defaulted(obj["spec"], schema)} if obj.get("spec") is not None else {})}


def _defaulted(value: Json, schema: Mapping[str, Json]) -> Json:
    if isinstance(value, list) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    if not isinstance(value, Mapping) or "properties" not in schema:
        return dict(value) if isinstance(value, Mapping) else value
    fields = {name: (value.get(name), field) for name, field in schema["properties"].items()}
    given = {name: (field.get("default") if item is None else item, field) for name, (item, field) in fields.items()}
    return {name: _defaulted(item, field) for name, (item, field) in given.items() if item is not None}


def status_faults(status: Json) -> tuple[str, ...]:
    """Return the schema's first objection to a status."""
    try:
        msgspec.convert(status, Status)
    except msgspec.ValidationError as error:
        return (str(error),)
    return ()
