"""Generate the CustomResourceDefinition from the operator's structs (`make generate`).

`kvpilot_operator.api.spec` and `kvpilot_operator.state.status` define types, defaults, limits, descriptions and rules.
`kvpilot_operator.api.pod_template` defines the allowed fields of a Pod's template.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import kubernetes.client
import msgspec
import yaml
from msgspec import Meta

from kvpilot_operator.api.pod_template import ALLOWED, KEYS, LIMITS, POD_TEMPLATE
from kvpilot_operator.api.pod_template import RULES as POD_RULES
from kvpilot_operator.api.record import RULES, Record, Rule
from kvpilot_operator.api.spec import RULES_OF_SERVICE, Spec
from kvpilot_operator.state.status import Status

Json = dict[str, Any]


def _of(condition: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].{part}'


COLUMNS = (
    ("Ready", "string", _of("Ready", "status"), "True if the service matches its newest spec."),
    ("Serving", "string", _of("Serving", "status"), "True if requests are answered."),
    ("Reason", "string", _of("Ready", "reason"), "Reason of Ready."),
    ("DType", "string", ".status.kvCache.activeDtype", "KV cache dtype that serves traffic."),
    ("Mode", "string", ".spec.kvCache.mode", "Party that chooses the dtype."),
    ("Canary", "string", ".status.canary.dtype", "KV cache dtype that is on trial."),
    ("KV%", "integer", ".status.kvCache.usagePercent", "Use of the serving replicas' KV cache, in percent."),
    ("Load", "string", _of("MemoryPressured", "reason"), "Resource that limits the engines, judged by their metrics."),
    ("Accuracy", "string", _of("AccuracyVerified", "reason"), "Result of the last check of the dtype's answers."),
    ("Replicas", "integer", ".status.replicas", "Target number of replicas, serving or on trial."),
    ("Recommended", "string", ".status.kvCache.recommendedDtype", "KV cache dtype that kvpilot recommends."),
    ("Answering", "integer", ".status.readyReplicas", "Engine pods that answer."),
    ("Tokens", "integer", ".status.kvCache.capacityTokens", "KV cache capacity, in tokens, of all replicas."),
    ("Trial", "string", _of("CanaryHealthy", "reason"), "State of the trial, or result of the last one."),
    ("Revision", "string", ".status.stable.revision", "Revision that serves traffic."),
    ("URL", "string", ".status.url", "Address of the service within the cluster."),
    ("Message", "string", _of("Ready", "message"), "Explanation of Ready, in words and numbers."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the object was created."),
)
"""Columns of `kubectl get`: name, type, path and description."""
WIDE = ("Recommended", "Answering", "Tokens", "Trial", "Revision", "URL", "Message")
"""Columns that only `kubectl get -o wide` shows."""


def definition() -> Json:
    """Return the whole definition."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path, "description": text} | ({"priority": 1} if name in WIDE else {})
        for name, kind, path, text in COLUMNS
    ]
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": root_schema()},
    }
    names = {"kind": "QuantizedLLMService", "listKind": "QuantizedLLMServiceList", "plural": "quantizedllmservices",
             "singular": "quantizedllmservice", "shortNames": ["qllm"], "categories": ["kvpilot"]}  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "quantizedllmservices.kvpilot.io"},
        "spec": {"group": "kvpilot.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }


def root_schema() -> Json:
    """Return the schema of a whole QuantizedLLMService."""
    name = "Name of this object and of the Service that answers requests; at most 40 characters."
    return {
        "description": (
            "An LLM served by vLLM whose KV cache kvpilot makes smaller when memory is what limits it, and only as far "
            "as measured accuracy and latency allow."
        ),
        "type": "object",
        "required": ["spec"],
        **_validations(RULES_OF_SERVICE),
        "properties": {
            "apiVersion": {"description": "Version of this API, kvpilot.io/v1alpha1.", "type": "string"},
            "kind": {"description": "QuantizedLLMService.", "type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"description": name, "type": "string"}}},
            "spec": {"description": description(Spec), **_object(Spec, True)},
            "status": {"description": description(Status), **_object(Status, False)},
        },
    }


def description(kind: Any) -> str:
    """Return a type's description: that of its annotation, else the docstring of its struct or of its items' struct."""
    if isinstance(kind, Meta):
        return kind.description or ""
    if isinstance(kind, type) and issubclass(kind, Record):
        return " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return next((text for one in get_args(kind) if (text := description(one))), "")


@cache
def texts(kind: type) -> Mapping[str, str]:
    """Return the docstrings of the fields of a struct and its bases, or of the members of an enum, by name."""
    found = {}
    for base in reversed([one for one in kind.__mro__ if one.__module__.startswith("kvpilot_") and one is not Record]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = " ".join(words.split())
    return found


def _object(record: type[Record], defaults: bool) -> Json:
    """Return the schema of a struct, without a description; `defaults` is True if the server fills in defaults."""
    fields = msgspec.structs.fields(record)
    properties = {}
    for one in fields:
        text = texts(record).get(one.name) or description(one.type)
        made = properties[one.encode_name] = {"description": text, **_schema(one.type, Meta(), defaults)}
        default = one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
        if defaults and default not in (None, "", msgspec.NODEFAULT):
            made["default"] = msgspec.to_builtins(default)
    required = [one.encode_name for one in fields if one.required]
    given = {"required": required} if required else {}
    return {"type": "object", **given, **_validations(RULES.get(record, ())), "properties": properties}


def _schema(kind: Any, limits: Meta, defaults: bool) -> Json:
    """Return the schema of a type within these limits."""
    extra = dict(limits.extra or {})
    if limits is POD_TEMPLATE:
        return _model(kubernetes.client.V1PodTemplateSpec, "")
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _schema(inner[0], inner[1], defaults)
    if origin in (Union, types.UnionType):
        given = [_schema(one, limits, defaults) for one in inner if one is not type(None)]
        if len(given) == 1:
            return given[0]
        limited = {name: limit for one in reversed(given) for name, limit in one.items()}
        return _TEXT_OR_NUMBER | {name: limit for name, limit in limited.items() if name not in ("type", "format")}
    if isinstance(kind, type) and issubclass(kind, Record):
        made = _object(kind, defaults)
    elif origin is tuple:
        made = {"type": "array", **_given(minItems=limits.min_length, maxItems=limits.max_length)}
        made |= {"x-kubernetes-list-type": "atomic", "items": _schema(inner[0], Meta(), defaults)}
    elif origin is dict:
        made = {"type": "object", **_given(maxProperties=limits.max_length)}
        made |= {"additionalProperties": _schema(inner[1], Meta(), defaults)}
    else:
        made = _scalar(kind, limits)
    return made | {key: value for key, value in extra.items() if key != "rules"} | _validations(extra.get("rules", ()))


def _scalar(kind: Any, limits: Meta) -> Json:
    if get_origin(kind) is Literal:
        values = list(get_args(kind))
        return {"type": "string" if isinstance(values[0], str) else "integer", "enum": values}
    if kind is str:
        lengths = {"minLength": limits.min_length, "maxLength": limits.max_length}
        return {"type": "string", **_given(**lengths, pattern=limits.pattern)}
    if kind is int:
        width = "int32" if limits.le is not None and limits.le < 2**31 else "int64"
        return {"type": "integer", "format": width, **_given(minimum=limits.ge, maximum=limits.le)}
    if kind is bool:
        return {"type": "boolean"}
    if kind is datetime:
        return {"type": "string", "format": "date-time"}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [one.value for one in kind]}
    raise TypeError(f"{kind} has no schema: add one to scripts/crd.py")


def _model(model: Any, path: str) -> Json:
    """Return the schema of a model of Kubernetes' client; `path` is its place in the template."""
    name = model.__name__
    names = model.attribute_map
    written = {one: info.serialization_alias or names[one] for one, info in model.model_fields.items()}
    fields = {
        written[attribute]: info
        for attribute, info in model.model_fields.items()
        if written[attribute] in ALLOWED.get(name, written.values())
    }
    # `containers` is optional here, because kvpilot always adds its own container.
    required = [field for field, info in fields.items() if info.is_required() and f"{name}.{field}" != _ENGINES]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        **_validations(POD_RULES.get(path, ())),
        "properties": {
            field: _of_client(info.annotation, f"{path}.{field}") | LIMITS.get(f"{name}.{field}", {})
            for field, info in fields.items()
        },
    }


def _of_client(kind: Any, path: str) -> Json:
    """Return the schema of a type in a model of Kubernetes' client."""
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not type(None)]
    if origin is Annotated or (origin is Union and len(inner) == 1):
        return _of_client(inner[0], path)
    if origin is Union:
        return _TEXT_OR_NUMBER | {"maxLength": 64}
    if origin is list:
        field = path.rpartition(".")[2]
        keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [KEYS[field]]} if field in KEYS else {}
        made = {"type": "array", "maxItems": MOST_ITEMS, "x-kubernetes-list-type": "atomic", **keys}
        return made | {"items": _of_client(inner[0], f"{path}[]")}
    if origin is dict:
        return {"type": "object", "maxProperties": MOST_ITEMS, "additionalProperties": _TEXT}
    scalars: dict[Any, Json] = {str: _TEXT, int: {"type": "integer", "format": "int64"}, bool: {"type": "boolean"}}
    return scalars[kind] if kind in scalars else _model(kind, path)


