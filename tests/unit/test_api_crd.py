"""The CRD follows API conventions: fields are bounded and described, no field is a float, and dtypes have one list."""

import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

import celpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from kvpilot_cli.validate.rules import broken_rules
from kvpilot_formats import dtypes
from kvpilot_probes.packs import BUILTIN
from support.bad_manifests import BAD, GOOD, GOOD_GPU_LIMITS, Bad, with_gpus
from support.crd import apply_defaults, load_crd, refused, root_schema

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


def test_every_field_of_the_crd_is_bounded_and_described() -> None:
    for path, node in ALL:
        is_bounded_and_described(path, node)


def is_bounded_and_described(path: str, node: Mapping[str, Any]) -> None:
    assert set(node) <= KNOWN_KEYWORDS
    kind = node.get("type")
    assert kind in ("object", "array", "string", "integer", "boolean") or "x-kubernetes-int-or-string" in node
    if kind == "string":
        assert "maxLength" in node or "enum" in node or node.get("format") == "date-time"
    if kind == "array":
        assert "maxItems" in node
        assert node["x-kubernetes-list-type"] in ("atomic", "set", "map")
    if path.startswith("spec.engine.podTemplate."):
        return  # Kubernetes defines these fields
    if kind == "integer" and path.startswith("spec") and "enum" not in node:
        assert node["minimum"] <= node.get("default", node["minimum"]) <= node["maximum"]
    if "additionalProperties" in node:
        assert "maxProperties" in node
    if not path.endswith(("[]", "{}")) and not path.startswith("spec.engine.podTemplate."):
        assert node["description"].endswith(".")
    for name in node.get("properties", {}):
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert name not in CEL_RESERVED


def test_every_optional_field_of_the_spec_has_a_default_or_says_what_its_absence_means() -> None:
    without = {
        f"{path}.{name}": child["description"]
        for path, node in ALL
        if path.startswith("spec")
        and "[]" not in path
        and "Ref" not in path
        # These fields are Kubernetes' own and mean the same as in a Pod.
        and not path.startswith("spec.engine.podTemplate")
        for name, child in node.get("properties", {}).items()
        if "default" not in child and name not in node.get("required", ())
    }
    said = re.compile("if not set|if neither this field|without this field|required with", re.IGNORECASE)
    assert without
    assert [path for path, text in without.items() if not said.search(text)] == []


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


def test_every_dtype_is_a_baseline_or_may_be_in_a_ladder() -> None:
    kv_cache = SPEC["properties"]["kvCache"]["properties"]
    assert kv_cache["dtype"]["enum"] == [*kv_cache["baseline"]["enum"], *kv_cache["ladder"]["items"]["enum"]]


def test_a_service_may_ask_for_each_built_in_pack_and_for_no_other() -> None:
    (pattern,) = {spec["items"]["pattern"] for path, spec in nodes(SPEC, "spec") if path.endswith(".probeSets")}
    assert all(re.search(pattern, f"builtin/{name}") for name in BUILTIN)
    assert re.search(r"builtin/\((.*?)\)", pattern)[1].split("|") == list(BUILTIN)  # type: ignore[index]


@pytest.mark.slow
def test_the_crd_accepts_a_ladder_exactly_if_its_bits_per_element_decrease() -> None:
    smaller = [d for d in dtypes.names() if dtypes.parse(d).bits_per_element() < 16]
    plain = apply_defaults(GOOD)["spec"]["kvCache"]
    for above, below in permutations(smaller, 2):
        downwards = dtypes.parse(above).bits_per_element() > dtypes.parse(below).bits_per_element()
        found = broken_rules({**plain, "ladder": [above, below]}, SPEC["properties"]["kvCache"], "spec.kvCache")
        assert [field for field, _ in found] == ([] if downwards else ["spec.kvCache.ladder"]), (above, below)


@pytest.mark.parametrize("bad", [one for one in BAD if one.judge in ("schema", "rule")], ids=lambda bad: bad.name)
def test_the_crd_refuses_a_wrong_manifest_at_its_field(bad: Bad) -> None:
    ((field, message),) = refused(bad.manifest)
    assert field == bad.field
    assert bad.judge == "schema" or bad.word in message
    assert bad.judge == "schema" or "PASSWORD" not in message


@pytest.mark.parametrize(("size", "limit"), GOOD_GPU_LIMITS)
def test_a_sufficient_gpu_limit_is_accepted_in_every_spelling(size: int, limit: int | str) -> None:
    assert refused(with_gpus(size, limit)) == []


@given(
    st.integers(1, 64), st.from_regex(r"[0-9]{1,6}([.][0-9]{1,3})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", fullmatch=True)
)
def test_a_gpu_limit_is_judged_by_the_number_that_kubernetes_parses(size: int, limit: str) -> None:
    gpus = parse_quantity(limit)
    # If the limit is a plain number, the rule also refuses more GPUs than tensorParallelSize, which would stay unused.
    enough = gpus == int(gpus) and (gpus == size if re.fullmatch("[0-9]{1,5}", limit) else gpus >= size)
    accepted = refused(with_gpus(size, limit)) == []
    # A quantity such as 1.5k is a whole number, but the rule refuses it, because nobody counts GPUs in this way.
    assert accepted == enough or (not accepted and "." in limit)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("field", ["baseline", "dtype"])
def test_a_named_16_bit_dtype_needs_a_model_of_the_same_dtype(name: str, field: str) -> None:
    """If the cache's dtype differs from that of the model, the answers are fluent but wrong, and no error appears."""
    kv_cache = {"mode": "Fixed", "dtype": "k4v4", field: name}
    same, other = f"--dtype={name}", f"--dtype={({'bfloat16', 'float16'} - {name}).pop()}"
    for arguments, accepted in (
        ([same], True), (["--enforce-eager", same], True), ([], False), ([other], False), ([same, other], False),
        ([other, same], False), (["--dtype", name], False), ([same, "--dtyp", "auto"], False),
    ):  # fmt: skip
        engine = {**GOOD["spec"]["engine"], "extraArgs": arguments}
        found = refused({**GOOD, "spec": {**GOOD["spec"], "kvCache": kv_cache, "engine": engine}})
        assert (found == []) is accepted, arguments
        assert accepted or found[0][0] == f"spec.kvCache.{field}"


def test_the_crd_has_at_most_60_rules_and_90_own_fields() -> None:
    own = [path for path, node in ALL if path.startswith("spec") and not path.startswith("spec.engine.podTemplate.")]
    assert len(RULES) <= 60
    assert len(leaves(own) - {"spec.engine.podTemplate"}) <= 90


def test_the_status_has_at_most_110_fields() -> None:
    assert len(leaves([path for path, node in ALL if path.startswith("status")])) <= 110


def leaves(paths: list[str]) -> set[str]:
    """Return the fields that have no subfields."""
    return {
        path for path in paths if not any(other.startswith((f"{path}.", f"{path}[", f"{path}{{")) for other in paths)
    }


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
