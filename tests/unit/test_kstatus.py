"""What tools that wait conclude from a service: kstatus' rules, Argo CD's script and Flux's expressions over each state
of docs/conditions.md. The rows of its table are the expectations here.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import msgspec
import pytest
import yaml
from celpy.evaluation import CELEvalError
from lupa import lua51

from kvpilot_operator.api.schema import load_crd
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.render.names import SERVICE_LABEL
from kvpilot_operator.state.questions import Question, unanswered
from kvpilot_operator.state.snapshot import Parent
from kvpilot_operator.state.status import Denied, dump_status
from support.failing_questions import failing
from support.kstatus import compute, seen
from support.model_cluster import ModelCluster
from support.services import KEY, manifest, revision_of
from support.trials import NEW, OLD, ended, on_trial, service, stage

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conditions.md").read_text()
QUOTA = "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1"
STATES: dict[str, Callable[[], dict[str, Any]]] = {}


def state(name: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def add(made: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        STATES[name] = cache(made)
        return made

    return add


def settled(**cluster: Any) -> ModelCluster:
    made = ModelCluster(service(OLD, 2), **cluster)
    made.settle()
    return made


def after(cluster: ModelCluster, ticks: int = 3) -> dict[str, Any]:
    for _ in range(ticks):
        cluster.tick()
    return seen(cluster)


def of_an_engine(**changes: Any) -> dict[str, Any]:
    """A new service whose one pod does not come up: its kubelet says why."""
    cluster = ModelCluster(service(OLD, 1), starts=False)
    pods = cluster._pods
    cluster._pods = lambda: [replaced(view, **changes) for view in pods()]
    return after(cluster)


def replaced(view: Any, **changes: Any) -> Any:
    made = copy.copy(view)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@state("no operator has seen it")
def _() -> dict[str, Any]:
    return service(OLD)


@state("its first engines start")
def _() -> dict[str, Any]:
    return after(ModelCluster(service(OLD, 2), starts=False))


@state("no node has room for an engine")
def _() -> dict[str, Any]:
    return of_an_engine(unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu")


@state("the image cannot be pulled")
def _() -> dict[str, Any]:
    return of_an_engine(waiting_reason="ImagePullBackOff", exit_message="no such image")


@state("a sidecar crashes before the engine answers")
def _() -> dict[str, Any]:
    return of_an_engine(
        waiting_reason="PodInitializing", held_up=("CrashLoopBackOff", "container proxy: no certificate")
    )


@state("the engine refuses to start")
def _() -> dict[str, Any]:
    said = json.dumps({"kvpilot": "refused", "reason": "DoesNotFit", "message": "weights need 14,904 MiB"})
    return of_an_engine(exit_message=said, restarts=1)


@state("it serves, and nothing is under way")
def _() -> dict[str, Any]:
    return seen(settled())


@state("the newest spec was not read yet")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.edit(service(NEW, 2))
    return seen(cluster)


@state("the spec is refused")
def _() -> dict[str, Any]:
    cluster = settled()
    broken = copy.deepcopy(cluster.obj)
    broken["spec"]["kvCache"] = {**broken["spec"]["kvCache"], "dtype": None, "mode": "Sometimes"}
    cluster.edit(broken)
    return after(cluster)


def trial(where: str, **changes: Any) -> ModelCluster:
    cluster = on_trial(2, **changes)
    cluster.until(stage(where))
    return cluster


@state("a canary is probed")
def _() -> dict[str, Any]:
    return seen(trial("Probing"))


@state("a canary has a share of the traffic")
def _() -> dict[str, Any]:
    return seen(trial("Shifting"))


@state("a canary is promoted")
def _() -> dict[str, Any]:
    return seen(trial("Promoting"))


@state("a canary is rolled back")
def _() -> dict[str, Any]:
    return seen(trial("RollingBack", cluster={"bad": frozenset([NEW])}))


@state("the canary is promoted and pods of the old revision leave")
def _() -> dict[str, Any]:
    cluster = on_trial(2)
    cluster.until(ended)
    return seen(cluster)


@state("a canary is paused")
def _() -> dict[str, Any]:
    cluster = trial("Probing")
    cluster.edit(service(NEW, 2, paused=True))
    return after(cluster)


@state("a change of the spec waits for a pause to end")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(OLD, 2, paused=True))
    cluster.settle()
    cluster.edit(service(NEW, 2, paused=True))
    return after(cluster)


@state("answers have drifted, and the way back is paused")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(NEW, 2, paused=True))
    cluster.settle()
    spec, status = cluster.snapshot().spec, cluster.parsed()
    drifted = Denied(
        dtype=NEW, model=spec.model.source, image=spec.engine.image, gpu="cpu", reason="AccuracyDrifted",
        recent_tokens=spec.kv_cache.recent_tokens_of(NEW), message="worse", until=cluster.now + timedelta(days=7),
    )  # fmt: skip
    kept = msgspec.structs.replace(status.kv_cache, denied=(drifted,))
    cluster.status = dump_status(msgspec.structs.replace(status, kv_cache=kept))
    return after(cluster)


@state("a Fixed dtype is denied, the last good one serves")
def _() -> dict[str, Any]:
    cluster = on_trial(2, cluster={"bad": frozenset([NEW])})
    cluster.until(ended)
    return after(cluster)


@state("a change of the spec was rolled back")
def _() -> dict[str, Any]:
    cluster = on_trial(2, cluster={"slow": {NEW: 1.6}})
    cluster.until(ended)
    return after(cluster)


@state("a step of mode Auto was rolled back")
def _() -> dict[str, Any]:
    ladder = {"mode": "Auto", "ladder": [NEW], "pressure": {"sustainedSeconds": 30}}
    replicas = {"mode": "External", "minReplicas": 1, "maxReplicas": 4}
    cluster = ModelCluster(manifest(kvCache=ladder, scaling=replicas), bad=frozenset([NEW]), demand=9000)
    cluster.until(ended)
    assert cluster.parsed().last_canary.stage == "RolledBack"
    return after(cluster)


@state("no canary can be started")
def _() -> dict[str, Any]:
    cluster = ModelCluster(service(OLD, 2, routeRef={"name": "web"}))
    cluster.settle()
    cluster.edit(service(NEW, 2, routeRef={"name": "web"}))
    return after(cluster)


def with_route(*parents: Parent) -> dict[str, Any]:
    cluster = ModelCluster(manifest(route={"parentRefs": [{"name": "web"}]}), parents=parents)
    cluster.settle()
    return after(cluster)


@state("a Gateway has said nothing of its route")
def _() -> dict[str, Any]:
    return with_route(Parent("Gateway team/web", None))


@state("a Gateway does not take its route")
def _() -> dict[str, Any]:
    return with_route(Parent("Gateway team/web", False, "NotAllowedByListeners: of another namespace"))


@state("the API server refuses an object")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.refuses = lambda one: QUOTA if one["kind"] == "Deployment" else None
    cluster.edit(service(OLD, 3))
    return after(cluster)


@state("a probe set is missing")
def _() -> dict[str, Any]:
    return after(settled(probe_fault="configmap/prompts does not exist"))


@state("replicas are added")
def _() -> dict[str, Any]:
    cluster = settled(start_ticks=10)
    cluster.edit(service(OLD, 3))
    return after(cluster)


@state("a replica has crashed again and again")
def _() -> dict[str, Any]:
    cluster = settled()
    pods = cluster._pods
    down = {
        "ready": False,
        "containers_ready": False,
        "restarts": 3,
        "exit_message": "CUDA error: uncorrectable ECC error",
    }
    cluster._pods = lambda: [replaced(one, **(down if number else {})) for number, one in enumerate(pods())]
    return after(cluster)


@state("it is scaled to 0")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.edit(service(OLD, 0))
    return after(cluster, 20)


@state("a question of the last reconcile had no answer")
def _() -> dict[str, Any]:
    cluster = settled()
    cluster.unread = (unanswered(Question.NODE, ClusterError("GET", "/x", 403, "forbidden")),)
    return after(cluster)


@state("it is being deleted")
def _() -> dict[str, Any]:
    obj = seen(settled())
    return {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": "2026-11-21T12:00:00Z"}}


def rows() -> dict[str, list[str]]:
    table = PAGE.partition("| state |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


def shown(obj: dict[str, Any], kind: str) -> str:
    one = next((one for one in obj.get("status", {}).get("conditions", ()) if one["type"] == kind), None)
    if one is None:
        return "-"
    return (
        one["status"]
        if one["status"] == "False" and kind in ("Reconciling", "Stalled")
        else f"{one['status']} `{one['reason']}`"
    )


@cache
def example(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((ROOT / "examples" / "gitops" / name).read_text())
    return found


def argo(obj: dict[str, Any]) -> tuple[str, str]:
    """Argo CD's verdict and words, by the script in the Lua that Argo CD speaks."""
    if obj["metadata"].get("deletionTimestamp"):
        return "Progressing", ""  # Argo CD asks no script then
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    (script,) = example("argocd-cm.yaml")["data"].values()
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    health = lua.execute(script)
    return health["status"], health["message"]


