"""The operator finds, by the CRD alone, what the API server would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.api import apply_defaults, faults, parse, status_faults
from localcluster import quantity
from support.bad_manifests import BAD, GOOD, GOOD_GPU_LIMITS, Bad, with_gpus

EXAMPLES = Path(__file__).parents[2] / "examples"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(codec=None))
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_wrong_manifest_is_faulted_at_its_field_with_a_remedy(bad: Bad) -> None:
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
    gpus = quantity.parse(limit)
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
    # `--model s3cr=t` in one item is no option of vLLM's.
    assert found or (option, between) in [("--model", one) for one in (" ", "\t", ":", ": ")]
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


def test_the_signature_of_an_address_is_not_repeated() -> None:
    (fault,) = faults({**GOOD, "spec": {**GOOD["spec"], "model": {"source": "https://b/x?Signature=s3cret"}}})
    assert "https://b/x" in fault.message
    assert "s3cret" not in fault.message


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
