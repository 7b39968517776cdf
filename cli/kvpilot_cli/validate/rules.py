"""Validate a QuantizedLLMService as an API server does, but without one: schema, list types and all CEL rules.

tests/cluster/test_crd_modern.py runs the same manifests against the real server.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import celpy
import jsonschema
import re2  # type: ignore[import-untyped]
from celpy import celtypes
from celpy.evaluation import CELEvalError

from kvpilot_cli.validate.schema import apply_defaults, root_schema

Json = Any


def schema_faults(obj: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (field, message) of each value of a wrong type, beyond a limit, missing or repeated."""
    value = _judged(obj)
    found = [(_path(error), _said(error)) for error in _validator().iter_errors(value)]
    return [*found, *_twice(value, root_schema(), "")]


def rule_faults(obj: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Return (field, message) of each CEL rule that is broken, in an object that the schema accepts."""
    return [(field.lstrip("."), message) for field, message in broken_rules(_judged(obj), root_schema(), "")]


def _judged(obj: Mapping[str, Json]) -> dict[str, Json]:
    stored = apply_defaults(obj)
    return {name: stored[name] for name in ("metadata", "spec") if stored.get(name) is not None}


def broken_rules(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[tuple[str, str]]:
    """Yield (field, message) of each rule that a value, or a part of it, breaks."""
    rules = schema.get("x-kubernetes-validations", ())
    seen = {"self": _typed(value, schema)} if rules else {}
    for rule in rules:
        try:
            holds = bool(_program(rule["rule"]).evaluate(seen))
        except CELEvalError:
            holds = False
        if not holds:
            shown = rule.get("messageExpression")
            text = str(_program(shown).evaluate(seen)) if shown else rule["message"]
            yield f"{path}{rule.get('fieldPath', '')}", text
    for item, below, at in _children(value, schema, path):
        yield from broken_rules(item, below, at)


def _path(error: Json) -> str:
    steps = [*error.absolute_path]
    if error.validator == "required":
        steps.append(error.message.split("'")[1])
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in steps).lstrip(".")


def _said(error: Json) -> str:
    """Return the error's message without the value at fault, which may be a secret."""
    kind, limit = error.validator, error.validator_value
    if kind == "required":
        return f"is missing: set {error.message.split(chr(39))[1]}"
    if kind == "enum":
        return f"is unknown: use one of {', '.join(map(str, limit))}"
    if kind == "anyOf":
        return "has the wrong type: use a whole number or text"
    return (
        f"has the wrong type: use {_TYPES.get(limit, limit)}"
        if kind == "type"
        else _LIMITS.get(kind, "breaks {} of the schema").format(limit)
    )


_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "object": "a map",
    "string": "text",
}
_LIMITS = {
    "minimum": "is too small: use at least {}",
    "maximum": "is too large: use at most {}",
    "minLength": "is too short: use at least {} characters",
    "maxLength": "is too long: use at most {} characters",
    "minItems": "has too few items: use at least {}",
    "maxItems": "has too many items: use at most {}",
    "maxProperties": "has too many fields: use at most {}",
    "pattern": "has the wrong form: use what {} matches",
}


@cache
def _validator() -> Json:
    def pattern(_: Json, regex: str, value: Json, __: Json) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, str) and re2.search(regex, value) is None:
            yield jsonschema.ValidationError(f"does not match {regex}")

    made = jsonschema.validators.extend(jsonschema.Draft202012Validator, validators={"pattern": pattern})
    return made(root_schema())


def _children(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[tuple[Json, Mapping[str, Json], str]]:
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            if key in fields or rest is not None:
                yield item, fields.get(key, rest), f"{path}.{key}"
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield item, schema["items"], f"{path}[{index}]"


def _twice(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, list) and schema.get("x-kubernetes-list-type") in ("set", "map"):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen: list[Json] = []
        for index, item in enumerate(value):
            identity = [item.get(key) for key in keys] if keys and isinstance(item, Mapping) else [item]
            if identity in seen:
                yield f"{path}[{index}]".lstrip("."), "is a duplicate"
            seen.append(identity)
    for item, below, at in _children(value, schema, path):
        yield from _twice(item, below, at)


@cache
def _program(expression: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions={"join": _join, "find": _find})


def _join(items: celtypes.ListType, separator: celtypes.StringType) -> celtypes.StringType:
    return celtypes.StringType(str(separator).join(str(item) for item in items))


def _find(text: celtypes.StringType, pattern: celtypes.StringType) -> celtypes.StringType:
    found = re2.search(str(pattern), str(text))
    return celtypes.StringType(found[0] if found else "")


def _typed(value: Json, schema: Mapping[str, Json]) -> celtypes.Value:
    """Convert a value to the types that CEL has for it."""
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        return celtypes.MapType(
            {celtypes.StringType(key): _typed(item, fields.get(key, rest)) for key, item in value.items()}
        )
    if isinstance(value, list):
        return celtypes.ListType([_typed(item, schema["items"]) for item in value])
    if isinstance(value, bool):
        return celtypes.BoolType(value)
    return celtypes.StringType(value) if isinstance(value, str) else celtypes.IntType(int(value))
