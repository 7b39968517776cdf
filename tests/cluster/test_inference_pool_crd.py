"""A server with the InferencePool CRD accepts the operator's pools, with its rules enforced."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define, undefine
from kvpilot_localcluster.rest import ApiError, Rest, until
from kvpilot_operator.act.ownership import claim
from kvpilot_operator.act.perform import Actor
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.decide.objects.placement import removed
from kvpilot_operator.decide.rejections import finding, rejected
from kvpilot_operator.observe.views import pool_view
from kvpilot_operator.render.objects import inference_pool
from kvpilot_operator.state.decision import Cause, Decision, Objects
from kvpilot_operator.state.snapshot import ServiceKey
from support.inference_kinds import POOL_CRD, POOL_CRD_1_6, pool
from support.services import manifest, snapshot, spec_of

KEY = ServiceKey("default", "chat")
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{POOL_CRD['metadata']['name']}"
PICKER = {"name": "chat-epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
OTHER = {"name": "other-epp", "port": {"number": 9003}, "failureMode": "FailOpen"}


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Iterator[Rest]:
    """Yield the API server with the CRD of InferencePool."""
    rest = cluster.rest
    define(rest, [POOL_CRD])
    yield rest
    undefine(rest, POOL_CRD)


@pytest.fixture
def server_1_6(server: Rest) -> Iterator[Rest]:
    """Yield the same server with the CRD of v1.6."""

    def takes_none() -> bool:
        try:
            return bool(server.create(f"{POOLS}?dryRun=All", made({})))
        except ApiError as error:
            assert error.status == 422
            return False

    server.merge(DEFINITION, {"spec": POOL_CRD_1_6["spec"]})
    until(takes_none, "the server accepts a pool without a picker")
    yield server
    server.merge(DEFINITION, {"spec": POOL_CRD["spec"]})
    until(lambda: not takes_none(), "the server requires a picker")


@pytest_asyncio.fixture
async def cluster_of_pools(cluster: LocalCluster, server: Rest) -> AsyncIterator[Cluster]:
    """Yield the operator's client for the server."""
    configuration = Configuration()
    kubeconfig = str(cluster.kubeconfig)
    await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    cluster = Cluster(ApiClient(configuration))
    yield cluster
    await cluster.close()
    for name in (KEY.name, f"{KEY.name}-canary"):
        server.delete(f"{POOLS}/{name}")


def made(picker: dict[str, Any], name: str = KEY.name) -> dict[str, Any]:
    asked = spec_of(manifest(inferencePool={"endpointPickerRef": picker} if picker else {})).inference_pool
    assert asked is not None
    return inference_pool(KEY, "u-1", name, "abc", asked.endpoint_picker_ref)


async def told(cluster: Cluster, actor: Actor, whole: dict[str, Any]) -> Cause | None:
    """Reconcile with this pool, and return why the server refused it."""
    name = whole["metadata"]["name"]
    found = await cluster.find(Ref(whole["apiVersion"], whole["kind"], KEY.namespace, name))
    seen = {} if found is None else {("InferencePool", name): pool_view(found, "u-1")}
    s = replace(snapshot(manifest()), key=KEY, objects=seen)
    await actor.perform(s, Decision(s.status, Objects((whole,), {}, frozenset(), removed=removed(s, (whole,)))))
    refused = rejected(replace(s, rejections=actor.rejections))
    return finding(refused) if refused else None


def test_the_server_accepts_our_pools_and_their_placeholders_unchanged(server: Rest) -> None:
    whole = made(PICKER)
    assert server.create(f"{POOLS}?dryRun=All", claim(whole))["spec"]["targetPorts"] == [{"number": 8000}]
    stored = server.create(f"{POOLS}?dryRun=All", whole)["spec"]
    assert {**stored, "appProtocol": "http"} == {**whole["spec"], "appProtocol": "http"}


@pytest.mark.parametrize("pickers", [(PICKER, {}, OTHER, {}), ({}, PICKER, {})], ids=["with a picker", "without"])
async def test_from_v1_6_on_a_pool_has_the_specs_picker_or_none(
    server_1_6: Rest, cluster_of_pools: Cluster, pickers: tuple[dict[str, Any], ...]
) -> None:
    actor = Actor(cluster_of_pools)
    for picker in pickers:
        whole = made(picker)
        assert await told(cluster_of_pools, actor, whole) is None
        stored = server_1_6.get(f"{POOLS}/{KEY.name}")["spec"]
        assert {**stored, "appProtocol": "http"} == {**whole["spec"], "appProtocol": "http"}


@pytest.mark.parametrize("name", ["chat", "chat-canary"])
async def test_before_v1_6_a_pool_without_a_picker_is_refused_with_the_remedy_and_does_not_change(
    server: Rest, cluster_of_pools: Cluster, name: str
) -> None:
    refused, tell = made({}, name), partial(told, cluster_of_pools, Actor(cluster_of_pools))
    for before in (None, PICKER, OTHER):
        if before is not None:
            assert await tell(made(before, name)) is None
        why = await tell(refused)
        assert why is not None
        assert why.reason == "Invalid"
        assert why.message.startswith(
            f"spec.endpointPickerRef: Required value (InferencePool {name}): name a picker in spec.inferencePool"
        )
        there = server.get(POOLS)["items"]
        assert [one["spec"]["endpointPickerRef"]["name"] for one in there] == ([before["name"]] if before else [])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"targetPorts": [{"number": 8000}, {"number": 8000}]}, "must differ"),
        ({"endpointPickerRef": {"name": "epp"}}, "needs its port"),
        ({"selector": {"matchLabels": {}}}, "matchLabels"),
        ({"targetPorts": []}, "targetPorts"),
    ],
)
def test_the_tests_crd_refuses_invalid_pools(server: Rest, change: dict[str, Any], word: str) -> None:
    bad = pool("chat", "default", {"app": "chat"})
    with pytest.raises(ApiError) as refused:
        server.create(f"{POOLS}?dryRun=All", {**bad, "spec": {**bad["spec"], **change}})
    assert refused.value.status == 422
    assert word in str(refused.value)
