"""Ready is True only if engines answer behind our own Service. A rejection stays visible until it is resolved."""

from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.decide import decide
from kvpilot_operator.errors import NameTaken
from kvpilot_operator.state.objects import DeploymentView, Rejection
from kvpilot_operator.state.snapshot import ProbePlan, Snapshot
from kvpilot_operator.state.status import MAX_MESSAGE, Condition, Status
from support.services import NOW, manifest, pod, revision_of, running, samples, snapshot

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, scaling={"mode": "External"})
NAME = revision_of(OBJ, "auto")
TAKEN = Rejection("Service", "chat", "NameTaken", NameTaken("Service", "models", "chat").message)
QUOTA = "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1"


def told(s: Snapshot, kind: str) -> Condition:
    found = decide(s).status.condition(kind)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["Ready", "Serving"])
def test_engines_that_our_service_does_not_select_are_not_ready(kind: str) -> None:
    found = told(running(OBJ, "auto", traffic=None, rejections=()), kind)
    assert (found.status, found.reason) == ("False", "TrafficMoving")
    found = told(running(OBJ, "auto", traffic=None, rejections=(TAKEN,)), kind)
    assert (found.status, found.reason) == ("False", "NameTaken")
    assert "rename the QuantizedLLMService" in found.message


@pytest.mark.parametrize("traffic", [NAME, ""])
def test_serving_is_true_if_the_operators_kubernetes_service_selects_ready_engines(traffic: str) -> None:
    assert told(running(OBJ, "auto", traffic=traffic, rejections=()), "Serving").status == "True"


def test_a_service_that_selects_a_revision_without_ready_pods_is_not_ready() -> None:
    s = running(OBJ, "auto", pods=(pod(NAME, ready=False),), rejections=())
    assert told(s, "Ready").status == "False"


def test_pods_that_cannot_be_created_are_reported_while_others_serve() -> None:
    two = {**OBJ, "spec": {**OBJ["spec"], "replicas": 2}}
    views = {NAME: DeploymentView(NAME, "auto", 2, QUOTA)}
    s = running(two, "auto", deployments=views, rejections=())
    assert told(s, "Serving").status == "True"
    for kind in ("Ready", "Stalled"):
        assert told(s, kind).reason == "FailedCreate"
        assert told(s, kind).message.startswith(QUOTA)


def test_a_failing_engine_is_reported_before_pods_that_cannot_be_created() -> None:
    broken = pod(NAME, ready=False, waiting_reason="ErrImagePull", exit_message="no such image")
    views = {NAME: DeploymentView(NAME, "auto", 2, QUOTA)}
    assert told(running(OBJ, "auto", deployments=views, pods=(broken,)), "Serving").reason == "ImageUnavailable"


def test_a_refusal_that_stops_no_engine_is_not_the_reason_of_serving() -> None:
    budget = Rejection("PodDisruptionBudget", "chat", "Forbidden", "exceeded quota: team")
    s = running(OBJ, "auto", pods=(pod(NAME, ready=False),), rejections=(budget,))
    assert told(s, "Serving").reason == "EnginesStarting"
    assert told(s, "Stalled").reason == "Forbidden"


def test_before_the_first_write_earlier_refusals_stay_in_the_status() -> None:
    before = Condition(
        type="Stalled", status="True", reason="Forbidden", message="m", last_transition_time=NOW,
        observed_generation=1,
    )  # fmt: skip
    assert told(snapshot(OBJ), "Stalled").status == "False"
    assert told(snapshot(OBJ, status=Status(conditions=(before,))), "Stalled") == before
    again = snapshot(OBJ, status=Status(conditions=(before,)), rejections=())
    assert told(again, "Stalled").status == "False"


def test_all_present_causes_are_listed_with_the_reason_of_the_first() -> None:
    probes = ProbePlan(fault="configmap/prompts does not exist")
    crashed = pod(NAME, name="b", ready=False, containers_ready=False, restarts=3, exit_message="CUDA error")
    s = running(OBJ, "auto", pods=(pod(NAME), crashed), rejections=(TAKEN,), probes=probes)
    stalled = told(s, "Stalled")
    assert stalled.reason == "NameTaken"
    for words in ("has another owner", "configmap/prompts does not exist", "CUDA error"):
        assert words in stalled.message


def test_a_long_list_of_causes_leaves_room_for_each() -> None:
    taken = replace(TAKEN, message=f"{TAKEN.message}{' and so on' * 200}")
    probes = ProbePlan(fault="configmap/prompts does not exist")
    stalled = told(running(OBJ, "auto", rejections=(taken,), probes=probes), "Stalled")
    assert len(stalled.message) <= MAX_MESSAGE
    assert "configmap/prompts does not exist" in stalled.message
    s = running(OBJ, "auto", rejections=(taken,), probes=probes)
    again = replace(s, status=decide(s).status)
    assert [one.reason for one in decide(again).events] == []


def test_a_refusal_is_one_event_and_not_one_each_reconcile() -> None:
    s: Any = snapshot(OBJ, rejections=(TAKEN,))
    first = decide(s)
    assert [event.reason for event in first.events if event.type == "Warning"] == ["NameTaken"]
    again = decide(snapshot(OBJ, status=first.status, rejections=(TAKEN,)))
    assert again.events == ()


def test_the_reason_for_fewer_scrapes_of_an_engine_is_reported() -> None:
    why = {"b": "http://10.0.0.2:8000/metrics: more than 16384 lines", "a": "http://10.0.0.1:8000/metrics: HTTP 500"}
    assert "less often" not in told(running(OBJ, "auto"), "MetricsAvailable").message
    message = told(running(OBJ, "auto", backed_off=why), "MetricsAvailable").message
    assert "2 pods are scraped less often; a: http://10.0.0.1:8000/metrics: HTTP 500" in message


def test_a_pod_with_implausible_metrics_is_named_with_its_figure() -> None:
    s = running(OBJ, "auto")
    seen = tuple(
        replace(one, pods=3, implausible=("liar: KV use is 27% while nothing runs",))
        for one in samples(usage=0.3, waiting=0)
    )
    message = told(replace(s, samples={s.traffic: seen}), "MetricsAvailable").message
    assert "left out for implausible metrics: liar: KV use is 27% while nothing runs" in message