_ENGINES = "V1PodSpec.containers"
MOST_ITEMS = 16
"""Most items of a list and keys of a map. The API server uses it to estimate the cost of CEL rules."""
_TEXT: Json = {"type": "string", "maxLength": 4096}
_TEXT_OR_NUMBER: Json = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}


def _given(**limits: Any) -> Json:
    return {name: limit for name, limit in limits.items() if limit is not None}


def _validations(rules: Iterable[Rule]) -> Json:
    written = [rule.as_written() for rule in rules]
    return {"x-kubernetes-validations": written} if written else {}


class _Plain(yaml.SafeDumper):
    """YAML dumper without aliases: it writes a shared value twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


FILE = "kvpilot.io_quantizedllmservices.yaml"
_HEADER = (
    "# Generated from the structs of operator/kvpilot_operator by `make generate`: edit api/ and state/status.py.\n"
)


def judged() -> Json:
    """Return the schema by which `kvpilot validate` checks an object, without the status and without descriptions."""
    schema: Json = _bare(definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    kept = {name: schema["properties"][name] for name in ("metadata", "spec")}
    return {**schema, "properties": kept}


def _bare(node: Any, *, names: bool = False) -> Any:
    """Return a schema without descriptions; `names` is True for a map of fields by name."""
    if isinstance(node, dict):
        kept = {key: value for key, value in node.items() if names or key != "description"}
        return {key: _bare(value, names=not names and key == "properties") for key, value in kept.items()}
    return [_bare(one) for one in node] if isinstance(node, list) else node


def text() -> str:
    """Return the definition as YAML."""
    dumped: str = yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)
    return _HEADER + dumped
