"""The CRD keeps the promises that an API makes: bounded, described, without floats, one list of dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

import celpy
import pytest

from kvpilot_formats import dtypes, formats
from kvpilot_operator.api.schema import faults, load_crd, root_schema

VERSION = load_crd()["spec"]["versions"][0]
SPEC = root_schema()["properties"]["spec"]
KNOWN_KEYWORDS = {
    "additionalProperties",
    "anyOf",
    "default",
    "description",
    "enum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-map-type",
    "x-kubernetes-validations",
}
CEL_RESERVED = {
    "as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop",
    "namespace", "null", "package", "return", "true", "var", "void", "while",
}  # fmt: skip


def nodes(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


ALL = [*nodes(SPEC, "spec"), *nodes(root_schema()["properties"]["status"], "status")]
RULES = [(path, rule) for path, node in nodes(root_schema(), "") for rule in node.get("x-kubernetes-validations", ())]


@pytest.mark.parametrize(("path", "node"), ALL, ids=[path for path, _ in ALL])
def test_every_field_is_bounded_and_described(path: str, node: Mapping[str, Any]) -> None:
    assert set(node) <= KNOWN_KEYWORDS
    kind = node.get("type")
    assert kind in ("object", "array", "string", "integer", "boolean") or "x-kubernetes-int-or-string" in node
    if kind == "string":
        assert "maxLength" in node or "enum" in node or node.get("format") == "date-time"
    if kind == "array":
        assert "maxItems" in node
        assert node["x-kubernetes-list-type"] in ("atomic", "set", "map")
    if kind == "integer" and path.startswith("spec") and "enum" not in node:
        assert node["minimum"] <= node.get("default", node["minimum"]) <= node["maximum"]
    if "additionalProperties" in node:
        assert "maxProperties" in node
    if not path.endswith(("[]", "{}")):
        assert node["description"].endswith(".")
    for name in node.get("properties", {}):
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        # An HTTPRoute's parents have it, and no rule reads it.
        assert name not in CEL_RESERVED or path == "spec.route.parentRefs[]"


def test_every_optional_field_of_the_spec_has_a_default_or_means_something_when_absent() -> None:
    absent_means_something = {
        "spec.model.revision", "spec.model.servedName", "spec.model.tokenSecretRef", "spec.model.maxModelLen",
        "spec.engine.runtimeClassName", "spec.engine.priorityClassName", "spec.engine.serviceAccountName",
        "spec.cache.weightsClaimName", "spec.cache.compileClaimName", "spec.cache.weights",
        "spec.cache.weights.storageClassName", "spec.kvCache.dtype",
        "spec.kvCache.recentTokens", "spec.kvCache.offload", "spec.kvCache.retention",
        "spec.kvCache.offload.disk", "spec.kvCache.offload.disk.storageClassName",
        "spec.kvCache.offload.disk.claimName", "spec.kvCache.retention.sinkTokens",
        "spec.kvCache.retention.windowTokens", "spec.kvCache.retention.budgetTokens",
        "spec.engine.resources.requests", "spec.engine.resources.limits", "spec.canary.routeRef",
        "spec.engine.podTemplate", "spec.inferencePool", "spec.inferencePool.endpointPickerRef",
        "spec.inferencePool.canaryEndpointPickerRef", "spec.route",
    }  # fmt: skip
    without = {
        f"{path}.{name}"
        for path, node in ALL
        if path.startswith("spec")
        and "[]" not in path
        and "Ref" not in path
        # A Pod's own fields, which mean what they mean in a Pod.
        and not path.startswith("spec.engine.podTemplate")
        for name, child in node.get("properties", {}).items()
        if "default" not in child and name not in node.get("required", ())
    }
    assert without == absent_means_something


@pytest.mark.parametrize(
    ("path", "rule"), RULES, ids=[f"{path or 'root'}: {rule['rule'][:60]}" for path, rule in RULES]
)
def test_every_rule_compiles_and_has_a_message_with_a_remedy(path: str, rule: Mapping[str, str]) -> None:
    environment = celpy.Environment()
    environment.compile(rule["rule"])
    environment.compile(rule.get("messageExpression", "''"))
    assert "\n" not in rule["message"]
    assert re.search(r"\b(use|set|remove|lower|raise|order|write|start with|put)\b", rule["message"]), (
        f"no remedy in {rule['message']}"
    )


def test_dtypes_are_exactly_those_of_the_formats_module() -> None:
    kv_cache = SPEC["properties"]["kvCache"]["properties"]
    assert set(kv_cache["dtype"]["enum"]) == set(dtypes.names())
    assert kv_cache["ladder"]["items"]["enum"] == kv_cache["dtype"]["enum"]
    assert kv_cache["baseline"]["enum"] == [
        d for d in kv_cache["dtype"]["enum"] if dtypes.parse(d).bits_per_element() == 16
    ]


def test_the_recent_window_is_bounded_and_described_as_the_formats_module_has_it() -> None:
    field = SPEC["properties"]["kvCache"]["properties"]["recentTokens"]
    assert tuple(field["enum"]) == formats.RECENT_CHOICES
    assert f"each dtype's default: {formats.default_windows()}." in field["description"]
    of_effect = [name for name in formats.own_names() if formats.parse(name).has_ring]
    assert f"with {', '.join(of_effect[:-1])} and {of_effect[-1]};" in field["description"]


@pytest.mark.slow
def test_the_ladder_goes_down_exactly_when_bits_per_element_do() -> None:
    smaller = [d for d in dtypes.names() if dtypes.parse(d).bits_per_element() < 16]
    for above, below in permutations(smaller, 2):
        manifest = {
            "metadata": {"name": "a"},
            "spec": {
                "model": {"source": "file:///m"},
                "engine": {"image": "i"},
                "kvCache": {"ladder": [above, below]},
            },
        }
        downwards = dtypes.parse(above).bits_per_element() > dtypes.parse(below).bits_per_element()
        assert (faults(manifest) == ()) == downwards, (above, below)


def test_scale_and_printer_columns_point_at_fields_that_exist() -> None:
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += VERSION["subresources"]["scale"].values()
    for path in paths:
        here: Mapping[str, Any] = root_schema()
        for name in re.sub(r"\[.*\]", ".items", path).strip(".").split("."):
            if name == "metadata":
                break
            here = here["items"] if name == "items" else here["properties"][name]


def test_a_default_that_a_message_mentions_is_the_schemas_default() -> None:
    mentioned = [found for _, rule in RULES for found in re.findall(r"([\w.]+) \((\d+) unless set\)", rule["message"])]
    assert mentioned
    for path, default in mentioned:
        here: Mapping[str, Any] = SPEC
        for name in path.split("."):
            here = here["properties"][name]
        assert here["default"] == int(default)
