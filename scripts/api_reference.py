"""The reference page of the API, from the CRD (`make generate`): `python scripts/api_reference.py PAGE`."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpilot_operator.api.schema import load_crd, root_schema

Json = Any

_INTRO = """\
<!-- Generated from crds/ by `make generate`; edit the CRD, not this page. -->

# {kind}

{description}

API `{group}/{version}`, short name `{short}`, category `{category}`, scope {scope}; `/status` and `/scale` are served.

Defaults and limits are in the schema, so `kubectl explain {plural}.spec --recursive` tells the same. The rules under a
table are enforced by Kubernetes 1.29 and newer when an object is written; on an older server the operator reports the
same faults in the condition `SpecAccepted` and does not act on the object.
"""


def reference_page() -> str:
    """The whole page as Markdown, one section per object of the schema, in the schema's order."""
    crd = load_crd()["spec"]
    names = crd["names"]
    intro = _INTRO.format(
        kind=names["kind"],
        description=root_schema()["description"],
        group=crd["group"],
        version=crd["versions"][0]["name"],
        plural=names["plural"],
        short=names["shortNames"][0],
        category=names["categories"][0],
        scope=crd["scope"].lower(),
    )
    sections = [intro, *_root_rules()]
    told: dict[int, str] = {}
    for part in ("spec", "status"):
        sections.extend(_sections(part, root_schema()["properties"][part], told))
    sections.append(_printer_columns(crd["versions"][0]["additionalPrinterColumns"]))
    return "\n".join(sections)


def _root_rules() -> Iterator[str]:
    rules = list(_rules(root_schema()))
    if rules:
        yield "\n".join(["Rules:", "", *rules, ""])


def _sections(path: str, schema: Mapping[str, Json], told: dict[int, str]) -> Iterator[str]:
    """The section of one object and those of the objects in it, depth first.

    What the CRD has in two places by a YAML alias is `told` (id -> path) once.
    """
    if id(schema) in told:
        yield "\n".join([f"## {path}", "", f"As `{told[id(schema)]}`.", ""])
        return
    told[id(schema)] = path
    rows = [
        f"| `{name}` | {_type(field)} | {_default(name, field, schema)} | {_limits(field)} | {field['description']} |"
        for name, field in schema["properties"].items()
    ]
    table = ["| field | type | default | limits | what it does |", "|---|---|---|---|---|", *rows, ""]
    rules = list(_rules(schema))
    for name, field in schema["properties"].items():
        rules.extend(rule for rule in _rules(field, name) if not _object_of(field) or field["type"] == "array")
        rules.extend(_rules(field.get("items", {}), f"{name}[]") if not _object_of(field) else ())
    if rules:
        table.extend(["Rules:", "", *rules, ""])
    yield "\n".join([f"## {path}", "", schema.get("description", f"One item of `{path}`."), "", *table])
    for name, field in schema["properties"].items():
        inner = _object_of(field)
        if inner is not None:
            yield from _sections(f"{path}.{name}" + ("[]" if field["type"] == "array" else ""), inner, told)


def _object_of(field: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """The object with fields of its own that `field` is or is a list of."""
    inner: Mapping[str, Json] = field.get("items", field)
    return inner if "properties" in inner else None


def _type(field: Mapping[str, Json]) -> str:
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    if "x-kubernetes-int-or-string" in field:
        return "quantity"
    if field.get("format") == "date-time":
        return "time"
    return str(field["type"])


def _default(name: str, field: Mapping[str, Json], parent: Mapping[str, Json]) -> str:
    if name in parent.get("required", ()):
        return "required"
    return f"`{json.dumps(field['default'])}`" if "default" in field else ""


def _limits(field: Mapping[str, Json]) -> str:
    limits = list(_own_limits(field))
    inner = field.get("items", field.get("additionalProperties"))
    if isinstance(inner, Mapping) and "properties" not in inner:
        limits.extend(f"each: {limit}" for limit in _own_limits(inner))
    return "; ".join(limits)


def _own_limits(field: Mapping[str, Json]) -> Iterator[str]:
    if "enum" in field:
        yield ", ".join(f"`{value}`" for value in field["enum"])
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " items"),
        ("minProperties", "maxProperties", " entries"),
    ):
        if low in field and high in field:
            yield f"{field[low]} to {field[high]}{unit}"
        elif low in field:
            yield f"at least {field[low]}{unit}"
        elif high in field:
            yield f"at most {field[high]}{unit}"
    if "pattern" in field:
        yield f"`{field['pattern']}`".replace("|", "\\|")


def _rules(schema: Mapping[str, Json], prefix: str = "") -> Iterator[str]:
    """One line per rule: the field it is reported at and its message."""
    for rule in schema.get("x-kubernetes-validations", ()):
        field = f"{prefix}{rule.get('fieldPath', '')}".lstrip(".")
        yield f"- {f'`{field}`: ' if field else ''}{rule['message']}"


def _printer_columns(columns: list[Mapping[str, str]]) -> str:
    rows = [f"| {column['name']} | `{column['jsonPath']}` | {column.get('description', '')} |" for column in columns]
    return "\n".join(["## kubectl get", "", "| column | from | what it shows |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_page())
