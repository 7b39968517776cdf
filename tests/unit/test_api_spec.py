"""The spec's structs parse stored objects and apply the same defaults as the API server."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.pods import EnvVar, FieldRef, KeyRef, Resources, TokenRef, ValueFrom
from kvpilot_operator.api.scaling import Scaling
from kvpilot_operator.api.spec import parse
from support.bad_manifests import GOOD
from support.crd import apply_defaults


def service(**spec: Any) -> dict[str, Any]:
    return apply_defaults({**GOOD, "spec": {**GOOD["spec"], **spec}})


def test_the_served_name_is_the_objects_name_unless_given() -> None:
    assert parse(service()).model.served_name == "good"
    assert parse(service(model={"source": "file:///m", "servedName": "other"})).model.served_name == "other"


def test_references_lists_and_maps_become_plain_data() -> None:
    engine = {
        "image": "i",
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "24Gi"}},
    }
    spec = parse(service(engine=engine, model={"source": "hf://a/b", "tokenSecretRef": {"name": "hf"}}))
    assert spec.model.token_secret_ref == TokenRef("hf")
    assert spec.engine.env == (
        EnvVar("A", "1"),
        EnvVar("B", value_from=ValueFrom(KeyRef("s", "k"))),
        EnvVar("C", value_from=ValueFrom(field_ref=FieldRef("status.podIP"))),
    )
    assert spec.engine.resources == Resources(limits={"memory": "24Gi", "nvidia.com/gpu": 2})


def test_the_structs_have_the_defaults_of_the_schema() -> None:
    assert parse(service()) == parse(GOOD)


def test_a_number_such_as_3_0_is_read_as_a_whole_number() -> None:
    obj = service(replicas=3.0, engine={"image": "i", "tensorParallelSize": 2.0})
    assert faults(obj) == ()
    found = parse(obj)
    assert [repr(found.replicas), repr(found.engine.tensor_parallel_size)] == ["3", "2"]


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(20, 40))
def test_replicas_are_clamped_to_the_bounds_of_scaling(replicas: int, low: int, high: int) -> None:
    kept = Scaling("Operator", low, high, 0).clamp(replicas)
    assert low <= kept <= high
    assert kept == replicas or kept in (low, high)
