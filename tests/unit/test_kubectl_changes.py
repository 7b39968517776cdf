"""`kubectl kvpilot` changes a service: pause, resume, and requests for the canary; export changes nothing."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_runs import Run, denied, on_trial, refused, runner, serving_chat, tried
from loopback_api import LoopbackApi

from kvpilot_operator.api.faults import faults


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with serving_chat(tmp_path) as api:
        yield api


@pytest.fixture
def run(api: LoopbackApi, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(api, capsys)


def test_pause_and_resume_write_one_field_and_only_if_it_differs(run: Run, api: LoopbackApi) -> None:
    spec = copy.deepcopy(api.services["chat"]["spec"])
    for command, paused, already in (
        ("pause", True, False),
        ("pause", True, True),
        ("resume", False, False),
        ("resume", False, True),
    ):
        code, out, _ = run(command, "chat")
        assert code == 0
        assert ("already" in out) is already
        assert api.services["chat"]["spec"]["rollout"]["paused"] is paused
    assert [method for method, _ in api.asked if method == "PATCH"] == ["PATCH", "PATCH"]
    assert api.services["chat"]["spec"] == spec


SERVED = {
    "kvCache": {"activeDtype": "k4v4"},
    "accuracy": {"last": {"dtype": "k4v4", "verdict": "Passed", "probeTime": "2026-11-02T10:00:00Z", "revision": "a",
                          "excessKLMicronats": 3200, "top1AgreementPermille": 991}},
    "history": [{"dtype": "k4v4", "verdict": "Passed", "time": "2026-11-01T10:00:00Z", "image": "r:1",
                 "gpu": "NVIDIA-H200"}],
}  # fmt: skip


def test_export_writes_the_probed_dtype_and_its_evidence_without_status(run: Run, api: LoopbackApi) -> None:
    service = api.services["chat"]
    service |= {"status": SERVED}
    service["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "kvpilot.io/canary": "abort@3740aaaa/2026-11-27T12:00:00Z",
        "team": "a",
    }
    before = copy.deepcopy(service)
    code, out, err = run("export", "chat")
    made = yaml.safe_load(out)
    assert code == 0
    assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
    assert made["spec"]["kvCache"]["startDtype"] == "k4v4"
    evidence = made["metadata"]["annotations"].pop("kvpilot.io/start-dtype-evidence")
    for words in ("2026-11-01T10:00:00Z", "NVIDIA-H200", "r:1", "2026-11-02T10:00:00Z", "3.2 millinats", "99.1%"):
        assert words in evidence
        assert words in err
    assert made["metadata"]["annotations"] == {"team": "a"}
    assert faults(made) == ()
    assert api.services["chat"] == before


WORKLOADS = {
    "Deployment": "/apis/apps/v1/namespaces/models/deployments",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/namespaces/models/leaderworkersets",
}
GONE = (404, b'{"message": "not found", "details": {"name": "chat-r1"}}')


def noted(generation: int, spec: dict[str, Any]) -> tuple[int, bytes]:
    """Return an answer with a workload that was rendered from this spec."""
    return noted_as(json.dumps({"generation": generation, "spec": spec}))


def noted_as(note: str) -> tuple[int, bytes]:
    return 200, json.dumps({"metadata": {"annotations": {"kvpilot.io/spec": note}}}).encode()


@pytest.mark.parametrize("kind", WORKLOADS)
def test_export_writes_the_spec_that_serves_if_the_newest_is_refused(run: Run, api: LoopbackApi, kind: str) -> None:
    service = api.services["chat"]
    good = copy.deepcopy(service["spec"])
    service["metadata"]["generation"] = 8
    service["spec"] = {**good, "engine": {**good["engine"], "extraArgs": ["--port=1"]}}
    stalled = {"type": "Stalled", "status": "True", "reason": "SpecInvalid", "message": "--port is reserved"}
    service["status"] = {**SERVED, "stable": {"revision": "r1"}, "conditions": [stalled]}
    api.answers |= {f"{path}/chat-r1": noted(7, good) if one == kind else GONE for one, path in WORKLOADS.items()}
    code, out, err = run("export", "chat")
    assert code == 0
    made = yaml.safe_load(out)
    assert made["spec"] == {**good, "kvCache": {**good["kvCache"], "startDtype": "k4v4"}}
    assert "the spec is that of generation 7, which serves, not the newest (generation 8) (--port is reserved); " in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (noted(8, {"model": "as the object has it"}), ""),
        ((200, b"{}"), ""),
        (noted_as("{"), "the spec of the serving revision is unknown"),
        ((403, b'{"message": "user x cannot"}'), "you may not get deployments"),
        (GONE, "the spec of the serving revision is unknown"),
        (noted_as("[" * 100_000), "the spec of the serving revision is unknown"),
        (noted_as('{"generation": 7, "spec": 3}'), ""),
    ],
    ids=range(7),
)
def test_export_writes_the_newest_spec_if_it_serves_or_nothing_else_is_known(
    run: Run, api: LoopbackApi, answer: tuple[int, bytes], words: str
) -> None:
    service = api.services["chat"]
    service["metadata"]["generation"] = 8
    service["status"] = {"stable": {"revision": "r1"}}
    api.answers |= {f"{path}/chat-r1": answer for path in WORKLOADS.values()}
    code, out, err = run("export", "chat")
    assert code == 0
    assert yaml.safe_load(out)["spec"] == service["spec"]
    assert words in err
    assert ("generation" in err) is False


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": {"kvCache": {"activeDtype": "k4v4"}}}, "the status has no probe that it passed"),
        ({"status": {"kvCache": {"activeDtype": "auto"}}}, "not in kvCache.ladder"),
        ({"status": SERVED, "kvCache": {"mode": "Fixed", "dtype": "k4v4"}}, "mode Fixed"),
        ({}, "no dtype serves"),
    ],
)
def test_export_of_an_unproven_dtype_writes_no_start_dtype_and_gives_the_reason(
    run: Run, api: LoopbackApi, change: dict[str, Any], why: str
) -> None:
    service = api.services["chat"]
    service["status"] = change.get("status", {})
    service["spec"]["kvCache"] = change.get("kvCache", {**service["spec"]["kvCache"], "startDtype": "fp8"})
    code, out, err = run("export", "chat")
    assert code == 0
    assert why in err
    assert "startDtype" not in yaml.safe_load(out)["spec"]["kvCache"]


@pytest.mark.parametrize(
    ("argv", "status", "request_", "said"),
    [
        (["abort"], on_trial("Probing"), "abort@3740aaaa/2026-11-27T12:00:00Z", "nothing is denied"),
        (["abort", "--deny"], on_trial("Shifting"), "deny@3740aaaa/2026-11-27T12:00:00Z", "k4v4 is denied"),
        (["promote"], on_trial("Probing"), "promote@3740aaaa/2026-11-27T12:00:00Z", "once its probes have passed"),
        (["promote"], on_trial("Shifting"), "promote@3740aaaa/2026-11-27T12:00:00Z", "hold times"),
        (["retry"], tried("Failed"), "retry@3740aaaa/2026-11-27T12:09:00Z", "tried again at once"),
        (
            ["retry"],
            {**tried("Passed"), **denied("k4v4")},
            "retry@3740aaaa/2026-11-27T12:09:00Z",
            "tried again at once",
        ),
    ],
)
def test_a_request_names_the_trial_so_that_the_operator_acts_on_it_once(
    run: Run, api: LoopbackApi, argv: list[str], status: dict[str, Any], request_: str, said: str
) -> None:
    api.services["chat"]["status"] = status
    before = copy.deepcopy(api.services["chat"]["spec"])
    code, out, _ = run(argv[0], "chat", *argv[1:])
    assert code == 0
    assert said in out
    assert api.services["chat"]["metadata"]["annotations"] == {"kvpilot.io/canary": request_}
    assert api.services["chat"]["spec"] == before


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ("abort", {}, "has no canary"),
        ("promote", tried("Failed"), "has no canary"),
        ("abort", on_trial("RollingBack"), "is being rolled back already"),
        ("promote", on_trial("Promoting"), "is Promoting already"),
        ("retry", on_trial("Probing"), "is in flight: wait for its end, or abort it first"),
    ],
)
def test_a_request_that_would_do_nothing_is_refused_before_anything_is_written(
    run: Run, api: LoopbackApi, argv: str, status: dict[str, Any], said: str
) -> None:
    api.services["chat"]["status"] = status
    assert said in refused(run, argv, "chat")
    assert all(method == "GET" for method, _ in api.asked)


def test_promote_of_a_paused_service_names_the_remedy(run: Run, api: LoopbackApi) -> None:
    api.services["chat"]["status"] = on_trial("Shifting")
    api.services["chat"]["spec"]["rollout"]["paused"] = True
    assert "run `kubectl kvpilot resume chat` first" in refused(run, "promote", "chat")


@pytest.mark.parametrize("status", [{}, tried("Passed"), tried("Error", "Superseded")])
def test_retry_with_nothing_to_lift_changes_nothing(run: Run, api: LoopbackApi, status: dict[str, Any]) -> None:
    api.services["chat"]["status"] = status
    assert "nothing to lift" in run("retry", "chat")[1]
    api.services["chat"]["status"] = {**status, **denied("k8v4")}
    assert "spec.rollout.denySeconds: 0 lifts all denials (k8v4)" in run("retry", "chat")[1]
    assert all(method == "GET" for method, _ in api.asked)
