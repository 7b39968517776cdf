"""The node agent derives a pod's status from the states of its containers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_localcluster.backoff import Backoff
from kvpilot_localcluster.podstatus import ContainerView, Run, container_status, phase, pod_status
from kvpilot_localcluster.worker import restarts

NEVER = ContainerView("c", "i")
RUNNING = ContainerView("c", "i", None, Run("r0", 10.0), ready=True, started=True)
FINE = ContainerView("c", "i", None, Run("r0", 10.0, 20.0))
FAILED = ContainerView("c", "i", None, Run("r0", 10.0, 20.0, 3, message="why"))
BACKING_OFF = ContainerView("c", "i", ("CrashLoopBackOff", "10s"), Run("r1", 10.0, 20.0, 3), Run("r0", 1.0, 2.0, 4), 1)
VIEWS = st.sampled_from([NEVER, RUNNING, FINE, FAILED, BACKING_OFF])


def status(*mains: ContainerView, inits: list[ContainerView] | None = None, going: bool = False, **pod: Any) -> Any:
    body = {"spec": {"restartPolicy": "Always", **pod.pop("spec", {})}, "status": pod.pop("status", {})}
    return pod_status(
        body, inits or [], mains, address="127.0.1.1", host="127.0.0.1", started=5.0, now=100.0, going=going
    )


def conditions(found: Any) -> dict[str, str]:
    return {one["type"]: one["status"] for one in found["conditions"]}


def test_a_running_pod_with_ready_containers_is_ready() -> None:
    found = status(RUNNING)
    assert found["phase"] == "Running"
    assert set(conditions(found).values()) == {"True"}
    assert found["podIPs"] == [{"ip": "127.0.1.1"}]


def test_a_terminating_pod_is_not_ready_even_if_its_containers_are() -> None:
    found = conditions(status(RUNNING, going=True))
    assert (found["Ready"], found["ContainersReady"]) == ("False", "True")


def test_an_unfinished_init_container_keeps_the_pod_pending() -> None:
    found = status(NEVER, inits=[RUNNING])
    assert found["phase"] == "Pending"
    assert conditions(found)["Initialized"] == "False"


def test_a_restarting_container_has_its_last_termination_state() -> None:
    found = container_status(BACKING_OFF)
    assert found["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "10s"}}
    assert found["lastState"]["terminated"]["exitCode"] == 3
    assert found["restartCount"] == 1


def test_a_termination_state_has_exit_code_and_message() -> None:
    assert container_status(FAILED)["state"]["terminated"] == {
        "exitCode": 3,
        "reason": "Error",
        "message": "why",
        "startedAt": "1970-01-01T00:00:10Z",
        "finishedAt": "1970-01-01T00:00:20Z",
        "containerID": "r0",
    }


def test_a_condition_that_has_not_changed_keeps_its_time() -> None:
    old = [{"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}]
    found = {
        one["type"]: one["lastTransitionTime"] for one in status(RUNNING, status={"conditions": old})["conditions"]
    }
    assert found["Ready"] == "2020-01-01T00:00:00Z"
    assert found["ContainersReady"] == "1970-01-01T00:01:40Z"


def test_a_closed_readiness_gate_keeps_the_pod_unready() -> None:
    found = conditions(status(RUNNING, spec={"readinessGates": [{"conditionType": "my.io/gate"}]}))
    assert (found["Ready"], found["ContainersReady"]) == ("False", "True")


@given(
    st.sampled_from(["Always", "OnFailure", "Never"]),
    st.lists(VIEWS, max_size=3),
    st.lists(VIEWS, min_size=1, max_size=3),
)
def test_a_pod_is_ready_only_when_it_runs(policy: str, inits: list[ContainerView], mains: list[ContainerView]) -> None:
    found = status(*mains, inits=inits, spec={"restartPolicy": policy})
    assert found["phase"] == phase(policy, inits, mains)
    if conditions(found)["Ready"] == "True":
        assert all(view.running for view in mains)
    if found["phase"] in ("Succeeded", "Failed"):
        assert conditions(found)["Ready"] == "False"


def test_a_pod_without_restarts_succeeds_when_all_containers_do() -> None:
    assert phase("Never", [], [FINE, FINE]) == "Succeeded"
    assert phase("Never", [], [FINE, FAILED]) == "Failed"
    assert phase("Never", [], [FINE, RUNNING]) == "Running"
    assert phase("Always", [], [FINE]) == "Running"


def test_the_restart_policy_decides_if_an_ended_container_restarts() -> None:
    assert [restarts(policy, code) for policy in ("Always", "OnFailure", "Never") for code in (0, 1)] == [
        *(True, True),
        *(False, True),
        *(False, False),
    ]


def test_back_off_starts_at_once_then_doubles_to_its_cap() -> None:
    delays = [Backoff().delay([1.0] * crashes) for crashes in range(1, 9)]
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]


def test_a_long_run_resets_the_back_off() -> None:
    assert Backoff().delay([1.0, 1.0, 1.0, 600.0]) == 0
    assert Backoff().delay([1.0, 1.0, 600.0, 1.0]) == 10


@given(st.lists(st.floats(0, 1000), max_size=5000))
def test_back_off_stays_within_its_bounds(runs: list[float]) -> None:
    assert 0 <= Backoff().delay(runs) <= 300
