"""The API server refuses each invalid manifest, or leaves it to the operator, as bad_manifests.yaml says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import ApiError
from kvpilot_operator.api.faults import faults, judge
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.snapshot import ServiceKey
from support.bad_manifests import BAD, GOOD, GOOD_GPU_LIMITS, Bad, with_gpus
from support.crd import root_schema
from support.derived_manifests import service_with, together

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"


def create(cluster: LocalCluster, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of a dry-run create."""
    try:
        return 201, cluster.rest.create(f"{SERVICES}?dryRun=All&fieldValidation=Strict", manifest)
    except ApiError as error:
        return error.status, json.loads(error.body)


def causes(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (field, message) of each error, without notes about /scale and about rules that the server skipped."""
    found = [(cause.get("field", ""), cause["message"]) for cause in answer["details"]["causes"]]
    return [(field, message) for field, message in found if field not in ("<nil>", "") and not field.startswith(".")]


def places(fields: list[str]) -> set[str]:
    """Return field names without list indices, which the server omits from schema errors."""
    return {re.sub(r"\[\d+\]", "", field) for field in fields}


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge in ("schema", "rule")], ids=lambda bad: bad.name)
def test_the_server_refuses_a_wrong_manifest_at_its_field(cluster: LocalCluster, bad: Bad) -> None:
    status, answer = create(cluster, bad.manifest)
    assert status == 422, answer
    assert places([field for field, _ in causes(answer)]) == places([bad.field])
    if bad.judge == "rule":
        assert "PASSWORD" not in str(answer)
        ((field, message),) = causes(answer)
        assert (field, bad.word in message) == (bad.field, True)


def test_some_manifest_of_the_corpus_violates_each_rule(cluster: LocalCluster) -> None:
    told = [message for bad in BAD if bad.judge == "rule" for _, message in causes(create(cluster, bad.manifest)[1])]
    rules = list(rules_of(root_schema()))
    assert len(rules) <= 60
    assert [one["rule"] for one in rules if not any(is_of(one, message) for message in told)] == []


def rules_of(schema: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield all CEL rules of a schema, depth first."""
    yield from schema.get("x-kubernetes-validations", ())
    below = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in below:
        if isinstance(child, dict):
            yield from rules_of(child)


def is_of(rule: dict[str, str], message: str) -> bool:
    """Return True if a message belongs to the rule. If the rule puts a value into its message, compare only the end."""
    remedy = rule["message"].rpartition(": ")[2]
    return message.endswith(remedy if "messageExpression" in rule else rule["message"])


def test_every_limit_of_the_schema_is_enforced(cluster: LocalCluster) -> None:
    for group in together():
        status, answer = create(cluster, service_with(group))
        assert status == 422, answer
        assert places([case.field for case in group]) <= places([field for field, _ in causes(answer)])


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.judge in ("operator", "administrator")], ids=lambda bad: bad.name
)
def test_the_server_accepts_manifests_that_only_the_operator_refuses(cluster: LocalCluster, bad: Bad) -> None:
    status, answer = create(cluster, bad.manifest)
    assert status == 201, answer
    assert [fault.field for fault in faults(answer)] == [bad.field]


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.judge == "kubernetes"], ids=lambda bad: bad.name)
def test_the_server_refuses_the_pods_of_a_service_that_it_accepts(cluster: LocalCluster, bad: Bad) -> None:
    status, answer = create(cluster, bad.manifest)
    assert status == 201, answer
    spec = judge(answer)
    assert isinstance(spec, Spec)
    made = workload(ServiceKey("default", "good"), "u-1", pod_template("good", spec, "auto"), 1, 600, nodes=1)
    with pytest.raises(ApiError) as refused:
        cluster.rest.create("/apis/apps/v1/namespaces/default/deployments?dryRun=All", made)
    assert refused.value.status == 422
    told = [cause["message"] for cause in json.loads(refused.value.body)["details"]["causes"]]
    assert any(bad.word in message for message in told), told


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted_and_gets_the_defaults_of_the_structs(cluster: LocalCluster, path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "QuantizedLLMService":
            status, answer = create(cluster, document)
            assert status == 201, answer
            assert judge(answer) == judge(document)


@pytest.mark.parametrize(("size", "limit"), GOOD_GPU_LIMITS)
def test_a_sufficient_gpu_limit_is_accepted_in_every_spelling(
    cluster: LocalCluster, size: int, limit: int | str
) -> None:
    status, answer = create(cluster, with_gpus(size, limit))
    assert status == 201, answer


def test_a_misspelt_field_is_refused_and_the_message_names_it(cluster: LocalCluster) -> None:
    status, answer = create(cluster, {**GOOD, "spec": {**GOOD["spec"], "kvcache": {"mode": "Auto"}}})
    assert status == 400
    assert 'unknown field "spec.kvcache"' in answer["message"]


def test_a_5000_character_name_is_refused_without_harm(cluster: LocalCluster) -> None:
    status, answer = create(cluster, {**GOOD, "metadata": {"name": "a" * 5000}})
    assert status == 422
    assert "metadata.name" in [field for field, _ in causes(answer)]


def test_scale_reads_and_writes_replicas(cluster: LocalCluster) -> None:
    server = cluster.rest
    server.create(SERVICES, {**GOOD, "metadata": {"name": "scaled"}})
    try:
        scale = server.get(f"{SERVICES}/scaled/scale")
        assert scale["spec"]["replicas"] == 1
        scale["spec"]["replicas"] = 3
        server.call("PUT", f"{SERVICES}/scaled/scale", scale)
        assert server.get(f"{SERVICES}/scaled")["spec"]["replicas"] == 3
    finally:
        server.delete(f"{SERVICES}/scaled")
