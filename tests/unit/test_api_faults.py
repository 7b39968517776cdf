"""The operator finds, by the CRD alone, what the API server would refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from kvpilot_operator.api.schema import MAX_FAULTS, MAX_SPEC_BYTES, apply_defaults, faults, root_schema, status_faults
from kvpilot_operator.api.spec import parse
from support.bad_manifests import BAD, GOOD, GOOD_GPU_LIMITS, Bad, with_gpus

EXAMPLES = Path(__file__).parents[2] / "examples"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(codec=None))
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_wrong_manifest_is_faulted_at_its_field_with_a_remedy(bad: Bad) -> None:
    assert "PASSWORD" not in str(faults(bad.manifest))
    found = faults(bad.manifest)
    assert [fault.field for fault in found] == [bad.field]
    assert bad.word in found[0].message


def test_a_good_manifest_has_no_fault() -> None:
    assert faults(GOOD) == ()


@pytest.mark.parametrize(("size", "limit"), GOOD_GPU_LIMITS)
def test_a_limit_of_gpus_that_is_enough_has_no_fault_in_any_spelling(size: int, limit: int | str) -> None:
    assert faults(with_gpus(size, limit)) == ()


@given(
    st.integers(1, 64), st.from_regex(r"[0-9]{1,6}([.][0-9]{1,3})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", fullmatch=True)
)
def test_a_limit_of_gpus_is_judged_by_what_kubernetes_reads_in_it(size: int, limit: str) -> None:
    gpus = parse_quantity(limit)
    enough = gpus == int(gpus) and gpus >= size
    accepted = faults(with_gpus(size, limit)) == ()
    # Fractions of a thousand or more, such as 1.5k, may be whole: nobody counts GPUs so, and they are refused.
    assert accepted == enough or (not accepted and "." in limit)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_no_fault_and_parses(path: Path) -> None:
    services = [
        document for document in yaml.safe_load_all(path.read_text()) if document["kind"] == "QuantizedLLMService"
    ]
    assert services
    for service in services:
        assert faults(service) == ()
        parse(apply_defaults(service))


def test_every_fault_is_listed_not_only_the_first() -> None:
    manifest = {**GOOD, "spec": {"model": {"source": "x"}, "engine": {"image": "a b"}, "scaling": {"minReplicas": 9}}}
    assert {fault.field for fault in faults(manifest)} == {
        "spec.model.source",
        "spec.engine.image",
        "spec.scaling.minReplicas",
    }


def test_rules_wait_until_shapes_are_right() -> None:
    manifest = {**GOOD, "spec": {"model": {"source": "x"}, "engine": {"image": 3}}}
    assert [fault.field for fault in faults(manifest)] == ["spec.engine.image"]


def test_a_5000_character_name_is_one_clear_fault() -> None:
    (fault,) = faults({**GOOD, "metadata": {"name": "a" * 5000}})
    assert fault.field == "metadata.name"
    assert "use at most 40 characters" in fault.message
    assert len(fault.message) < 500


@pytest.mark.parametrize("between", ["=", " ", "\t", ":", ": "])
@pytest.mark.parametrize("option", ["--api-key", "--hf-token", "--model", "--nnodes", "--logprobs-mode", "$(OPTION)"])
def test_what_a_refused_argument_was_set_to_is_not_repeated(option: str, between: str) -> None:
    found = faults(of_engine(extraArgs=[f"{option}{between}s3cr=t"]))
    assert found
    for fault in found:
        assert option in fault.message
        assert "s3cr" not in fault.message


@pytest.mark.parametrize(
    "engine",
    [
        {"extraArgs": "--api-key s3cret"},
        {"extraArgs": ["--api-key=s3cret" + "x" * 1024]},
        {"extraArgs": ["s3cret" + "x" * 1024]},
        {"env": [{"name": "HF_TOKEN", "value": "s3cret" + "x" * 4096}]},
        {"env": [{"name": "HF_TOKEN", "value": 53}]},
        {"image": "https://host/image?signature=s3cret"},
    ],
)
def test_a_value_that_may_be_a_secret_is_not_repeated(engine: dict[str, Any]) -> None:
    (fault,) = faults(of_engine(**engine))
    assert not any(word in fault.message for word in ("s3cret", "53"))


FIELDS = [
    ("model", "source"),
    ("engine", "image"),
    ("kvCache", "dtype"),
    ("kvCache", "mode"),
    ("canary", "capacityPolicy"),
]
WORDS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="=:'\"\\"), max_size=40)


def of(section: str, name: str, value: str) -> dict[str, Any]:
    spec = {**GOOD["spec"], "cache": {"weights": {"size": "1Gi"}}}
    return {**GOOD, "spec": {**spec, section: {**spec.get(section, {}), name: value}}}


# Refused by their schema's enum and by rules; an image is refused for its scheme or a space alone.
@given(
    st.sampled_from(FIELDS),
    st.sampled_from(["https://b/x", "S3://bucket/key", " http://b", "oci://r/x:1", "hf://a/b?x"]),
    st.from_regex("[A-Z]{12}", fullmatch=True),
    st.sampled_from(["?Signature={}", "?{}", "?a=1&b={}", "?a=\n{}", "??{}", "?{}=?"]),
)
def test_what_is_asked_of_an_address_is_not_repeated(
    field: tuple[str, str], address: str, secret: str, query: str
) -> None:
    found = faults(of(*field, address + query.format(secret)))
    assert found
    assert any(address.partition("?")[0] in fault.message for fault in found)
    assert not any(secret in fault.message for fault in found)


@given(st.sampled_from(FIELDS), st.from_regex("[A-Z]{12}", fullmatch=True))
def test_the_signature_of_an_address_without_a_scheme_is_not_repeated(field: tuple[str, str], secret: str) -> None:
    for fault in faults(of(*field, f"b.s3.example.org/x?X-Amz-Signature={secret}")):
        assert secret not in fault.message


@settings(max_examples=20)
@given(
    st.sampled_from(FIELDS),
    st.sampled_from(["https", "hf", "oci", "pvc", "file", "s3"]),
    st.from_regex("[A-Z]{12}", fullmatch=True),
)
def test_a_password_in_an_address_is_not_repeated(field: tuple[str, str], scheme: str, secret: str) -> None:
    found = faults(of(*field, f"{scheme}://user:{secret}@b.example.org/x y"))
    assert found
    assert not any(secret in fault.message for fault in found)


@given(st.sampled_from([one for one in FIELDS if one != ("engine", "image")]), WORDS, WORDS)
def test_a_wrong_value_that_is_no_address_is_shown_whole(field: tuple[str, str], before: str, after: str) -> None:
    value = f"{before}?{after}"
    found = [fault for fault in faults(of(*field, value)) if fault.field == f"spec.{'.'.join(field)}"]
    assert found
    assert any(value in fault.message for fault in found)


def of_engine(**engine: Any) -> dict[str, Any]:
    return {**GOOD, "spec": {**GOOD["spec"], "engine": {"image": "i", **engine}}}


def test_null_counts_as_absent_as_in_the_server() -> None:
    manifest = {**GOOD, "spec": {**GOOD["spec"], "replicas": None, "cache": None, "kvCache": {"dtype": None}}}
    assert faults(manifest) == ()
    assert apply_defaults(manifest)["spec"] == apply_defaults(GOOD)["spec"]


def test_half_a_surrogate_pair_is_judged_like_any_other_wrong_character() -> None:
    (fault,) = faults({**GOOD, "spec": {**GOOD["spec"], "model": {"source": "hf://a/\ud800"}}})
    assert fault.field == "spec.model.source"


@given(json_values)
@settings(max_examples=150)
def test_any_json_value_gets_an_answer(value: Any) -> None:
    assert faults(value) != ()
    status_faults(value)


@given(
    st.dictionaries(
        st.sampled_from(["replicas", "model", "engine", "kvCache", "scaling", "canary", "accuracy", "x"]), json_values
    )
)
@settings(max_examples=150)
def test_any_json_in_a_spec_gets_an_answer(spec: Any) -> None:
    faults({"metadata": {"name": "a"}, "spec": spec})
    apply_defaults({"metadata": {"name": "a"}, "spec": spec})


# Values of all sizes: long texts, long lists, maps with many and with long keys, of the right and of the wrong shape.
hostile = st.recursive(
    st.sampled_from(
        [None, True, 2**70, 1e300, "x", "x" * 5000, "\ud800", "a\n", "..", "--model", "$(A)", "hf://a/b", "é" * 300]
    ),
    lambda inner: (
        st.builds(lambda item, n: [item] * n, inner, st.sampled_from([1, 3, 130, 3000]))
        | st.builds(
            lambda item, n, k: {f"{k}{i}": item for i in range(n)}, inner, st.sampled_from([1, 20, 500]), st.just("k")
        )
        | st.dictionaries(
            st.sampled_from(["name", "key", "value", "values", "operator", "x" * 2000]), inner, max_size=4
        )
    ),
    max_leaves=4,
)
FIELDS = [
    (part, field)
    for part, schema in root_schema()["properties"]["spec"]["properties"].items()
    for field in schema.get("properties", {"": 0})
]


@given(st.lists(st.tuples(st.sampled_from(FIELDS), hostile), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_a_tenant_writes_gets_few_and_short_faults(values: list[tuple[tuple[str, str], Any]]) -> None:
    spec: dict[str, Any] = {"model": {"source": "hf://a/b"}, "engine": {"image": "i"}}
    for (part, field), value in values:
        if field and isinstance(spec.setdefault(part, {}), dict):
            spec[part][field] = value
        else:
            spec[part] = value
    found = faults({"metadata": {"name": "a"}, "spec": spec})
    assert len(found) <= MAX_FAULTS
    assert (
        sum(len(fault.message.encode()) + len(fault.field.encode("utf-8", "replace")) for fault in found) < 256 * 1024
    )


def test_a_spec_is_refused_where_all_together_is_too_much() -> None:
    env = [{"name": f"A{i}", "value": "x" * 4096} for i in range(32)]
    assert faults(of_engine(env=env[:28])) == ()
    (fault,) = faults(of_engine(env=env))
    assert fault.field == "spec"
    assert f"use at most {MAX_SPEC_BYTES}" in fault.message


def test_a_list_without_end_costs_no_more_than_one_that_is_one_too_long() -> None:
    looked_at = 0

    class Counted(dict[str, Any]):
        def get(self, *about: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().get(*about)

    work = []
    for count in (33, 100_000):
        looked_at = 0
        found = faults(of_engine(tolerations=[Counted(key=5) for _ in range(count)]))
        assert found[0].message == "has more than 32 items: use at most 32"
        work.append(looked_at)
    assert work[0] == work[1]


def test_every_text_list_and_map_of_the_crd_is_bounded() -> None:
    def unbounded(schema: Any, path: str) -> Iterator[str]:
        kind = schema.get("type")
        bounds = {"array": "maxItems", "string": "maxLength"}
        if kind in bounds and bounds[kind] not in schema and "enum" not in schema and "format" not in schema:
            yield path
        if "additionalProperties" in schema and "maxProperties" not in schema:
            yield path
        if schema.get("x-kubernetes-int-or-string") and "maxLength" not in schema:
            yield path
        for name, field in schema.get("properties", {}).items():
            yield from unbounded(field, f"{path}.{name}")
        for below in ("items", "additionalProperties"):
            if below in schema:
                yield from unbounded(schema[below], f"{path}.{below}")

    for part in ("spec", "status"):
        assert list(unbounded(root_schema()["properties"][part], part)) == []


GROWTH = """
import gc, sys
from kvpilot_operator.observe.informers import InformerCache
def put(i, engine):
    about = {"namespace": "a", "name": "big", "uid": "u", "generation": i, "resourceVersion": str(i)}
    spec = {"model": {"source": "hf://a/b"}, "engine": {"image": "i", **engine}}
    cache.services.put({"metadata": about, "spec": spec})
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20
cache = InformerCache(None, ())
put(1, {})
before = resident()
for i in range(2, 32):
    put(i, {"nodeSelector": {"a" * 10**6 + str(i): "x"}})
