"""The operator names the fault in an object that the API server accepted, without revealing a secret."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.api.faults import MAX_SPEC_BYTES, faults, judge
from kvpilot_operator.api.pod_template import KINDS
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.engine import pod_template
from support.bad_manifests import BAD, GOOD, Bad
from support.crd import apply_defaults, root_schema, status_faults

EXAMPLES = Path(__file__).parents[2] / "examples"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(codec="utf-8"))
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@pytest.mark.parametrize(
    "bad", [one for one in BAD if one.judge in ("operator", "administrator")], ids=lambda b: b.name
)
def test_the_operator_refuses_faults_that_the_server_cannot_find(bad: Bad) -> None:
    (found,) = faults(bad.manifest)
    assert found.field == bad.field
    assert bad.word in found.message
    assert (faults(bad.manifest, KINDS) == ()) is (bad.judge == "administrator")


@pytest.mark.parametrize("bad", [one for one in BAD if one.judge in ("rule", "kubernetes")], ids=lambda b: b.name)
def test_an_object_that_is_older_than_a_rule_is_either_refused_or_rendered(bad: Bad) -> None:
    judged = judge(bad.manifest)
    if isinstance(judged, Spec):
        assert pod_template("good", judged, judged.kv_cache.dtype or judged.kv_cache.baseline)
    else:
        assert "PASSWORD" not in str(judged)
        assert [fault.field for fault in judged] == [bad.field]


@pytest.mark.parametrize(
    "arguments",
    [
        ['--speculative-config={"method": "ngram", "num_speculative_tokens": 4}'],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
        ["--chat-template", "{{ messages }} and so on"],
    ],
)
def test_an_item_of_extra_args_whose_value_has_spaces_has_no_fault(arguments: list[str]) -> None:
    spec = {**GOOD["spec"], "engine": {**GOOD["spec"]["engine"], "extraArgs": arguments}}
    assert faults({**GOOD, "spec": spec}) == ()


def test_a_good_manifest_has_no_fault() -> None:
    assert faults(GOOD) == ()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_no_fault_and_parses(path: Path) -> None:
    services = [
        document for document in yaml.safe_load_all(path.read_text()) if document["kind"] == "QuantizedLLMService"
    ]
    assert services
    for service in services:
        assert faults(service) == ()
        assert judge(service) == judge(apply_defaults(service))


@pytest.mark.parametrize("between", ["=", " "])
@pytest.mark.parametrize("option", ["--api-key", "--hf-token", "--model", "--nnodes", "--logprobs-mode"])
def test_messages_do_not_repeat_the_value_of_a_refused_argument(option: str, between: str) -> None:
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
    ],
)
def test_messages_do_not_repeat_a_value_that_may_be_secret(engine: dict[str, Any]) -> None:
    (fault,) = faults(of_engine(**engine))
    assert not any(word in fault.message for word in ("s3cret", "53"))


def of_engine(**engine: Any) -> dict[str, Any]:
    return {**GOOD, "spec": {**GOOD["spec"], "engine": {"image": "i", **engine}}}


@given(json_values)
@settings(max_examples=150)
def test_any_json_value_is_judged_without_an_error(value: Any) -> None:
    assert faults(value) != ()


@given(
    st.dictionaries(
        st.sampled_from(["replicas", "model", "engine", "kvCache", "scaling", "canary", "accuracy", "x"]), json_values
    )
)
@settings(max_examples=150)
def test_any_json_in_a_spec_is_judged_without_an_error(spec: Any) -> None:
    faults({"metadata": {"name": "a"}, "spec": spec})


def test_a_spec_above_the_size_limit_is_refused() -> None:
    env = [{"name": f"A{i}", "value": "x" * 4096} for i in range(32)]
    assert faults(of_engine(env=env[:28])) == ()
    (fault,) = faults(of_engine(env=env))
    assert fault.field == "spec"
    assert f"use at most {MAX_SPEC_BYTES}" in fault.message


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
    put(i, {"podTemplate": {"spec": {"nodeSelector": {"a" * 10**6 + str(i): "x"}}}})
for i in range(32, 62):
    put(i, {"env": [{"name": f"A{n}", "value": f"{i}" * 2000} for n in range(28)]})
assert cache.services.get("a", "big").spec is not None
print(resident() - before)
"""


@pytest.mark.slow
def test_edits_of_a_large_spec_do_not_grow_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 30  # in MiB; the specs together have 33 MB


def test_an_invalid_status_is_reported_as_a_fault() -> None:
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
                "observedGeneration": 1,
            }
        ],
    }
    assert status_faults(good) == ()
    (fault,) = status_faults({**good, "kvCache": {"usagePercent": 101}})
    assert "$.kvCache.usagePercent" in fault
