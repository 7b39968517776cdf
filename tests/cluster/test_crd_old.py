"""A server that knows no CEL (Kubernetes 1.20) enforces the schema; the operator's check finds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvpilot_operator.api import apply_defaults, faults
from support.bad_manifests import BAD, GOOD, Bad
from support.kube_http import kube_client

SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"


@pytest.fixture(scope="module")
def server(cluster: Any) -> Iterator[httpx.Client]:
    with kube_client(cluster.kubeconfig) as client:
        yield client


def create(server: httpx.Client, manifest: dict[str, Any]) -> httpx.Response:
    return server.post(SERVICES, params={"dryRun": "All"}, json=manifest)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "schema"], ids=lambda bad: bad.name)
def test_the_schema_alone_refuses_a_wrong_shape(server: httpx.Client, bad: Bad) -> None:
    assert create(server, bad.manifest).status_code == 422


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "rule"], ids=lambda bad: bad.name)
def test_what_slips_past_an_old_server_is_found_by_the_operator(server: httpx.Client, bad: Bad) -> None:
    answer = create(server, bad.manifest)
    if answer.status_code == 201:
        assert [fault.field for fault in faults(answer.json())] == [bad.field]
    else:
        assert answer.status_code == 422  # a newer server than 1.20: it refuses by itself


def test_an_old_server_fills_the_same_defaults(server: httpx.Client) -> None:
    nulls = {
        **GOOD,
        "spec": {**GOOD["spec"], "replicas": None, "cache": None, "kvCache": {"dtype": None, "ladder": None}},
    }
    for manifest in (GOOD, nulls):
        answer = create(server, manifest)
        assert answer.status_code == 201, answer.text
        assert answer.json()["spec"] == apply_defaults(manifest)["spec"]


def test_scale_reads_and_writes_replicas(server: httpx.Client) -> None:
    manifest = {**GOOD, "metadata": {"name": "scaled"}}
    assert server.post(SERVICES, json=manifest).status_code == 201
    try:
        scale = server.get(f"{SERVICES}/scaled/scale").json()
        assert scale["spec"]["replicas"] == 1
        scale["spec"]["replicas"] = 3
        assert server.put(f"{SERVICES}/scaled/scale", json=scale).status_code == 200
        assert server.get(f"{SERVICES}/scaled").json()["spec"]["replicas"] == 3
    finally:
        server.delete(f"{SERVICES}/scaled")
