"""A server that knows no CEL (Kubernetes 1.20) enforces the schema; the operator's check finds the rest."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import ApiError, Rest, until
from kvpilot_operator.api.host_access import KINDS
from kvpilot_operator.api.schema import apply_defaults, faults, load_crd
from support.bad_manifests import BAD, GOOD, Bad
from support.derived_manifests import service_with, together

SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Rest:
    """A client of a server that serves the CRD; other modules may have brought it already."""
    try:
        cluster.rest.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", load_crd())
    except ApiError as error:
        if error.status != 409:
            raise
    until(lambda: cluster.rest.get(SERVICES), "services are served")
    return cluster.rest


def create(server: Rest, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """HTTP status and answer of asking for the object to be created, without keeping it."""
    try:
        return 201, server.create(f"{SERVICES}?dryRun=All", manifest)
    except ApiError as error:
        return error.status, json.loads(error.body)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "schema"], ids=lambda bad: bad.name)
def test_the_schema_alone_refuses_a_wrong_shape(server: Rest, bad: Bad) -> None:
    assert create(server, bad.manifest)[0] == 422


def test_every_limit_of_the_schema_is_enforced_where_the_operator_finds_it(server: Rest) -> None:
    for group in together():
        status, answer = create(server, service_with(group))
        assert status == 422, answer
        refused = {re.sub(r"\[\d+\]", "", cause["field"]) for cause in answer["details"]["causes"]}
        assert {re.sub(r"\[\d+\]", "", case.field) for case in group} <= refused, group[0].keyword


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "rule"], ids=lambda bad: bad.name)
def test_what_slips_past_an_old_server_is_found_by_the_operator(server: Rest, bad: Bad) -> None:
    status, answer = create(server, bad.manifest)
    if status == 201:
        assert [fault.field for fault in faults(answer)] == [bad.field]
    else:
        assert status == 422  # a newer server than 1.20: it refuses by itself


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "operator"], ids=lambda bad: bad.name)
def test_what_only_an_administrator_may_allow_is_found_by_the_operator(server: Rest, bad: Bad) -> None:
    status, answer = create(server, bad.manifest)
    assert status == 201, answer
    assert [fault.field for fault in faults(answer)] == [bad.field]
    assert faults(answer, KINDS) == ()


def test_a_5000_character_name_is_refused_without_harm(server: Rest) -> None:
    status, answer = create(server, {**GOOD, "metadata": {"name": "a" * 5000}})
    assert status == 422
    assert [cause["field"] for cause in answer["details"]["causes"]] == ["metadata.name"]


def test_an_old_server_fills_the_same_defaults(server: Rest) -> None:
    nulls = {
        **GOOD,
        "spec": {**GOOD["spec"], "replicas": None, "cache": None, "kvCache": {"dtype": None, "ladder": None}},
    }
    for manifest in (GOOD, nulls):
        status, answer = create(server, manifest)
        assert status == 201, answer
        assert answer["spec"] == apply_defaults(manifest)["spec"]


def test_scale_reads_and_writes_replicas(server: Rest) -> None:
    server.create(SERVICES, {**GOOD, "metadata": {"name": "scaled"}})
    try:
        scale = server.get(f"{SERVICES}/scaled/scale")
        assert scale["spec"]["replicas"] == 1
        scale["spec"]["replicas"] = 3
        server.call("PUT", f"{SERVICES}/scaled/scale", scale)
        assert server.get(f"{SERVICES}/scaled")["spec"]["replicas"] == 3
    finally:
        server.delete(f"{SERVICES}/scaled")
