"""A server that knows no CEL (Kubernetes 1.20) enforces the schema; the operator's check finds the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot_operator.api import apply_defaults, faults
from localcluster.controlplane import ControlPlane
from localcluster.rest import ApiError
from support.bad_manifests import BAD, GOOD, Bad

SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"


def create(cluster: ControlPlane, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """HTTP status and answer of asking for the object to be created, without keeping it."""
    try:
        return 201, cluster.rest.create(f"{SERVICES}?dryRun=All", manifest)
    except ApiError as error:
        return error.status, json.loads(error.body)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "schema"], ids=lambda bad: bad.name)
def test_the_schema_alone_refuses_a_wrong_shape(cluster: ControlPlane, bad: Bad) -> None:
    assert create(cluster, bad.manifest)[0] == 422


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "rule"], ids=lambda bad: bad.name)
def test_what_slips_past_an_old_server_is_found_by_the_operator(cluster: ControlPlane, bad: Bad) -> None:
    status, answer = create(cluster, bad.manifest)
    if status == 201:
        assert [fault.field for fault in faults(answer)] == [bad.field]
    else:
        assert status == 422  # a newer server than 1.20: it refuses by itself


def test_a_5000_character_name_is_refused_without_harm(cluster: ControlPlane) -> None:
    status, answer = create(cluster, {**GOOD, "metadata": {"name": "a" * 5000}})
    assert status == 422
    assert [cause["field"] for cause in answer["details"]["causes"]] == ["metadata.name"]


def test_an_old_server_fills_the_same_defaults(cluster: ControlPlane) -> None:
    nulls = {
        **GOOD,
        "spec": {**GOOD["spec"], "replicas": None, "cache": None, "kvCache": {"dtype": None, "ladder": None}},
    }
    for manifest in (GOOD, nulls):
        status, answer = create(cluster, manifest)
        assert status == 201, answer
        assert answer["spec"] == apply_defaults(manifest)["spec"]


def test_scale_reads_and_writes_replicas(cluster: ControlPlane) -> None:
    rest = cluster.rest
    rest.create(SERVICES, {**GOOD, "metadata": {"name": "scaled"}})
    try:
        scale = rest.get(f"{SERVICES}/scaled/scale")
        assert scale["spec"]["replicas"] == 1
        scale["spec"]["replicas"] = 3
        rest.call("PUT", f"{SERVICES}/scaled/scale", scale)
        assert rest.get(f"{SERVICES}/scaled")["spec"]["replicas"] == 3
    finally:
        rest.delete(f"{SERVICES}/scaled")
