"""Write the API reference (`make generate`): `python scripts/api_reference.py FOLDER`.

Each object of the spec has a page, and so have podTemplate and the status. quantizedllmservice.md links to all pages.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import crd

Json = Any

INDEX = "quantizedllmservice.md"
_HEADER = "<!-- Generated from the structs of the operator by `make generate`: edit those, not this page. -->\n"
_INTRO = """\
# QuantizedLLMService

{description}

API `{group}/{version}`, short name `{short}`, category `{category}`, scope {scope}; `/status` and `/scale` are served.
`kubectl explain {plural}.spec --recursive` shows the same fields.

The API server judges an object by types, limits and rules when it is written. The operator judges what takes more than
the object itself, and reports it in the condition `Stalled`: arguments of the engine, and access to nodes.
"""
_POD_TEMPLATE = """\
# spec.engine.podTemplate

{description}

Fields have the names and meanings that they have in a Pod. Lists hold at most {items} items.

{fields}
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    definition = crd.definition()["spec"]
    root = crd.root_schema()
    spec, status = (root["properties"][part] for part in ("spec", "status"))
    engine = spec["properties"]["engine"]["properties"]
    template = engine.pop("podTemplate")
    engine["podTemplate"] = {**template, "properties": None}
    objects = {name: field for name, field in spec["properties"].items() if _object_of(field)}
    found = {f"{_slug(name)}.md": [*_sections(f"spec.{name}", field, 1)] for name, field in objects.items()}
    found["pod-template.md"] = [_pod_template(template)]
    found["status.md"] = [*_sections("status", status, 1)]
    found[INDEX] = [_intro(definition, root), *_index(spec, objects), _printer_columns(definition["versions"][0])]
    return {name: "\n".join([_HEADER, *sections]) for name, sections in found.items()}


def _slug(name: str) -> str:
    """Return the name of a field's page, such as kv-cache."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "-", name).lower()


def _intro(definition: Mapping[str, Json], root: Mapping[str, Json]) -> str:
    names = definition["names"]
    return _INTRO.format(
        description=root["description"],
        group=definition["group"],
        version=definition["versions"][0]["name"],
        plural=names["plural"],
        short=names["shortNames"][0],
        category=names["categories"][0],
        scope=definition["scope"].lower(),
    )


def _index(spec: Mapping[str, Json], objects: Mapping[str, Json]) -> Iterator[str]:
    rows = []
    for name, field in spec["properties"].items():
        shown = f"[`{name}`]({_slug(name)}.md)" if name in objects else f"`{name}`"
        rows.append(f"| {shown} | {_type(field)} | {_default(name, field, spec)} | {_limits(field)} | {_text(field)} |")
    yield "\n".join(["## spec", "", _text(spec), "", *_HEAD, *rows, ""])
    template, status = "[engine.podTemplate](pod-template.md)", "[status](status.md)"
    yield f"{template} has the fields that Kubernetes has a shape for. The operator answers in the {status}.\n"
    rules = [*_rules(crd.root_schema()), *_rules(spec, "spec")]
    yield "\n".join(["Rules:", "", *rules, ""])


def _pod_template(schema: Mapping[str, Json]) -> str:
    """Return the page of podTemplate: its fields by their names, and its rules."""
    fields: list[str] = []
    rules: list[str] = []

    def walk(path: str, node: Mapping[str, Json], depth: int) -> None:
        rules.extend(_rules(node, path))
        inner = _object_of(node) or {}
        for name, child in inner.get("properties", {}).items():
            if depth < _SHOWN_DEPTH:
                fields.append(f"{'  ' * depth}* `{name}`: {_type(child)}")
            walk(f"{path}.{name}" + ("[]" if child.get("type") == "array" else ""), child, depth + 1)
        if inner is not node:
            rules.extend(_rules(inner, path))

    walk("", schema, 0)
    page = _POD_TEMPLATE.format(description=_text(schema), items=crd.MOST_ITEMS, fields="\n".join(fields))
    return "\n".join([page, "Rules:", "", *rules, ""])


_SHOWN_DEPTH = 3
_HEAD = ("| field | type | default | limits | what it does |", "|---|---|---|---|---|")


def _text(field: Mapping[str, Json]) -> str:
    text: str = field.get("description", "")
    return text


def _sections(path: str, schema: Mapping[str, Json], level: int) -> Iterator[str]:
    """Yield the section of one object and those of the objects in it, depth first."""
    rows = [
        f"| `{name}` | {_type(field)} | {_default(name, field, schema)} | {_limits(field)} | {_text(field)} |"
        for name, field in schema["properties"].items()
    ]
    table = [*_HEAD, *rows, ""]
    rules = list(_rules(schema))
    for name, field in schema["properties"].items():
        rules.extend(rule for rule in _rules(field, name) if not _object_of(field) or field["type"] == "array")
        rules.extend(_rules(field.get("items", {}), f"{name}[]") if not _object_of(field) else ())
    if rules:
        table.extend(["Rules:", "", *rules, ""])
    yield "\n".join([f"{'#' * level} {path}", "", schema.get("description", f"One item of `{path}`."), "", *table])
    for name, field in schema["properties"].items():
        inner = _object_of(field)
        if inner is not None:
            yield from _sections(f"{path}.{name}" + ("[]" if field["type"] == "array" else ""), inner, 2)


def _object_of(field: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """Return the schema of the object in `field`, or in the items of that list. Return None for any other field."""
    inner: Mapping[str, Json] = field.get("items", field)
    return inner if inner.get("properties") else None


def _type(field: Mapping[str, Json]) -> str:
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    if "x-kubernetes-int-or-string" in field:
        return "integer or percent" if "%" in field.get("pattern", "") else "quantity"
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
    """Yield a line for each rule: its message, and the field at which it is reported."""
    for rule in schema.get("x-kubernetes-validations", ()):
        field = f"{prefix}{rule.get('fieldPath', '')}".lstrip(".")
        yield f"- {f'`{field}`: ' if field else ''}{rule['message']}"


def _printer_columns(version: Mapping[str, Json]) -> str:
    columns = version["additionalPrinterColumns"]
    rows = [f"| {column['name']} | `{column['jsonPath']}` | {column['description']} |" for column in columns]
    return "\n".join(["## kubectl get", "", "| column | from | what it shows |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = pages()
    for page in folder.glob("*.md"):
        if page.name not in made:
            page.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)