for i in range(32, 62):
    put(i, {"env": [{"name": f"A{n}", "value": f"{i}" * 2000} for n in range(28)]})
assert cache.services.get("a", "big").spec is not None
print(resident() - before)
"""


@pytest.mark.slow
def test_edits_of_a_large_spec_do_not_grow_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 30  # MiB; the specs that were put have 33 MB


def test_json_nested_beyond_the_stack_gets_an_answer() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for spec in (
        deep,
        {"replicas": deep},
        {"model": {"source": deep}},
        {"unknown": deep},
        {"kvCache": {"ladder": deep}},
    ):
        assert faults({"metadata": {"name": "a"}, "spec": spec}) != ()


def test_defaulting_twice_changes_nothing() -> None:
    once = apply_defaults(GOOD)
    assert apply_defaults(once) == once


def test_defaulting_leaves_its_argument_alone_and_drops_what_the_schema_does_not_know() -> None:
    manifest = {**GOOD, "spec": {**GOOD["spec"], "unknown": 1}}
    assert "unknown" not in apply_defaults(manifest)["spec"]
    assert manifest["spec"]["unknown"] == 1


def test_a_status_that_the_server_would_refuse_is_faulted() -> None:
    good = {
        "observedGeneration": 1,
        "kvCache": {"activeDtype": "auto", "usagePercent": 12},
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "",
                "lastTransitionTime": "2026-11-21T00:00:00Z",
            }
        ],
    }
    assert status_faults(good) == ()
    (fault,) = status_faults({**good, "kvCache": {"usagePercent": 101}})
    assert fault.field == "status.kvCache.usagePercent"
