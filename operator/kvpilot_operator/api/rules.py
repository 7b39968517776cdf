"""The CRD's CEL rules (x-kubernetes-validations), evaluated outside the API server.

The server runs them with cel-go and Kubernetes's extension libraries, this module with celpy. A rule that both are to
read alike keeps to: has, size, string, int, matches, startsWith, contains, in, the macros all, exists, exists_one, map
and filter, the conditional operator, literals, and join and find, which are defined here as Kubernetes's libraries do.
Rules about a change (oldSelf) are the server's alone: an object by itself cannot break them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import celpy
import re2  # type: ignore[import-untyped]
from celpy import celtypes
from celpy.evaluation import CELEvalError

Json = Any

_MAX_MESSAGE_BYTES = 5120
"""The longest result of a messageExpression that the server uses."""


def broken_rules(value: Json, schema: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield (field path relative to `value`, message) for each rule of this schema node that `value` breaks.

    `value` is defaulted and pruned to the schema, and of the schema's type. The path is "" or dotted with a leading
    dot. A rule that cannot be evaluated counts as broken, as it does in the server.
    """
    if "x-kubernetes-validations" in schema:
        _schemas[id(schema)] = schema
        yield from _broken(json.dumps(value, sort_keys=True), id(schema))


# A rule costs milliseconds, and the services of a fleet share most sections of their specs.
_schemas: dict[int, Mapping[str, Json]] = {}


@lru_cache(maxsize=4096)
def _broken(section: str, schema_id: int) -> tuple[tuple[str, str], ...]:
    schema = _schemas[schema_id]
    activation = {"self": _to_cel(json.loads(section), schema)}
    broken: list[tuple[str, str]] = []
    for rule in schema["x-kubernetes-validations"]:
        if _needs_old_self(rule["rule"]):
            continue
        try:
            holds = bool(_program(rule["rule"]).evaluate(activation))
        except CELEvalError as error:
            text = f"{rule['message']} (the rule could not be evaluated: {error.args[0]})"
            broken.append((rule.get("fieldPath", ""), text))
            continue
        if not holds:
            broken.append((rule.get("fieldPath", ""), _message(rule, activation)))
    return tuple(broken)


def _message(rule: Mapping[str, str], activation: Mapping[str, celtypes.Value]) -> str:
    """The rule's messageExpression, or its message when there is none or it gives no single line, as in the server."""
    if "messageExpression" not in rule:
        return rule["message"]
    try:
        text = str(_program(rule["messageExpression"]).evaluate(activation)).strip()
    except CELEvalError:
        return rule["message"]
    is_one_line = text and "\n" not in text and len(text.encode()) <= _MAX_MESSAGE_BYTES
    return text if is_one_line else rule["message"]


def _needs_old_self(rule: str) -> bool:
    return re.search(r"\boldSelf\b", rule) is not None


@cache
def _program(expression: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions={"join": _join, "find": _find})


def _join(items: celtypes.ListType, separator: celtypes.StringType) -> celtypes.StringType:
    return celtypes.StringType(str(separator).join(str(item) for item in items))


def _find(text: celtypes.StringType, pattern: celtypes.StringType) -> celtypes.StringType:
    found = re2.search(str(pattern), str(text))
    return celtypes.StringType(found[0] if found else "")


def _to_cel(value: Json, schema: Mapping[str, Json]) -> celtypes.Value:
    """`value` as CEL sees it: typed by the schema, as the server types it, so that 1.0 in an integer field is 1."""
    if isinstance(value, Mapping):
        fields = schema.get("properties", {})
        rest = schema.get("additionalProperties", {})
        return celtypes.MapType(
            {celtypes.StringType(key): _to_cel(item, fields.get(key, rest)) for key, item in value.items()}
        )
    if isinstance(value, list):
        return celtypes.ListType([_to_cel(item, schema["items"]) for item in value])
    if isinstance(value, bool):
        return celtypes.BoolType(value)
    if isinstance(value, str):
        return celtypes.StringType(value)
    return celtypes.IntType(int(value))
