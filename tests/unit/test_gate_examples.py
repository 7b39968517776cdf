"""Kubernetes accepts the manifests of the gate, and the commands in their containers yield its verdict."""

import asyncio
import os
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvpilot_cli import command
from support.kinds import unknown
from support.probe_engine import Handler, completing, counting, engine, event, serving

FOLDER = Path(__file__).parents[2] / "examples" / "gate"
GARBAGE = completing(event("token_id:7777", {"token_id:7777": -0.01}))
JOBS = ("argo-rollouts.yaml", "job.yaml", "kserve.yaml")


@cache
def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return a file's manifests by kind."""
    found = list(yaml.safe_load_all((FOLDER / name).read_text()))
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


def job_spec(name: str) -> dict[str, Any]:
    found = documents(name)
    if (job := found.get("Job")) is not None:
        assert unknown("V1Job", job, name) == []
        spec: dict[str, Any] = job["spec"]
        return spec
    template = found["AnalysisTemplate"]
    assert template["apiVersion"] == "argoproj.io/v1alpha1"
    asked = {f"{{{{args.{one['name']}}}}}" for one in template["spec"]["args"]}
    (metric,) = template["spec"]["metrics"]
    spec = metric["provider"]["job"]["spec"]
    used = {arg.partition("=")[2] for arg in spec["template"]["spec"]["containers"][0]["args"]}
    assert asked == used
    return spec


def restricted(pod: dict[str, Any]) -> None:
    """Check the Pod Security profile, and that the pod mounts no API token."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_manifest_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*JOBS, "flagger.yaml"}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_only_fields_that_kubernetes_has_and_fits_pod_security_restricted(name: str) -> None:
    spec = job_spec(name)
    assert unknown("V1JobSpec", spec, name) == []
    restricted(spec["template"]["spec"])


@pytest.mark.parametrize("name", JOBS)
def test_a_verdict_ends_the_job_at_once_and_a_missing_measurement_is_tried_again(name: str) -> None:
    spec = job_spec(name)
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert rule["onExitCodes"]["values"] == [1, 3]
    assert spec["backoffLimit"] > 0


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("handler", "code"), [(counting, 0), (GARBAGE, 1)], ids=["sound", "garbage"])
async def test_the_command_of_a_job_gives_the_verdict(name: str, handler: Handler, code: int) -> None:
    (container,) = job_spec(name)["template"]["spec"]["containers"]
    arguments: list[str] = [*container["command"], *container["args"]]
    assert arguments.pop(0) == "kvpilot"
    async with engine(serving(counting, "m")) as one, engine(serving(handler, "m")) as other:
        assert await asyncio.to_thread(command.main, directed(arguments, one, other)) == code


def directed(arguments: list[str], baseline: str, candidate: str) -> list[str]:
    """Return a command's arguments with these addresses in place of its own."""
    urls = {"--baseline": baseline, "--candidate": candidate}
    return [f"{(o := arg.partition('=')[0])}={urls[o]}" if "=" in arg else arg for arg in arguments]


def test_the_kserve_canary_has_no_traffic_while_the_job_compares_both_revisions() -> None:
    service = documents("kserve.yaml")["InferenceService"]
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    predictor = dict(service["spec"]["predictor"])
    assert predictor.pop("canaryTrafficPercent") == 0
    # With scale to zero no pod would exist when the gate sends its requests.
    assert predictor.pop("minReplicas") >= 1
    assert unknown("V1PodSpec", predictor, "predictor") == []
    (container,) = predictor["containers"]
    (port,) = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    assert container["readinessProbe"]["httpGet"]["port"] == port["containerPort"]
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    job = documents("kserve.yaml")["Job"]
    assert job["metadata"]["namespace"] == namespace
    hosts = [
        urlsplit(arg.partition("=")[2]).netloc
        for arg in job_spec("kserve.yaml")["template"]["spec"]["containers"][0]["args"]
    ]
    assert hosts == [f"{name}-predictor-{i:05}.{namespace}.svc.cluster.local" for i in (1, 2)]
    assert job["metadata"]["name"].endswith(f"{name}-predictor-00002")


def hook() -> dict[str, Any]:
    """Return the webhook of the Canary in flagger.yaml."""
    canary = documents("flagger.yaml")["Canary"]
    assert canary["apiVersion"] == "flagger.app/v1beta1"
    (found,) = canary["spec"]["analysis"]["webhooks"]
    assert isinstance(found, dict)
    return found


def test_flagger_calls_the_examples_load_tester_before_the_canary_has_traffic() -> None:
    kinds, asked = documents("flagger.yaml"), hook()
    for kind in ("Deployment", "Service", "NetworkPolicy"):
        assert unknown(f"V1{kind}", kinds[kind], kind) == []
    assert asked["type"] == "pre-rollout"
    # Flagger's `retries` would repeat the measurement within one check.
    assert set(asked) == {"name", "type", "url", "timeout", "metadata"}
    service, deployment, policy = (kinds[kind] for kind in ("Service", "Deployment", "NetworkPolicy"))
    assert urlsplit(asked["url"]).netloc == f"{service['metadata']['name']}.{service['metadata']['namespace']}"
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert len({one["metadata"]["namespace"] for one in kinds.values()}) == 1

    pod = deployment["spec"]["template"]["spec"]
    restricted(pod)
    # The image names its user, but a kubelet cannot tell from a name that this user is not root.
    assert pod["securityContext"]["runAsUser"] > 0
    (copy,), (gate,) = pod["initContainers"], pod["containers"]
    assert copy["command"][-1] == gate["command"][0]
    mounts = [one["volumeMounts"][0] for one in (copy, gate)]
    assert {one["name"] for one in mounts} == {volume["name"] for volume in pod["volumes"]}
    assert all(gate["command"][0].startswith(f"{one['mountPath']}/") for one in mounts)
    flags = dict(arg.lstrip("-").split("=") for arg in gate["args"])
    assert gate["ports"] == [{"name": "http", "containerPort": int(flags["port"])}]
    assert flags["timeout"] == asked["timeout"]
    assert flags["namespace-regexp"] == f"^{documents('flagger.yaml')['Canary']['metadata']['namespace']}$"


def test_flaggers_webhook_compares_the_services_that_flagger_creates() -> None:
    canary = documents("flagger.yaml")["Canary"]
    name, namespace, port = (
        canary["metadata"]["name"],
        canary["metadata"]["namespace"],
        canary["spec"]["service"]["port"],
    )
    assert canary["spec"]["targetRef"]["name"] == name
    assert shlex.split(hook()["metadata"]["cmd"])[2:] == [
        f"--baseline=http://{name}-primary.{namespace}:{port}", f"--candidate=http://{name}-canary.{namespace}:{port}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("handler", "code"), [(counting, 0), (GARBAGE, 1), (None, 2)], ids=["sound", "garbage", "away"]
)
async def test_the_load_testers_command_ends_with_0_only_if_the_candidate_passes(
    handler: Handler | None, code: int
) -> None:
    metadata = hook()["metadata"]
    assert metadata["type"] == "bash"
    async with engine(serving(counting, "m")) as one, engine(serving(handler, "m")) as other:
        shell = shlex.join(directed(shlex.split(metadata["cmd"]), one, other))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        running = await asyncio.create_subprocess_exec("bash", "-c", shell, env={**os.environ, "PATH": path})
        assert await running.wait() == code
