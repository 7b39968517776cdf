"""The gate's manifests are what Kubernetes takes, and what their containers run gives the verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_kernels import command
from support.kinds import unknown
from support.probe_engine import completing, counting, engine, event, serving

FOLDER = Path(__file__).parents[2] / "examples" / "gate"
GARBAGE = completing(event("token_id:7777", {"token_id:7777": -0.01}))


def job_spec(name: str) -> dict[str, Any]:
    (manifest,) = yaml.safe_load_all((FOLDER / name).read_text())
    if manifest["kind"] == "Job":
        assert unknown("V1Job", manifest, name) == []
        found: dict[str, Any] = manifest["spec"]
        return found
    assert (manifest["apiVersion"], manifest["kind"]) == ("argoproj.io/v1alpha1", "AnalysisTemplate")
    asked = {f"{{{{args.{one['name']}}}}}" for one in manifest["spec"]["args"]}
    (metric,) = manifest["spec"]["metrics"]
    spec: dict[str, Any] = metric["provider"]["job"]["spec"]
    used = {arg.partition("=")[2] for arg in spec["template"]["spec"]["containers"][0]["args"]}
    assert asked == used
    return spec


def names() -> list[str]:
    return sorted(path.name for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", names())
def test_a_manifest_has_only_fields_that_kubernetes_has_and_fits_pod_security_restricted(name: str) -> None:
    spec = job_spec(name)
    assert unknown("V1JobSpec", spec, name) == []
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", names())
def test_a_verdict_ends_the_job_at_once_and_a_missing_measurement_is_tried_again(name: str) -> None:
    spec = job_spec(name)
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert rule["onExitCodes"]["values"] == [1, 3]
    assert spec["backoffLimit"] > 0


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("handler", "code"), [(counting, 0), (GARBAGE, 1)], ids=["sound", "garbage"])
async def test_what_a_manifest_runs_gives_the_verdict(name: str, handler: Any, code: int) -> None:
    (container,) = job_spec(name)["template"]["spec"]["containers"]
    program, *arguments = [*container["command"], *container["args"]]
    assert program == "kvpilot"
    async with engine(serving(counting, "m")) as one, engine(serving(handler, "m")) as other:
        urls = {"--baseline": one, "--candidate": other}
        given = [f"{(o := arg.partition('=')[0])}={urls[o]}" if "=" in arg else arg for arg in arguments]
        assert await asyncio.to_thread(command.main, given) == code
