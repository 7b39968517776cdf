"""Verdicts of tools that wait for a service, for each state of docs/conditions.md.

The tools are kstatus' rules, Argo CD's script and Flux's expressions. The table of that page has the expected verdicts.
"""

import functools
import re
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from celpy.evaluation import CELEvalError
from lupa import lua51
from service_states import STATES, after, settled

from kvpilot_operator.api.names import SERVICE_LABEL
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.questions import Question, unanswered
from support.crd import load_crd
from support.failing_questions import decide, failing
from support.kstatus import compute, seen
from support.model_cluster import ModelCluster
from support.services import KEY, manifest, revision_of
from support.trials import NEW, OLD, service

ROOT = Path(__file__).parents[2]
TOLD = ("Ready", "Serving", "Reconciling", "Stalled")
PAGE = (ROOT / "docs" / "conditions.md").read_text()


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
    """Return Argo CD's status and message, from its Lua script in the Lua that Argo CD uses."""
    if obj["metadata"].get("deletionTimestamp"):
        return "Progressing", ""  # Argo CD does not run the script for an object that is being deleted
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    (script,) = example("argocd-cm.yaml")["data"].values()
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    health = lua.execute(script)
    return health["status"], health["message"]


def flux(obj: dict[str, Any]) -> str:
    """Return Flux's status from the expressions, in the order in which Flux evaluates them."""
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
            return "InProgress"  # Flux waits if a field is missing
    return "InProgress"


def columns(obj: dict[str, Any]) -> dict[str, Any]:
    """Return kubectl get's columns without -o wide; None is an empty cell."""
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


def test_the_docs_table_has_exactly_the_tested_states_of_a_service() -> None:
    assert list(rows()) == list(STATES)


@pytest.mark.parametrize("name", STATES)
def test_conditions_kstatus_argo_cd_and_flux_show_each_state_as_the_docs_say(name: str) -> None:
    obj = STATES[name]()
    told = [shown(obj, kind) for kind in TOLD]
    assert [*told, compute(obj), argo(obj)[0], flux(obj)] == rows()[name]


@pytest.mark.parametrize("name", STATES)
def test_ready_and_argo_cd_report_the_same_cause_of_a_delay(name: str) -> None:
    obj = STATES[name]()
    conditions = {one["type"]: one for one in obj.get("status", {}).get("conditions", ())}
    for kind in ("Reconciling", "Stalled"):
        one = conditions.get(kind)
        if one is None or one["status"] == "False":
            continue
        assert one["message"]
        assert argo(obj)[1] in (one["message"], "the operator has not acted on the newest spec yet")
        assert conditions["Ready"]["message"].startswith(one["message"])


@pytest.mark.parametrize("name", STATES)
def test_ready_is_true_exactly_if_reconciling_and_stalled_are_false(name: str) -> None:
    told = {one["type"]: one for one in STATES[name]().get("status", {}).get("conditions", ())}
    if told:
        causes = [told[kind] for kind in ("Stalled", "Reconciling") if told[kind]["status"] == "True"]
        assert (told["Ready"]["status"] == "True") == (not causes)
        assert all(told["Ready"]["reason"] == one["reason"] for one in causes)


@pytest.mark.parametrize("name", STATES)
def test_conditions_and_status_name_their_generation(name: str) -> None:
    status = STATES[name]().get("status", {})
    for one in status.get("conditions", ()):
        assert one["observedGeneration"] == status["observedGeneration"]


@pytest.mark.parametrize("name", STATES)
def test_a_ready_service_serves_the_revision_of_its_spec(name: str) -> None:
    status = STATES[name]().get("status", {})
    if "observedRevision" not in status:
        assert name == "no operator has seen it"
        return
    elsewhere = {
        "a canary is being probed", "a canary has a share of the traffic", "a canary is being promoted",
        "a canary is being rolled back", "a canary is paused", "a change of the spec waits for a pause to end",
        "a change of the spec was rolled back", "a Fixed dtype is denied, the last good one serves",
        "no canary can start", "a change of the spec waits for a probe set that is missing",
    }  # fmt: skip
    assert (status["observedRevision"] != status["stable"]["revision"]) == (name in elsewhere)


