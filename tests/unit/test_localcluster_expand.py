"""Variables, quantities and paths of containers expand as in a kubelet."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from kvpilot_localcluster.errors import InvalidPod
from kvpilot_localcluster.expand import (
    divided,
    environment,
    expand,
    field_value,
    limit_or_allocatable,
    service_variables,
)
from kvpilot_localcluster.images import DEFAULT_TABLE, find, load
from kvpilot_localcluster.paths import rewrite

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "labels": {"a.io/b": "c"}},
    "spec": {"containers": []},
    "status": {"podIP": "127.0.1.9"},
}
DATA = {("ConfigMap", "c"): {"A": "1", "bad key": "2"}, ("Secret", "s"): {"k": "v"}}


def variables(**container: Any) -> dict[str, str]:
    return environment(
        container,
        POD,
        source=lambda kind, name: DATA.get((kind, name)),
        allocatable={"cpu": "2", "memory": "4Gi"},
        base={"OUTER": "o"},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$$(A)", "$(A)"),
        ("$(B)", "$(B)"),
        ("$A", "$A"),
        ("$$$(A)", "$1"),
        ("$(A", "$(A"),
    ],
)
def test_references_to_variables_are_expanded(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_a_dollar_is_not_changed(text: str) -> None:
    assert expand(text, {"A": "1"}) == text


def test_variables_may_refer_to_earlier_and_to_inherited_ones() -> None:
    env = [{"name": "X", "value": "$(OUTER)$(Y)"}, {"name": "Y", "value": "$(X)!"}]
    assert variables(env=env) == {"X": "o$(Y)", "Y": "o$(Y)!"}


def test_variables_of_a_whole_configmap_get_its_prefix_and_impossible_names_are_left_out() -> None:
    assert variables(envFrom=[{"configMapRef": {"name": "c"}, "prefix": "P_"}]) == {"P_A": "1"}


def test_a_containers_own_variables_replace_those_of_whole_configmaps() -> None:
    assert variables(envFrom=[{"configMapRef": {"name": "c"}}], env=[{"name": "A", "value": "own"}]) == {"A": "own"}


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"envFrom": [{"secretRef": {"name": "no"}}]}, 'secret "no" not found'),
        ({"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "k"}}}]}, 'configmap "no"'),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no"}}}]}, "key no in Secret s"),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.no"}}}]}, "spec.no"),
    ],
)
def test_a_reference_to_a_missing_key_is_reported(container: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPod, match=words):
        variables(**container)


def test_optional_references_to_missing_keys_are_left_out() -> None:
    ref = {"name": "no", "key": "k", "optional": True}
    assert variables(env=[{"name": "A", "valueFrom": {"secretKeyRef": ref}}], envFrom=[{"secretRef": ref}]) == {}


def test_variables_get_fields_of_the_pod_by_their_path() -> None:
    assert field_value(POD, "status.podIP") == "127.0.1.9"
    assert field_value(POD, "metadata.labels['a.io/b']") == "c"
    assert field_value(POD, "metadata.labels") == 'a.io/b="c"'


def test_a_variable_with_a_containers_missing_limit_has_the_nodes_capacity() -> None:
    env = [{"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]
    assert variables(env=env) == {"CPU": "2"}
    assert limit_or_allocatable({}, "requests.cpu", {"cpu": "2"}) == "0"


@given(st.integers(0, 10**15), st.sampled_from(["1", "1k", "1Mi"]))
def test_a_quantity_divided_by_a_divisor_is_rounded_up(value: int, divisor: str) -> None:
    units = int(divided(str(value), divisor))
    assert (units - 1) * parse_quantity(divisor) < value <= units * parse_quantity(divisor)


FOLDERS = {"/models": "/real/m", "/models/tiny": "/real/t", "/dev/shm": "/real/shm"}  # noqa: S108


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/models", "/real/m"),
        ("--model=/models/smol", "--model=/real/m/smol"),
        ("/models/tiny/config.json", "/real/t/config.json"),
        ("/models/tinyer", "/real/m/tinyer"),
        ("file:///models/x", "file:///real/m/x"),
        ("cat '/models/a' /dev/shm:/models", "cat '/real/m/a' /real/shm:/real/m"),
        ("/modelsx /opt/models hf://models http://host/models", "/modelsx /opt/models hf://models http://host/models"),
    ],
)
def test_container_paths_are_mapped_to_paths_of_the_machine(text: str, expected: str) -> None:
    assert rewrite(text, FOLDERS) == expected


def test_variables_name_the_services_of_the_pods_namespace() -> None:
    def service(name: str, namespace: str, ip: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}}

    services = [service("my-web", "n", "127.9.0.2"), service("far", "m", "127.9.0.3"), service("headless", "n", "None")]
    services.append(service("kubernetes", "default", "127.9.0.1"))
    assert service_variables(services, "n") == {
        "MY_WEB_SERVICE_HOST": "127.9.0.2",
        "MY_WEB_SERVICE_PORT": "80",
        "KUBERNETES_SERVICE_HOST": "127.9.0.1",
        "KUBERNETES_SERVICE_PORT": "80",
    }


def test_the_table_of_programs_gives_the_runtime_the_pods_address() -> None:
    image = find(load(DEFAULT_TABLE), "kvpilot/runtime-smollm2:dev")
    assert image is not None
    assert image.entrypoint == ("kvpilot-serve",)
    assert image.environment({"POD_IP": "127.0.1.2"})["KVPILOT_SERVE_HOST"] == "127.0.1.2"
    assert find(load(DEFAULT_TABLE), "nowhere/nothing:1") is None