def flux(obj: dict[str, Any]) -> str:
    """Flux's verdict by the expressions, in the order in which Flux asks them."""
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    (check,) = example("flux-kustomization.yaml")["spec"]["healthCheckExprs"]
    assert (check["apiVersion"], check["kind"]) == (obj["apiVersion"], obj["kind"])
    environment = celpy.Environment()
    for word in ("inProgress", "failed", "current"):
        program = environment.program(environment.compile(check[word]))
        try:
            if program.evaluate({key: celpy.json_to_cel(value) for key, value in obj.items()}):
                return word[0].upper() + word[1:]
        except CELEvalError:
            return "InProgress"  # a field that is not there: Flux waits
    return "InProgress"


def columns(obj: dict[str, Any]) -> dict[str, Any]:
    """What kubectl get shows in the columns that stand there without -o wide; None is an empty cell."""
    shown = {}
    for column in load_crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        if not column.get("priority"):
            condition = re.fullmatch(r'\.status\.conditions\[\?\(@\.type=="(\w+)"\)\]\.(\w+)', column["jsonPath"])
            if condition is None:
                path = column["jsonPath"].strip(".").split(".")
                shown[column["name"]] = functools.reduce(lambda part, name: (part or {}).get(name), path, obj)
            else:
                shown[column["name"]] = next(
                    (
                        one[condition[2]]
                        for one in obj.get("status", {}).get("conditions", ())
                        if one["type"] == condition[1]
                    ),
                    None,
                )
    return shown


