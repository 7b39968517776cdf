"""The operator reads from a container's last output why an engine did not start, even if that output is malformed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.diagnosis import MAX_RESTARTS, engine_failure, pending_reason
from kvpilot_operator.observe.views import pod_view
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import PodView


def pod(exit_message: str | None, *, ready: bool = False, restarts: int = 1) -> PodView:
    return PodView(
        name="a", revision="r1", ip="10.0.0.1", node="n", ready=ready, terminating=False, restarts=restarts,
        waiting_reason=None, exit_message=exit_message, unschedulable=None, uid="u",
    )  # fmt: skip


def refused(**said: object) -> str:
    return "loading\n" + json.dumps({"kvpilot": "refused", **said}) + "\n"


def test_the_refusal_of_preflight_is_reported_unchanged() -> None:
    said = refused(reason="DoesNotFit", message="weights need 14,904 MiB")
    assert engine_failure([pod(said)]) == Cause("DoesNotFit", "weights need 14,904 MiB")


def test_an_answering_engine_has_not_failed_whatever_its_last_message() -> None:
    assert engine_failure([pod(refused(reason="DoesNotFit"), ready=True)]) is None


def test_an_engine_that_keeps_ending_without_a_message_has_crashed() -> None:
    assert engine_failure([pod("Killed", restarts=MAX_RESTARTS - 1)]) is None
    failure = engine_failure([pod("Killed", restarts=MAX_RESTARTS)])
    assert failure is not None
    assert failure.reason == "EngineCrashed"


@pytest.mark.parametrize("reason", ["", "does not fit", "9Lives", "A" * 65, None, {"a": 1}, "Bad\nLine"])
def test_an_invalid_reason_of_an_engine_becomes_engine_crashed(reason: object) -> None:
    failure = engine_failure([pod(refused(reason=reason, message="why"))])
    assert failure == Cause("EngineCrashed", "why")


def test_a_lone_surrogate_is_replaced_in_the_status() -> None:
    failure = engine_failure([pod('{"kvpilot": "refused", "reason": "DoesNotFit", "message": "a\\ud800b"}')])
    assert failure == Cause("DoesNotFit", "a?b")


@given(st.text() | st.sampled_from(["[" * 3000, "{" * 3000, '"refused"', '"refused", "message": null}']))
def test_any_exit_message_is_handled_without_an_error(words: str) -> None:
    failure = engine_failure([pod('{"kvpilot": ' + words, restarts=MAX_RESTARTS)])
    assert failure is not None
    failure.message.encode()


def observed(**containers: dict[str, object]) -> PodView:
    """Return the view of a pod whose containers are in these states; `fetch` is an init container."""
    statuses = [{"name": name, "state": state} for name, state in containers.items()]
    init = [one for one in statuses if one["name"] == "fetch"]
    status = {"initContainerStatuses": init, "containerStatuses": [one for one in statuses if one not in init]}
    return pod_view({"metadata": {"name": "a"}, "status": status})


def waits(reason: str, message: str = "") -> dict[str, object]:
    return {"waiting": {"reason": reason, "message": message}}


def test_a_container_that_delays_the_engine_is_named_with_its_reason() -> None:
    running: dict[str, object] = {"running": {}}
    held = observed(fetch=waits("ImagePullBackOff", "no such image"), engine=waits("PodInitializing"))
    assert pending_reason([held]) == Cause("ImageUnavailable", "ImagePullBackOff: container fetch: no such image")
    held = observed(engine=running, proxy=waits("CrashLoopBackOff", "back-off"))
    assert pending_reason([held]) == Cause("CrashLoopBackOff", "container proxy: back-off")


@pytest.mark.parametrize(
    ("said", "reason", "told"),
    [
        ('secret "hf-token" not found', "ConfigMissing", "Secret hf-token does not exist: create it"),
        ('configmap "flags" not found', "ConfigMissing", "ConfigMap flags does not exist: create it"),
        (
            "couldn't find key token in Secret models/hf-token",
            "ConfigMissing",
            "Secret hf-token has no key token: add it",
        ),
        (
            "couldn't find key x.y in ConfigMap models/flags",
            "ConfigMissing",
            "ConfigMap flags has no key x.y: add it",
        ),
        ("container has runAsNonRoot and image will run as root", "CreateContainerConfigError", "container has run"),
    ],
)
def test_a_missing_secret_or_config_map_of_a_container_is_named(said: str, reason: str, told: str) -> None:
    cause = pending_reason([observed(engine=waits("CreateContainerConfigError", said))])
    assert cause is not None
    assert (cause.reason, cause.message.startswith(told), said in cause.message) == (reason, True, True)


@given(st.text())
def test_every_message_of_a_kubelet_about_a_container_is_reported(said: str) -> None:
    cause = pending_reason([observed(engine=waits("CreateContainerConfigError", said))])
    assert cause is not None


def test_a_normally_starting_container_is_not_reported_as_a_cause() -> None:
    on_its_way = observed(fetch={"running": {}}, engine=waits("PodInitializing"), proxy=waits("PodInitializing"))
    assert on_its_way.held_up is None
    assert pending_reason([on_its_way]) == Cause("PodInitializing", "")
    stuck = observed(engine=waits("ErrImagePull", "no such image"), proxy=waits("ContainerCreating"))
    assert pending_reason([stuck]) == Cause("ImageUnavailable", "ErrImagePull: no such image")


def starting(volumes: list[dict[str, Any]], **state: Any) -> PodView:
    """Return the view of a pod on a node with these volumes, whose engine is in this state."""
    status = {"containerStatuses": [{"name": "engine", **state}]}
    spec = {"nodeName": "a", "volumes": volumes}
    return pod_view({"metadata": {"name": "chat-1"}, "spec": spec, "status": status})


VOLUMES: list[dict[str, Any]] = [
    {"name": "shm", "emptyDir": {}},
    {"name": "model", "persistentVolumeClaim": {"claimName": "models"}},
    {"name": "tls", "secret": {"secretName": "certificates"}},
    {"name": "maybe", "secret": {"secretName": "extra", "optional": True}},
    {
        "name": "both",
        "projected": {"sources": [{"configMap": {"name": "templates"}}, {"secret": {"name": "certificates"}}]},
    },
]


def test_a_pod_without_a_started_container_is_reported_with_the_objects_of_its_volumes() -> None:
    creating = {"waiting": {"reason": "ContainerCreating"}}
    cause = pending_reason([starting(VOLUMES, state=creating)])
    assert cause is not None
    assert cause.reason == "ContainerCreating"
    needs = "PersistentVolumeClaim models, Secret certificates, ConfigMap templates."
    assert f"It needs {needs}" in cause.message
    assert "kubectl describe pod" in cause.message
    assert "It needs" not in pending_reason([starting([], state=creating)]).message
    again = starting(VOLUMES, state=creating, lastState={"terminated": {"exitCode": 1, "message": "no room"}})
    assert pending_reason([again]) == Cause("ContainerCreating", "no room")


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ('running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded', "ClaimNotBound"),
        ("binding rejected: the object has been modified", None),
    ],
)
def test_only_scheduler_errors_about_volumes_are_reported(message: str, cause: str | None) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": message}
    pod = pod_view({"metadata": {"name": "a"}, "status": {"conditions": [scheduled]}})
    assert pending_reason([pod]) == (Cause(cause, message) if cause else None)


@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated"])
def test_a_pod_without_a_node_is_reported_with_the_schedulers_message(reason: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "no room"}
    pod = pod_view({"metadata": {"name": "a"}, "status": {"conditions": [scheduled]}})
    assert pending_reason([pod]) == Cause("Unschedulable", "no room")


def test_a_sidecars_exit_message_is_not_taken_for_the_engines() -> None:
    said = '{"kvpilot": "refused", "reason": "DoesNotFit", "message": "no"}'
    pod = observed(engine={"running": {}}, proxy=waits("CrashLoopBackOff", said))
    assert engine_failure([pod]) is None
