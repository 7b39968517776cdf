"""Invalid QuantizedLLMServices, derived from the CRD's schema: one for each limit of each field of the spec.

A new field of the schema gets its cases automatically. Two tests use them: tests/unit/test_derived_faults.py for the
operator, and tests/cluster/test_crd_modern.py for the API server. An object for the server combines many cases, because
the server lists all faults of an object. Fields of podTemplate are Kubernetes' own and have no cases.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from support.bad_manifests import GOOD
from support.crd import root_schema

Json = Any
Path = tuple[str | int, ...]
"""Place in an object: names of fields and keys, and 0 for the first item of a list."""

_NO_LIMITS = frozenset(
    {"description", "default", "properties", "items", "additionalProperties", "anyOf", "x-kubernetes-map-type",
     "x-kubernetes-list-map-keys", "x-kubernetes-validations"}
)  # fmt: skip
_TEXTS = ("a", "/a", "1Gi", "hf://a/b", "builtin/general", "fp8", "0", "A")
_WRONG_TEXTS = ("A b!", "..", "a")


@dataclass(frozen=True)
class Wrong:
    """Test case: `value` at `path` of the spec violates `keyword` of the schema. For `required`, the field is missing.

    The error must name `field`, and its message must contain `remedy`.
    """

    path: Path
    keyword: str
    value: Json
    remedy: str
    field: str


@cache
def derived() -> tuple[Wrong, ...]:
    """Return a case for every limit of every field, without CEL rules, in the schema's order."""
    return tuple(
        case
        for path, schema in _nodes(root_schema()["properties"]["spec"], ())
        for keyword in sorted(schema.keys() - _NO_LIMITS)
        for case in _breaking(keyword, schema, path)
    )


def service_with(cases: Sequence[Wrong]) -> dict[str, Any]:
    """Return a service with the faults of these cases and no others. No path may be a prefix of another case's path."""
    obj: dict[str, Any] = copy.deepcopy(GOOD)
    for case in cases:
        here, schema = obj["spec"], root_schema()["properties"]["spec"]
        for step, following in zip(case.path, (*case.path[1:], None), strict=True):
            schema = _below(schema, step)
            if following is None and case.keyword == "required":
                here.pop(step, None)
            elif following is None:
                here[step] = copy.deepcopy(case.value)
            else:
                if isinstance(step, str) and here.get(step) in (None, []):
                    here[step] = _good(schema, filled=True)
                here = here[step]
    return obj


def together(most: int = 45) -> list[list[Wrong]]:
    """Combine cases of one keyword into manifests of at most `most` cases and about 64 KiB each."""
    groups: list[list[Wrong]] = []
    sizes: list[int] = []
    for case in derived():
        size = len(str(case.value))
        for at, group in enumerate(groups):
            if group[0].keyword != case.keyword or len(group) == most or sizes[at] + size > 64 * 1024:
                continue
            if not any(_overlap(one.path, case.path) for one in group):
                group.append(case)
                sizes[at] += size
                break
        else:
            groups.append([case])
            sizes.append(size)
    return groups


def leaves() -> list[str]:
    """Return the fields of the spec that have no subfields."""
    return [_field(path) for path, schema in _nodes(root_schema()["properties"]["spec"], ()) if not _is_parent(schema)]


def _overlap(one: Path, other: Path) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def _is_parent(schema: Mapping[str, Json]) -> bool:
    return any(schema.get(below) for below in ("properties", "items", "additionalProperties"))


def _steps(schema: Mapping[str, Json]) -> list[str | int]:
    listed = [0] if "items" in schema else []
    mapped = ["a"] if "additionalProperties" in schema else []
    return [*schema.get("properties", {}), *listed, *mapped]


def _nodes(schema: Mapping[str, Json], path: Path) -> Iterator[tuple[Path, Mapping[str, Json]]]:
    yield path, schema
    for step in _steps(schema):
        if step != "podTemplate":
            yield from _nodes(_below(schema, step), (*path, step))


def _below(schema: Mapping[str, Json], step: str | int) -> Mapping[str, Json]:
    below: Mapping[str, Json] = (
        schema["items"]
        if isinstance(step, int)
        else schema.get("properties", {}).get(step) or schema["additionalProperties"]
    )
    return below


def _breaking(keyword: str, schema: Mapping[str, Json], path: Path) -> Iterator[Wrong]:
    limit = schema[keyword]
    match keyword:
        case "type":
            if path:
                yield _wrong(path, keyword, 5 if limit == "string" else "x", f"use a value of type {limit}")
        case "x-kubernetes-int-or-string":
            yield _wrong(path, "type", True, "use an integer or a string")
        case "enum":
            yield _wrong(path, keyword, -1 if schema["type"] == "integer" else "other", ", ".join(map(str, limit)))
        case "minimum" | "maximum":
            least = keyword == "minimum"
            yield _wrong(
                path, keyword, limit - 1 if least else limit + 1, f"use at {'least' if least else 'most'} {limit}"
            )
        case "minLength":
            yield _wrong(path, keyword, "a" * (limit - 1), f"use at least {limit} characters")
        case "maxLength":
            yield _wrong(path, keyword, "a" * (limit + 1), f"use at most {limit}")
        case "pattern":
            value = next(text for text in _WRONG_TEXTS if re.search(limit, text) is None)
            yield _wrong(path, keyword, value, f"matches {limit}")
        case "minItems":
            yield _wrong(path, keyword, [_good(schema["items"])] * (limit - 1), f"use at least {limit}")
        case "maxItems":
            yield _wrong(path, keyword, [_good(schema["items"])] * (limit + 1), f"use at most {limit}")
        case "maxProperties":
            item = _good(schema["additionalProperties"])
            yield _wrong(path, keyword, {f"a{i}": item for i in range(limit + 1)}, f"use at most {limit}")
        case "required":
            for name in limit:
                yield _wrong((*path, name), keyword, None, f"set {name}")
        case "x-kubernetes-list-type":
            if limit != "atomic":
                yield Wrong(path, keyword, [_good(schema["items"])] * 2, "remove one", f"{_field(path)}[1]")
        case "format":
            if "maximum" not in schema and "enum" not in schema:
                raise ValueError(f"{_field(path)} is any {limit}: give it a maximum")
        case _:
            raise ValueError(f"{_field(path)} has {keyword}: say here what breaks it")


def _wrong(path: Path, keyword: str, value: Json, remedy: str) -> Wrong:
    return Wrong(path, keyword, value, remedy, _field(path))


def _field(path: Path, root: str = "spec") -> str:
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _good(schema: Mapping[str, Json], *, filled: bool = False) -> Json:
    """Return a value that the schema accepts; `filled` adds an item to a list or a map."""
    if "default" in schema and not filled:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object" if "additionalProperties" in schema:
            return {"a": _good(schema["additionalProperties"])} if filled else {}
        case "object":
            return {name: _good(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [_good(schema["items"])] if filled or schema.get("minItems") else []
        case "integer":
            return schema["minimum"]
        case "boolean":
            return False
        case "string":
            pattern = schema.get("pattern", "")
            return next(one for one in _TEXTS if re.search(pattern, one))
    return 1