def test_each_state_has_a_row_and_each_row_a_state() -> None:
    assert list(rows()) == list(STATES)


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_told_as_its_row_says(name: str) -> None:
    obj = STATES[name]()
    told = [shown(obj, kind) for kind in ("Ready", "Reconciling", "Stalled")]
    assert [*told, compute(obj), argo(obj)[0], flux(obj)] == rows()[name]


@pytest.mark.parametrize("name", STATES)
def test_what_holds_a_service_up_is_said_in_the_words_of_the_condition_that_causes_it(name: str) -> None:
    obj = STATES[name]()
    conditions = {one["type"]: one for one in obj.get("status", {}).get("conditions", ())}
    for kind in ("Reconciling", "Stalled"):
        one = conditions.get(kind)
        if one is None or one["status"] == "False":
            continue
        assert one["message"]
        assert argo(obj)[1] in (one["message"], "the operator has not acted on the newest spec yet")
        own = one["reason"] in ("Scaling", "EngineCrashed", "Leaving")
        assert own or [
            other for other in conditions.values() if other["message"] == one["message"] and other is not one
        ]


@pytest.mark.parametrize("name", STATES)
def test_conditions_and_status_say_of_which_generation_they_are(name: str) -> None:
    status = STATES[name]().get("status", {})
    for one in status.get("conditions", ()):
        assert one["observedGeneration"] == status["observedGeneration"]


@pytest.mark.parametrize("name", STATES)
def test_a_service_that_has_settled_serves_the_revision_that_its_spec_asks_for(name: str) -> None:
    status = STATES[name]().get("status", {})
    if "observedRevision" not in status:
        assert name == "no operator has seen it"
        return
    elsewhere = {
        "a canary is probed", "a canary has a share of the traffic", "a canary is promoted", "a canary is rolled back",
        "a canary is paused", "a change of the spec waits for a pause to end", "a change of the spec was rolled back",
        "a Fixed dtype is denied, the last good one serves", "no canary can be started",
    }  # fmt: skip
    assert (status["observedRevision"] != status["stable"]["revision"]) == (name in elsewhere)


@pytest.mark.parametrize("name", STATES)
def test_the_address_is_told_wherever_the_service_of_that_name_exists(name: str) -> None:
    url = STATES[name]().get("status", {}).get("url")
    assert url == (None if name == "no operator has seen it" else f"http://{KEY.name}.{KEY.namespace}.svc")


def test_no_address_is_told_while_the_name_is_somebody_elses() -> None:
    cluster = ModelCluster(service(OLD, 2), refuses=lambda one: "taken" if one["kind"] == "Service" else None)
    assert "url" not in after(cluster)["status"]
    cluster.refuses = lambda _: None
    assert "url" in after(cluster, 40)["status"]


