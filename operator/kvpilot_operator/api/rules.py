"""The CRD's CEL rules (x-kubernetes-validations), evaluated outside the API server.

The server runs them with cel-go and Kubernetes's extension libraries, this module with celpy. A rule that both are to
read alike keeps to: has, size, string, int, matches, startsWith, contains, in, the macros all, exists, exists_one, map
and filter, the conditional operator, literals, and join and find, which are defined here as Kubernetes's libraries do.
Rules about a change (oldSelf) are the server's alone: an object by itself cannot break them.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
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
    dot. A rule that cannot be evaluated counts as broken, at `value` itself, as it does in the server.
    """
    if "x-kubernetes-validations" not in schema:
        return
    section = json.dumps(value, sort_keys=True)
    about = (id(schema), hashlib.blake2b(section.encode(), digest_size=16).digest())
    if about in _held:
        _held.move_to_end(about)
        return
    broken = _broken(json.loads(section), schema)
    if not broken:
        _schemas[id(schema)] = schema
        _held[about] = None
        if len(_held) > _MAX_HELD:
            _held.popitem(last=False)
    yield from broken


_MAX_HELD = 4096
# A rule costs milliseconds, and the services of a fleet share most sections of their specs: those that break nothing
# are known by their digests, some 200 bytes each, whatever size they have.
_held: OrderedDict[tuple[int, bytes], None] = OrderedDict()
# Kept, so that an id stays one schema's.
_schemas: dict[int, Mapping[str, Json]] = {}


def _broken(value: Json, schema: Mapping[str, Json]) -> list[tuple[str, str]]:
    activation = {"self": _to_cel(value, schema)}
    broken: list[tuple[str, str]] = []
    for rule in schema["x-kubernetes-validations"]:
        if re.search(r"\boldSelf\b", rule["rule"]):
            continue
        try:
            holds = bool(_program(rule["rule"]).evaluate(activation))
        except CELEvalError as error:
            text = f"{rule['message']} (the rule could not be evaluated: {error.args[0]})"
            broken.append(("", text))
            continue
        if not holds:
            broken.append((rule.get("fieldPath", ""), _message(rule, activation)))
    return broken


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
