"""What the CRD says about an object: its defaults and its faults, by the CRD file itself.

The API server does both for every object that it stores, but a server older than Kubernetes 1.29 does not know the
CEL rules, and objects may be older than today's CRD. So the operator asks again, of the same file, and the tests hold
that the two answers agree. Order, as in the server: prune what the schema does not know, fill defaults, check the
schema and list types, and then, unless a value has the wrong shape, the rules.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jsonschema
import re2  # type: ignore[import-untyped]
import yaml

from kvpilot_formats.untrusted import shown
from kvpilot_operator.api import engine_arguments, host_access
from kvpilot_operator.api.rules import broken_rules

Json = Any
"""A value as a JSON decoder returns it."""

CRD_FILE = "kvpilot.io_quantizedllmservices.yaml"

_SHAPE_KEYWORDS = frozenset({"type", "required", "enum", "anyOf", "maxLength", "maxItems", "maxProperties"})
"""Faults that keep the server from evaluating rules: a rule may rely on these."""

_PRIVATE = re.compile(
    r"\bengine\.(extraArgs|(?:podTemplate\..*)?(?:env\[\d+\]\.value|command|args|volumeAttributes))\b"
)
"""Fields whose values may be keys and tokens. Messages go into the status, events and logs, and do without them."""

_BEFORE_QUERY = "^([^?]*://[^?]*|[^?]*([?]([^=]*$)?)?)"
"""All of a text, or of an address what comes before `?`. One without a scheme is known by the `=` in its query."""

_OPTION = re.compile(r"-[^=:\s]*")

MAX_SPEC_BYTES = 128 * 1024
"""The largest spec, as JSON, that is judged and kept: real ones have some KiB. Any field alone may be as long as the
CRD says, all together may not, for the operator keeps every spec of the fleet in memory."""

MAX_FAULTS = 100
"""Faults that are listed of one object."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with an object: where (spec.a.b[0]), and what to do about it."""

    field: str
    message: str


@lru_cache(maxsize=1)
def load_crd() -> Mapping[str, Json]:
    """The CustomResourceDefinition, from the installed package or else from the checkout."""
    packaged = resources.files("kvpilot_operator").joinpath("crds", CRD_FILE)
    checkout = Path(__file__).parents[3] / "crds" / CRD_FILE
    text = packaged.read_text() if packaged.is_file() else checkout.read_text()
    # libyaml, where PyYAML was built with it, reads it in 0.04 s and not in 0.3.
    crd: Mapping[str, Json] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (safe as well)
    return crd


def root_schema() -> Mapping[str, Json]:
    """The structural schema of the one served version."""
    schema: Mapping[str, Json] = load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def apply_defaults(obj: Mapping[str, Json]) -> dict[str, Json]:
    """A copy of `obj` with the CRD's defaults filled in, as the server stores it.

    Fields under spec and status that the CRD does not know are dropped; null counts as absent. Values of a wrong type
    stay wrong, so `faults` still finds them. Any JSON object is accepted.
    """
    schema = root_schema()
    kept = {key: value for key, value in obj.items() if key not in ("spec", "status")}
    for part in ("spec", "status"):
        if obj.get(part) is not None:
            kept[part] = _structural(obj[part], schema["properties"][part])
    return kept


def faults(obj: Json, allowed: Collection[str] = ()) -> tuple[Fault, ...]:
    """What the API server would refuse about metadata.name and spec, in the schema's order; () if nothing.

    Where that is nothing, engine_arguments' faults, and access to nodes that is not among `allowed` (of
    host_access.KINDS).
    The first MAX_FAULTS, or one alone for a spec of more than MAX_SPEC_BYTES. `obj` is the whole object, defaulted or
    not. Takes any JSON value and never raises. status is not looked at. What it costs is bounded: of a list or map only
    as many items are looked at as the schema allows, and one more.
    """
    if not isinstance(obj, Mapping):
        return (Fault("", "the object is not a JSON object: use a QuantizedLLMService manifest"),)
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    subject: dict[str, Json] = {"metadata": {"name": _text(name) if isinstance(name, str) else ""}}
    if obj.get("spec") is not None:
        subject["spec"] = _structural(obj["spec"], root_schema()["properties"]["spec"])
    size = len(json.dumps(subject, ensure_ascii=False).encode())
    if size > MAX_SPEC_BYTES:
        return (
            Fault("spec", f"is {size} bytes of JSON: use at most {MAX_SPEC_BYTES}, shorten engine.env most of all"),
        )
    found = _faults(subject, root_schema(), "")
    if found:
        return found
    template = subject["spec"]["engine"].get("podTemplate", {})
    reaching = (Fault(f"spec.engine.podTemplate{at}", text) for at, text in host_access.refused(template, allowed))
    wrong = (Fault(f"spec{at}", text) for at, text in engine_arguments.refused(subject["spec"]))
    return tuple(islice(chain(wrong, reaching), MAX_FAULTS))


def status_faults(status: Json) -> tuple[Fault, ...]:
    """Everything that the API server would refuse about a status. Takes any JSON value and never raises."""
    schema = root_schema()["properties"]["status"]
    return _faults(_structural(status, schema), schema, "status")


def _faults(value: Json, schema: Mapping[str, Json], path: str) -> tuple[Fault, ...]:
    errors = list(_validator_class()(schema).iter_errors(value))
    found = [_explain(error, path) for error in errors[:MAX_FAULTS]]
    found.extend(_duplicates(value, schema, path))
    if not any(error.validator in _SHAPE_KEYWORDS for error in errors):
        found.extend(_broken(value, schema, path))
    return tuple(found[:MAX_FAULTS])