@pytest.mark.parametrize("name", STATES)
def test_a_service_with_another_revision_than_its_specs_is_not_ready(name: str) -> None:
    status = STATES[name]().get("status", {})
    if status.get("observedRevision") != status.get("stable", {}).get("revision"):
        (ready,) = [one for one in status["conditions"] if one["type"] == "Ready"]
        assert ready["status"] == "False"


@pytest.mark.parametrize("name", STATES)
def test_the_status_has_the_url_if_our_kubernetes_service_exists(name: str) -> None:
    url = STATES[name]().get("status", {}).get("url")
    assert url == (None if name == "no operator has seen it" else f"http://{KEY.name}.{KEY.namespace}.svc")


def test_the_status_has_no_url_while_another_owner_has_the_name() -> None:
    cluster = ModelCluster(service(OLD, 2), refuses=lambda one: "taken" if one["kind"] == "Service" else None)
    assert "url" not in after(cluster)["status"]
    cluster.refuses = lambda _: None
    assert "url" in after(cluster, 40)["status"]


def test_observed_revision_stays_while_a_spec_is_refused() -> None:
    cluster = settled()
    good = cluster.status["observedRevision"]
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    assert after(cluster)["status"]["observedRevision"] == good
    cluster.edit(service(NEW, 2))
    assert after(cluster)["status"]["observedRevision"] == revision_of(cluster.obj, NEW)


@pytest.mark.parametrize("name", STATES)
def test_the_columns_of_kubectl_get_show_a_canary(name: str) -> None:
    obj = STATES[name]()
    row = columns(obj)
    on_trial = "canary" in obj.get("status", {})
    assert on_trial == (row["Canary"] is not None)
    assert str(row["Reason"]).startswith("Canary") == (on_trial and row["Reason"] != "RolloutPaused")


@pytest.mark.parametrize("question", sorted({rule.question for rule in decide.RULES}))
def test_if_any_part_of_a_reconcile_fails_a_service_is_neither_current_nor_stalled(
    question: Question,
) -> None:
    cluster = settled(unanswered=(question,))
    with failing([question]):
        cluster.tick()
    assert compute(seen(cluster)) == "InProgress"
    after(cluster, 5)
    assert compute(seen(cluster)) == "Current"


def test_a_refused_spec_is_stalled_even_if_observations_fail() -> None:
    cluster = settled()
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    cluster.unread = (unanswered(Question.NODE, ClusterError("GET", "/x", 403, "forbidden")),)
    assert compute(after(cluster)) == "Failed"


def test_a_service_whose_selector_was_changed_is_not_current_until_it_is_repaired() -> None:
    cluster = settled()
    service = cluster.api.objects["Service", KEY.name]
    cluster.api.put({**service, "spec": {**service["spec"], "selector": {SERVICE_LABEL: KEY.name}}})
    obj = after(cluster, 1)
    assert (compute(obj), shown(obj, "Reconciling")) == ("InProgress", "True `TrafficMoving`")
    assert compute(after(cluster)) == "Current"


def test_conditions_always_have_the_same_order() -> None:
    cluster = settled()
    order = [one["type"] for one in cluster.status["conditions"]]
    assert order[: len(TOLD)] == list(TOLD)
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
def test_the_tests_rules_equal_those_of_kstatus(meta: dict[str, Any], status: dict[str, Any], word: str) -> None:
    conditions = [{"type": kind, "status": said} for kind, said in status.get("conditions", ())]
    assert compute({"metadata": meta, "status": {**status, "conditions": conditions}}) == word


def test_argo_cds_health_check_names_our_kind() -> None:
    (key,) = example("argocd-cm.yaml")["data"]
    obj = manifest()
    assert key == f"resource.customizations.health.{obj['apiVersion'].partition('/')[0]}_{obj['kind']}"
    assert KEY.name == obj["metadata"]["name"]
