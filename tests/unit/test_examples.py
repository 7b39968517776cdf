"""Kubernetes accepts the autoscaling examples, and each one fits the service that it scales."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.engines import PAGE_LATER
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.api.spec import parse
from kvpilot_operator.control.service_metrics import FAMILIES
from support.crd import apply_defaults
from support.kinds import unknown

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = PAGE_LATER.read_text()
SCALED = ["hpa-external", "hpa-custom", "keda-scaledobject"]


def documents(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an example's service and its autoscaler."""
    service, scaler = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    assert service["kind"] == KIND
    return service, scaler


@pytest.mark.parametrize("page", ["gateways.md", "meshes.md", "pods.md", "lora.md", "storage.md"])
def test_a_part_of_a_spec_in_the_docs_is_accepted(page):
    text = (EXAMPLES.parent / "docs" / page).read_text()
    parts = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    parts = [part for part in parts if "engine" in part]
    assert parts
    for part in parts:
        spec = {"model": {"source": "hf://Qwen/Qwen3-8B"}, **part}
        assert faults({"metadata": {"name": "chat"}, "spec": spec}) == ()


@pytest.mark.parametrize("name", ["hpa-external", "hpa-custom"])
def test_an_autoscaler_has_only_fields_that_autoscaling_v2_has(name):
    scaler = documents(name)[1]
    assert (scaler["apiVersion"], scaler["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    assert unknown("V2HorizontalPodAutoscaler", scaler, name) == []
    scaler["spec"]["metrics"][0]["typo"] = scaler["spec"]["maxReplica"] = "6"
    assert len(unknown("V2HorizontalPodAutoscaler", scaler, name)) == 2


@pytest.mark.parametrize("name", SCALED)
def test_an_autoscaler_names_a_service_with_external_scaling(name):
    service, scaler = documents(name)
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service["metadata"]["name"],
    }
    assert "replicas" not in service["spec"]
    assert parse(apply_defaults(service)).scaling.mode == "External"


@pytest.mark.parametrize("name", SCALED)
def test_an_autoscaler_has_the_limits_of_its_service(name):
    service, scaler = documents(name)
    spec, theirs = parse(apply_defaults(service)), scaler["spec"]
    least = theirs.get("minReplicas", theirs.get("minReplicaCount"))
    most = theirs.get("maxReplicas", theirs.get("maxReplicaCount"))
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (least, most)


@pytest.mark.parametrize("name", SCALED)
def test_an_example_uses_only_existing_metrics(name):
    text = (EXAMPLES / f"{name}.yaml").read_text()
    ours = set(re.findall(r"\bkvpilot_[a-z_]+", text))
    theirs = set(re.findall(r"\bvllm:[a-z_]+", text))
    assert ours | theirs
    assert ours <= {family.name for family in FAMILIES}
    assert all(f"\n{metric}{{" in VLLM for metric in theirs)


def test_the_metric_of_an_hpa_comes_from_the_adapter_rule_in_its_comment():
    for name in ("hpa-external", "hpa-custom"):
        text = (EXAMPLES / f"{name}.yaml").read_text()
        rules = yaml.safe_load("\n".join(line[4:] for line in re.findall(r"^#   .*", text, re.M)))
        rule = next(iter(rules.values()))[0]
        made = rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0]
        (metric,) = documents(name)[1]["spec"]["metrics"]
        assert next(iter({k: v for k, v in metric.items() if k != "type"}.values()))["metric"]["name"] == made


def test_keda_treats_missing_metrics_as_an_error_and_not_as_0():
    spec = documents("keda-scaledobject")[1]["spec"]
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in spec["triggers"]} == {"false"}
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
