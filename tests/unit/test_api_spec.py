"""The spec's dataclasses hold every field of the CRD."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.pods import EnvVar, FieldRef, KeyRef, Resources, Toleration, ValueFrom
from kvpilot_operator.api.schema import apply_defaults, faults, root_schema
from kvpilot_operator.api.spec import Scaling, Spec, parse
from support.bad_manifests import GOOD

FLATTENED = {KeyRef}
"""Stands for several of the CRD's objects."""


def snake(name: str) -> str:
    name = name.replace("TTFTP95", "TtftP95").replace("ITLP95", "ItlP95").replace("KL", "Kl")
    name = name.replace("MiB", "Mib").replace("GiB", "Gib")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_every_field_of_the_crd_is_a_field_of_the_spec() -> None:
    def compare(cls: type[Any], schema: dict[str, Any]) -> None:
        hints = get_type_hints(cls)
        assert set(hints) == {snake(name) for name in schema["properties"]}, cls
        for name, child in schema["properties"].items():
            shape = child["items"] if child.get("type") == "array" else child
            for inner in _structs_in(hints[snake(name)]):
                if inner not in FLATTENED:
                    compare(inner, shape)

    def _structs_in(hint: Any) -> list[type[Any]]:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return [hint]
        return [found for part in get_args(hint) for found in _structs_in(part)]

    compare(Spec, root_schema()["properties"]["spec"])


def service(**spec: Any) -> dict[str, Any]:
    return apply_defaults({**GOOD, "spec": {**GOOD["spec"], **spec}})


def test_the_served_name_is_the_objects_name_unless_given() -> None:
    assert parse(service()).model.served_name == "good"
    assert parse(service(model={"source": "file:///m", "servedName": "other"})).model.served_name == "other"


def test_references_lists_and_maps_become_plain_hashable_data() -> None:
    engine = {
        "image": "i",
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "24Gi"}},
        "nodeSelector": {"b": "2", "a": "1"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    spec = parse(service(engine=engine, model={"source": "hf://a/b", "tokenSecretRef": {"name": "hf"}}))
    assert spec.model.token_secret_ref == KeyRef("hf", "token")
    assert spec.engine.env == (
        EnvVar("A", "1"),
        EnvVar("B", value_from=ValueFrom(KeyRef("s", "k", optional=True))),
        EnvVar("C", value_from=ValueFrom(field_ref=FieldRef("status.podIP"))),
    )
    assert spec.engine.resources == Resources((), (("memory", "24Gi"), ("nvidia.com/gpu", "2")))
    assert spec.engine.node_selector == (("a", "1"), ("b", "2"))
    assert spec.engine.tolerations == (Toleration("Exists", "gpu"),)
    hash(spec)


def test_a_whole_number_that_is_written_as_a_fraction_is_read_as_the_number() -> None:
    obj = service(replicas=3.0, engine={"image": "i", "tensorParallelSize": 2.0})
    assert faults(obj) == ()
    found = parse(obj)
    assert [repr(found.replicas), repr(found.engine.tensor_parallel_size)] == ["3", "2"]


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(20, 40))
def test_replicas_are_clamped_to_the_bounds_of_scaling(replicas: int, low: int, high: int) -> None:
    kept = Scaling("Operator", low, high, 0).clamp(replicas)
    assert low <= kept <= high
    assert kept == replicas or kept in (low, high)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("field", ["baseline", "dtype"])
def test_a_16_bit_dtype_by_name_goes_with_the_same_dtype_of_the_model(name: str, field: str) -> None:
    """Stored in another dtype than the model's, keys and values are fluent nonsense, without an error."""
    kv_cache = {"mode": "Fixed", "dtype": "k4v4", field: name}
    same, other = f"--dtype={name}", f"--dtype={({'bfloat16', 'float16'} - {name}).pop()}"
    for arguments, accepted in (
        ([same], True), (["--enforce-eager", same], True), ([], False), ([other], False), ([same, other], False),
        ([other, same], False), (["--dtype", name], False), ([same, "--dtyp", "auto"], False),
    ):  # fmt: skip
        obj = service(kvCache=kv_cache, engine={**GOOD["spec"]["engine"], "extraArgs": arguments})
        found = faults(obj)
        assert (found == ()) is accepted, arguments
        assert accepted or (found[0].field == f"spec.kvCache.{field}" and f"add --dtype={name}" in found[0].message)