def test_the_revision_asked_for_is_kept_while_a_spec_is_refused_and_changes_with_the_next_good_one() -> None:
    cluster = settled()
    good = cluster.status["observedRevision"]
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    assert after(cluster)["status"]["observedRevision"] == good
    cluster.edit(service(NEW, 2))
    assert after(cluster)["status"]["observedRevision"] == revision_of(cluster.obj, NEW)


@pytest.mark.parametrize("name", STATES)
def test_the_columns_of_kubectl_get_tell_a_canary_from_calm(name: str) -> None:
    obj = STATES[name]()
    row = columns(obj)
    on_trial = "canary" in obj.get("status", {})
    assert on_trial == (row["Canary"] is not None)
    assert on_trial == str(row["Reason"]).startswith("Canary")


@pytest.mark.parametrize(
    "question",
    sorted(
        set(Question) - {Question.ROUTE, Question.POOLS, Question.PROBE_SETS, Question.NODE, Question.PREFETCH},
    ),
)
def test_whatever_question_fails_a_service_is_neither_current_nor_stalled_until_it_is_answered(
    question: Question,
) -> None:
    cluster = settled(unanswered=(question,))
    with failing([question]):
        cluster.tick()
    assert compute(seen(cluster)) == "InProgress"
    after(cluster, 5)
    assert compute(seen(cluster)) == "Current"


def test_a_refused_spec_stalls_whatever_could_not_be_observed() -> None:
    cluster = settled()
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    cluster.unread = (unanswered(Question.NODE, ClusterError("GET", "/x", 403, "forbidden")),)
    assert compute(after(cluster)) == "Failed"


def test_a_service_whose_requests_go_elsewhere_is_not_current_until_that_is_mended() -> None:
    cluster = settled()
    cluster.services[KEY.name] = {SERVICE_LABEL: KEY.name}
    obj = after(cluster, 1)
    assert (compute(obj), shown(obj, "Reconciling")) == ("InProgress", "True `TrafficMoving`")
    assert compute(after(cluster)) == "Current"


def test_the_two_conditions_stand_after_progressing_whatever_happened() -> None:
    cluster = settled()
    order = [one["type"] for one in cluster.status["conditions"]]
    assert order[:5] == ["Ready", "Available", "Progressing", "Reconciling", "Stalled"]
    cluster.unanswered = (Question.SUMMARY,)
    with failing([Question.SUMMARY]):
        cluster.tick()
    assert [one["type"] for one in cluster.status["conditions"]] == order


@pytest.mark.parametrize(
    ("meta", "status", "word"),
    [
        ({"generation": 1}, {}, "Current"),
        ({"generation": 2}, {"observedGeneration": 1, "conditions": [("Stalled", "True")]}, "InProgress"),
        ({"generation": 1, "deletionTimestamp": "t"}, {"conditions": [("Stalled", "True")]}, "Terminating"),
        ({"generation": 1}, {"conditions": [("Ready", "True"), ("Stalled", "True")]}, "Failed"),
        ({"generation": 1}, {"conditions": [("Ready", "True"), ("Reconciling", "True")]}, "InProgress"),
        ({"generation": 1}, {"conditions": [("Stalled", "True"), ("Reconciling", "True")]}, "Failed"),
        ({"generation": 1}, {"conditions": [("Stalled", "False"), ("Reconciling", "Unknown")]}, "Current"),
        ({"generation": 1}, {"conditions": [("Ready", "False")]}, "InProgress"),
        ({"generation": 1}, {"conditions": [("Ready", "Unknown")]}, "InProgress"),
        ({}, {"observedGeneration": 1, "conditions": [("Ready", "True")]}, "Current"),
    ],
)
def test_the_rules_are_those_of_kstatus(meta: dict[str, Any], status: dict[str, Any], word: str) -> None:
    conditions = [{"type": kind, "status": said} for kind, said in status.get("conditions", ())]
    assert compute({"metadata": meta, "status": {**status, "conditions": conditions}}) == word


def test_argos_key_is_the_kind_of_ours() -> None:
    (key,) = example("argocd-cm.yaml")["data"]
    obj = manifest()
    assert key == f"resource.customizations.health.{obj['apiVersion'].partition('/')[0]}_{obj['kind']}"
    assert KEY.name == obj["metadata"]["name"]


def test_a_status_of_an_older_operator_without_the_two_conditions_is_judged_by_ready() -> None:
    obj = copy.deepcopy(STATES["it serves, and nothing is under way"]())
    obj["status"]["conditions"] = [
        one for one in obj["status"]["conditions"] if one["type"] not in ("Reconciling", "Stalled")
    ]
    assert (compute(obj), argo(obj)[0], flux(obj)) == ("Current", "Healthy", "Current")
