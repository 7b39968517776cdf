"""InferencePools as the operator makes them are what a server takes that has the kind, with its rules enforced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import directly
from kvpilot_localcluster.rest import ApiError, Rest
from kvpilot_operator.act.ownership import claim
from kvpilot_operator.render.objects import inference_pool
from kvpilot_operator.state.snapshot import ServiceKey
from support.inference_gateway import POOL_CRD, pool
from support.services import manifest, spec_of

KEY = ServiceKey("default", "chat")
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
PICKER = {"name": "chat-epp", "port": {"number": 9002}, "failureMode": "FailOpen"}


@pytest.fixture(scope="module")
def server(modern_cluster: LocalCluster) -> Iterator[Rest]:
    """The newer server of definitions, with the kind."""
    rest = Rest.of_kubeconfig(modern_cluster.plane.modern_kubeconfig)
    directly(rest, [POOL_CRD])
    yield rest
    rest.delete(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{POOL_CRD['metadata']['name']}")


def made(**picker: Any) -> dict[str, Any]:
    asked = spec_of(manifest(inferencePool={"endpointPickerRef": picker} if picker else {})).inference_pool
    assert asked is not None
    return inference_pool(KEY, "u-1", KEY.name, "abc", asked.endpoint_picker_ref)


@pytest.mark.parametrize("picker", [PICKER, {}], ids=["with a picker", "without"])
def test_a_pool_of_ours_is_taken_as_it_is_and_so_is_the_claim_of_its_name(server: Rest, picker: dict[str, Any]) -> None:
    whole = made(**picker)
    assert server.create(f"{POOLS}?dryRun=All", claim(whole))["spec"]["targetPorts"] == [{"number": 8000}]
    stored = server.create(f"{POOLS}?dryRun=All", whole)["spec"]
    assert {**stored, "appProtocol": "http"} == {**whole["spec"], "appProtocol": "http"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"targetPorts": [{"number": 8000}, {"number": 8000}]}, "must differ"),
        ({"endpointPickerRef": {"name": "epp"}}, "needs its port"),
        ({"selector": {"matchLabels": {}}}, "matchLabels"),
        ({"targetPorts": []}, "targetPorts"),
    ],
)
def test_what_the_kind_forbids_is_refused_by_the_definition_of_the_tests(
    server: Rest, change: dict[str, Any], word: str
) -> None:
    bad = pool("chat", "default", {"app": "chat"})
    with pytest.raises(ApiError) as refused:
        server.create(f"{POOLS}?dryRun=All", {**bad, "spec": {**bad["spec"], **change}})
    assert refused.value.status == 422
    assert word in str(refused.value)