def _structural(value: Json, schema: Mapping[str, Json]) -> Json:
    """A pruned, defaulted copy, no deeper than the schema: what has the wrong shape is kept as an empty one.

    Of a list or map with more items than the schema allows one too many is kept: enough to be refused.
    """
    if isinstance(value, Mapping):
        if schema.get("type") != "object":
            return {}
        return _structural_object(value, schema)
    if isinstance(value, list):
        if schema.get("type") != "array":
            return []
        return [_structural(item, schema["items"]) for item in value[: schema["maxItems"] + 1]]
    return _text(value) if isinstance(value, str) else value


def _structural_object(value: Mapping[str, Json], schema: Mapping[str, Json]) -> dict[str, Json]:
    copy: dict[str, Json] = {}
    if "additionalProperties" in schema:
        return {
            _text(key): _structural(item, schema["additionalProperties"])
            for key, item in islice(((k, v) for k, v in value.items() if v is not None), schema["maxProperties"] + 1)
        }
    for name, field in schema.get("properties", {}).items():
        given = value.get(name)
        if given is None:
            given = field.get("default")
        if given is not None:
            copy[name] = _structural(given, field)
    return copy


def _text(value: str) -> str:
    """JSON can escape half a surrogate pair, which no UTF-8 can hold; the server reads U+FFFD, and so do we."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@lru_cache(maxsize=1)
def _validator_class() -> type[Any]:
    """Draft 2020-12 with what Kubernetes does otherwise: RE2 patterns, 64-bit integers, int-or-string."""

    def pattern(_: Json, regex: str, value: Json, __: Json) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, str) and re2.search(regex, value) is None:
            yield jsonschema.ValidationError(f"does not match {regex}")

    def is_int64(checker: Json, value: Json) -> bool:
        whole: bool = jsonschema.Draft202012Validator.TYPE_CHECKER.is_type(value, "integer")
        return whole and -(2**63) <= value < 2**63

    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_int64)
    extended: type[Any] = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, validators={"pattern": pattern}, type_checker=checker
    )
    return extended


def _explain(error: Json, path: str) -> Fault:
    """A schema error in the words that a user needs: the value, what is wrong with it, and what to do."""
    field = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    value, limit, keyword = error.instance, error.validator_value, error.validator
    if keyword == "required":
        missing = error.message.split("'")[1]
        return Fault(f"{field}.{missing}".lstrip("."), f"is missing: set {missing}")
    shown = _shown(value, field)
    text = {
        "type": f"is {shown}: use a value of type {limit}",
        "anyOf": f"is {shown}: use an integer or a string",
        "enum": f"is {shown}: use one of {', '.join(map(str, limit)) if isinstance(limit, list) else limit}",
        "minimum": f"is {shown}: use at least {limit}",
        "maximum": f"is {shown}: use at most {limit}",
        "minLength": f"is {shown}: use at least {limit} characters",
        "maxLength": f"is {shown} of {_length(value)} characters: use at most {limit}",
        "minItems": f"has {_length(value)} items: use at least {limit}",
        "maxItems": f"has more than {limit} items: use at most {limit}",
        "maxProperties": f"has more than {limit} entries: use at most {limit}",
        "pattern": f"is {shown}: use a value that matches {limit}",
    }[keyword]
    return Fault(field.lstrip("."), text)


def _shown(value: Json, field: str) -> str:
    """A value in words: of a private one the option's name at most, of an address neither query nor credentials."""
    if _PRIVATE.search(field):
        option = _OPTION.match(value) if isinstance(value, str) else None
        return f"'{option[0]}...'" if option else "a value that is not shown"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(shown(_without_query(value)) if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def _without_query(value: str) -> str:
    """Return an address without its query, which may hold a signature."""
    return str(re2.search(_BEFORE_QUERY, value)[0])


def _length(value: Json) -> int:
    return len(value) if isinstance(value, (str, list, Mapping)) else 0


def _children(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[tuple[Json, Mapping[str, Json], str]]:
    if isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            if key in fields or rest is not None:
                yield item, fields.get(key, rest), f"{path}.{key}".lstrip(".")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield item, schema["items"], f"{path}[{index}]"


def _duplicates(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[Fault]:
    """Items that a list of type set or map holds twice."""
    kind = schema.get("x-kubernetes-list-type")
    if isinstance(value, list) and kind in ("set", "map"):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen: list[Json] = []
        for index, item in enumerate(value):
            identity = [item.get(key) for key in keys] if kind == "map" and isinstance(item, Mapping) else [item]
            if identity in seen:
                shown = ", ".join(_shown(part, path) for part in identity)
                yield Fault(f"{path}[{index}]", f"is a duplicate of {shown}: remove one of them")
            seen.append(identity)
    for item, child, at in _children(value, schema, path):
        yield from _duplicates(item, child, at)


def _broken(value: Json, schema: Mapping[str, Json], path: str) -> Iterator[Fault]:
    """The rules that `value` or anything in it breaks."""
    for relative, message in broken_rules(value, schema):
        at_fault = _at(value, relative)
        field = f"{path}{relative}"
        if isinstance(at_fault, (str, int)) and not _PRIVATE.search(field) and not _names(message, at_fault):
            message = f"is {_shown(at_fault, field)}: {message}"
        yield Fault(field.lstrip("."), message)
    for item, child, at in _children(value, schema, path):
        yield from _broken(item, child, at)


def _names(message: str, value: str | int) -> bool:
    """Return True if the message has the value already."""
    return (_without_query(value) if isinstance(value, str) else str(value)) in message


def _at(value: Json, relative: str) -> Json:
    for name in filter(None, relative.split(".")):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
