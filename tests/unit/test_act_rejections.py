"""A rejection by the API server is reported within one reconcile, delays nothing else, and is retried."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.act.rejections import BACKOFF
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError, Rejected
from kvpilot_operator.state.decision import Decision, Objects
from kvpilot_probes.codec import Baseline
from support.memory_api import MemoryApi, Operator
from support.services import manifest, revision_of, snapshot

OBJ = manifest(kvCache={"mode": "Fixed", "dtype": "auto"}, scaling={"mode": "External"})
NEWER = manifest(
    kvCache={"mode": "Fixed", "dtype": "auto"}, scaling={"mode": "External"}, engine={"image": "kvpilot/runtime:2"}
)
QUOTA = "exceeded quota: team, requested: count/deployments.apps=1, used: x=0, limited: x=0"
FIELD = "spec.template.spec.containers[0].resources.requests"
WORDS = 'Invalid value: "2Gi": must be less than or equal to memory limit'


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    one = Operator(MemoryApi(), OBJ)
    yield one
    await one.close()


def refusing(kind: str, message: str = QUOTA, **more: Any) -> Callable[[Object], Rejected | None]:
    def refuses(written: Object) -> Rejected | None:
        return Rejected("PATCH", "/x", 403, message, "Forbidden", **more) if written.get("kind") == kind else None

    return refuses


def nothing(_: Object) -> None:
    return None


async def test_after_the_next_reconcile_the_conditions_name_a_refusal_and_its_field(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment", f"{FIELD}: {WORDS}", causes=((FIELD, WORDS),))
    await operator.reconcile()
    await operator.reconcile(0)
    for condition in map(operator.condition, ("Stalled", "Ready", "Serving")):
        assert condition.reason == "Forbidden"
        assert condition.message.startswith(f"{FIELD}: {WORDS} (Deployment chat-")


async def test_a_refusal_does_not_stop_the_writes_of_other_objects(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment")
    await operator.reconcile()
    assert ("Service", "chat") in operator.api.objects


async def test_a_refused_write_is_retried_with_growing_pauses_up_to_a_minute(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment")
    times: list[float] = []
    for _ in range(200):
        before = len(operator.api.asked)
        await operator.reconcile(5)
        if any(one[1] == "Deployment" and one[0] == "apply" for one in operator.api.asked[before:]):
            times.append(operator.now.timestamp())
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert waits == sorted(waits)
    assert waits[0] <= 10
    assert waits[-1] == BACKOFF.last


async def test_a_changed_spec_is_written_at_once_and_an_accepted_write_clears_the_condition(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment")
    for _ in range(60):
        await operator.reconcile()
    operator.api.refuses = nothing
    operator.edit(NEWER)
    await operator.reconcile(0)
    assert ("Deployment", f"chat-{revision_of(NEWER, 'auto')}") in operator.api.objects
    await operator.reconcile()
    assert operator.condition("Stalled").status == "False"
    operator.api.run_engines()
    await operator.reconcile()
    assert operator.condition("Ready").status == "True"


async def test_a_refused_object_with_new_content_is_written_at_once(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment")
    for _ in range(60):
        await operator.reconcile()
    asked = len(operator.api.asked)
    operator.edit({**OBJ, "spec": {**OBJ["spec"], "replicas": 3}})
    await operator.reconcile(0)
    assert "Deployment" in [kind for _, kind, _ in operator.api.asked[asked:]]


async def test_a_restart_of_the_operator_keeps_refusals_in_the_status(operator: Operator) -> None:
    operator.api.refuses = refusing("Deployment")
    for _ in range(3):
        await operator.reconcile()
    told = operator.condition("Stalled")
    assert told.reason == "Forbidden"
    operator.restart()
    for _ in range(3):
        await operator.reconcile()
        assert operator.condition("Stalled") == told
        assert operator.condition("Ready").reason == "Forbidden"


async def test_a_refusal_of_an_object_that_is_no_longer_wanted_is_forgotten(operator: Operator) -> None:
    for _ in range(2):
        await operator.reconcile()
        operator.api.run_engines()
    await operator.reconcile()
    # A quota refuses only new objects.
    new, quota = f"chat-{revision_of(NEWER, 'auto')}", refusing("Deployment")
    operator.api.refuses = lambda one: quota(one) if one.get("metadata", {}).get("name") == new else None
    operator.edit(NEWER)
    for _ in range(3):
        await operator.reconcile()
    assert "exceeded quota" in operator.condition("Reconciling").message
    assert (operator.condition("Ready").status, operator.condition("Serving").status) == ("False", "True")
    operator.edit(OBJ)
    for _ in range(3):
        await operator.reconcile()
    assert "exceeded quota" not in operator.condition("Reconciling").message
    assert operator.condition("Stalled").status == "False"


@pytest.mark.parametrize(
    "error", [Rejected("PATCH", "/x", 422, QUOTA, "Invalid"), ClusterError("PATCH", "/x", 500, "")]
)
async def test_the_serving_revision_is_repaired_even_if_writes_of_a_trial_fail(
    operator: Operator, error: ClusterError
) -> None:
    for _ in range(2):
        await operator.reconcile()
        operator.api.run_engines()
    await operator.reconcile()
    serving = f"chat-{revision_of(OBJ, 'auto')}"

    def refuses(written: Object) -> ClusterError | None:
        new = written.get("kind") == "Deployment" and written["metadata"]["name"] != serving
        return error if new else None

    operator.api.refuses = refuses
    operator.edit(NEWER)
    for _ in range(3):
        with suppress(ClusterError):
            await operator.reconcile()
    operator.api.drop("Service", "chat")
    deployment = operator.api.objects["Deployment", serving]
    operator.api.put({**deployment, "spec": {**deployment["spec"], "replicas": 0}})
    with suppress(ClusterError):
        await operator.reconcile()
    assert operator.api.objects["Service", "chat"]["spec"]["selector"]["kvpilot.io/revision"]
    assert operator.api.objects["Deployment", serving]["spec"]["replicas"] == 1


async def test_the_status_never_names_a_refused_baseline() -> None:
    api, s = MemoryApi(), snapshot(OBJ)
    api.refuses = refusing("ConfigMap")
    actor = Actor(api)  # type: ignore[arg-type]
    await actor.perform(s, Decision(s.status, Objects((), {}, frozenset()), Baseline("0123456789", "m", "auto", ())))
    refused = actor.rejections
    assert refused is not None
    assert [(one.kind, one.name) for one in refused] == [("ConfigMap", "chat-baseline-01234567")]
    assert [one[:2] for one in api.writes()] == [("create", "ConfigMap")]


async def test_a_refused_baseline_is_retried_with_growing_pauses_and_blocks_no_other_decision() -> None:
    api, s, now = MemoryApi(), snapshot(OBJ), [0.0]
    api.refuses = refusing("ConfigMap")
    actor = Actor(api, lambda: now[0])  # type: ignore[arg-type]
    tried = []
    for now[0] in map(float, range(400)):
        asked = len(api.asked)
        refused = actor.rejections
        # Like decide, accept a capture only while the API server accepts its ConfigMap.
        baseline = None if refused else Baseline("0123456789", "m", "auto", ())
        await actor.perform(s, Decision(s.status, Objects((), {}, frozenset()), baseline))
        if ("create", "ConfigMap", "chat-baseline-01234567") in api.asked[asked:]:
            tried.append(now[0])
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (5, BACKOFF.last)
    api.refuses = nothing
    now[0] += BACKOFF.last
    await actor.perform(s, Decision(s.status, None, Baseline("0123456789", "m", "auto", ())))
    assert actor.rejections == ()
    assert ("ConfigMap", "chat-baseline-01234567") in api.objects
