"""InferencePools: one for stable and one for the canary. They switch together with the Services and serve the route."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.act.ownership import claim
from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import version_of
from kvpilot_operator.decide import decide
from kvpilot_operator.observe.views import pool_view, together
from kvpilot_operator.render.objects import inference_pool
from kvpilot_operator.render.route import POOLS, SERVICES, Backend, weighted
from kvpilot_operator.state.objects import ObjectView, RouteView
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.snapshot import ServerFacts
from support.crd import apply_defaults, refused
from support.services import KEY, manifest, revision_of, running, spec_of
from support.trials import NEW, OLD, at_every_moment, edit, ended, killed_before_each_write, on_trial, service, stage

GROUP = "inference.networking.k8s.io"
POOL = {"group": GROUP, "kind": "InferencePool", "name": KEY.name}
ROUTE = [{"backendRefs": [POOL]}]
PICKERS = {
    "endpointPickerRef": {"name": "chat-epp", "port": {"number": 9002}},
    "canaryEndpointPickerRef": {"name": "chat-canary-epp", "port": {"number": 9002}, "failureMode": "FailOpen"},
}


def pooled(replicas=3, *, rules=ROUTE, cluster=None, **spec):
    """Return a trial of a service with pools, and a route to them if there are rules."""
    by_route = {"routeRef": {"name": "web"}} if rules else {}
    made = on_trial(replicas, cluster={"rules": rules, **(cluster or {})}, **by_route, **spec)
    edit(made, inferencePool=PICKERS, kvCache={"mode": "Fixed", "dtype": OLD})
    made.settle()
    edit(made, kvCache={"mode": "Fixed", "dtype": NEW})
    return made


def revisions(cluster):
    return {name: selector.get(REVISION_LABEL, "") for name, selector in cluster.pools.items()}


@given(st.sampled_from([None, "", "a", "b"]), st.sampled_from([None, "", "a", "b"]), st.booleans())
def test_if_service_and_pool_select_two_revisions_both_get_requests(service, pool, owned):
    found = together(service, ObjectView("p", owned, "1", pool))
    assert together(service, None) == service
    assert found == (service if not owned or service is None or pool == service else "")


def test_a_pool_selects_the_revision_and_names_its_picker():
    asked = spec_of(manifest(inferencePool=PICKERS)).inference_pool
    made = inference_pool(KEY, "u-1", "chat", "abc", asked.endpoint_picker_ref)
    assert made["spec"] == {
        "selector": {"matchLabels": {SERVICE_LABEL: "chat", REVISION_LABEL: "abc"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": "chat-epp",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }
    assert "endpointPickerRef" not in inference_pool(KEY, "u-1", "chat", "", None)["spec"]
    assert pool_view({**made, "metadata": {**made["metadata"], "uid": "p"}}, "u-1").selects == "abc"


@pytest.mark.parametrize("asked", [{}, PICKERS])
def test_the_placeholder_of_a_pool_has_its_picker_and_no_removable_label(asked):
    picker = spec_of(manifest(inferencePool=asked)).inference_pool.endpoint_picker_ref
    whole = inference_pool(KEY, "u-1", "chat", "abc", picker)
    claimed = claim(whole)
    assert claimed["spec"] == {**whole["spec"], "selector": {"matchLabels": {SERVICE_LABEL: "chat"}}}
    assert claimed["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_a_gateways_status_of_a_pool_is_not_a_change():
    said = {"metadata": {"generation": 2, "resourceVersion": "9"}}
    assert version_of("InferencePool", said) == "2"


def test_with_a_route_both_pools_need_pickers():
    one = manifest(inferencePool={"endpointPickerRef": PICKERS["endpointPickerRef"]})
    assert not refused(one)
    shared = manifest(inferencePool=one["spec"]["inferencePool"], canary={"routeRef": {"name": "web"}})
    assert [field for field, _ in refused(shared)] == ["spec.inferencePool.canaryEndpointPickerRef"]
    assert not refused(manifest(inferencePool={}, canary={"routeRef": {"name": "web"}}))


@pytest.mark.parametrize("of", [SERVICES, SERVICES | POOLS])
def test_a_rule_keeps_backends_of_kinds_that_are_not_ours(of):
    rules = ({"backendRefs": [POOL, {"name": KEY.name, "port": 80}]},)
    shared = weighted(rules, Backend(*KEY, of), 10)
    told = [(ref.get("kind", "Service"), ref["name"], ref["weight"]) for ref in shared[0]["backendRefs"]]
    services = [("Service", "chat", 90), ("Service", "chat-canary", 10)]
    pools = [("InferencePool", "chat", 90), ("InferencePool", "chat-canary", 10)]
    assert told == [*(pools if of != SERVICES else [("InferencePool", "chat", 100)]), *services]
    assert weighted(shared, Backend(*KEY, of), 0) == rules


def test_a_route_to_another_pool_is_reported_with_the_remedy():
    obj = service(NEW, routeRef={"name": "web"})
    route = RouteView("web", "1", tuple(ROUTE))
    told = decide(running(obj, "auto", route=route, server=ServerFacts(http_routes=True))).status
    assert "set spec.inferencePool" in told.condition("Stalled").message


def test_before_a_trial_both_pools_select_the_serving_revision():
    cluster = pooled()
    old = cluster.status["stable"]["revision"]
    assert revisions(cluster) == {"chat": old, "chat-canary": old}
    assert cluster.status["inferencePool"] == "chat"


def test_without_a_route_there_is_one_pool_and_shares_are_by_replicas():
    cluster = pooled(rules=None)
    cluster.until(stage("Shifting"))
    cluster.tick()
    assert revisions(cluster) == {"chat": ""}
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"
    assert revisions(cluster) == {"chat": cluster.status["stable"]["revision"]}


def test_a_canarys_share_goes_to_its_pool_by_the_routes_weights():
    cluster = pooled()
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    old, new = cluster.status["stable"]["revision"], cluster.status["canary"]["revision"]
    assert revisions(cluster) == {"chat": old, "chat-canary": new}
    told = {ref["name"]: ref["weight"] for ref in cluster.rules[0]["backendRefs"]}
    assert told == {"chat": 75, "chat-canary": 25}
    assert {ref["kind"] for ref in cluster.rules[0]["backendRefs"]} == {"InferencePool"}
    cluster.until(ended)
    assert cluster.rules == ROUTE
    cluster.settle()
    assert revisions(cluster) == {"chat": new, "chat-canary": new}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "slow", "end"),
    [(None, {}, "Promoted"), (ROUTE, {}, "Promoted"), (ROUTE, {NEW: 1.4}, "RolledBack")],
)
def test_no_pool_selects_an_unprobed_canary_even_if_the_operator_is_killed(rules, slow, end):
    killed_before_each_write(lambda: pooled(cluster={"slow": slow}, rules=rules), lambda: at_every_moment, end)


def test_removed_pools_are_deleted_and_a_canarys_only_after_the_route_dropped_it():
    cluster = pooled()
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    # The user's rule now names the Service, but still contains the canary's share.
    shared = [ref for ref in cluster.rules[0]["backendRefs"] if ref["name"] == "chat-canary"]
    cluster.edit_route([{"backendRefs": [{"name": KEY.name, "port": 80}, *shared]}])
    edit(cluster, inferencePool=None)
    cluster.watch = at_every_moment
    cluster.until(ended)
    cluster.settle()
    assert cluster.pools == {}
    assert "inferencePool" not in cluster.status
    assert [ref["name"] for ref in cluster.rules[0]["backendRefs"]] == ["chat"]


def test_without_the_pool_crd_the_field_is_reported_and_the_service_serves():
    obj = manifest(inferencePool=PICKERS, canary={"routeRef": {"name": "web"}})
    s = running(obj, "auto", server=ServerFacts(http_routes=True), rejections=())
    told = decide(s)
    stalled = told.status.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "InferencePoolsNotServed")
    assert "install the Gateway API Inference Extension" in stalled.message
    assert told.status.condition("Serving").status == "True"
    assert "InferencePool" not in {one["kind"] for one in told.objects.apply}
    assert told.status.inference_pool is None


def before_v1_6(manifest):
    """Return the error with which releases before v1.6 of the extension refuse a manifest."""
    if manifest["kind"] == "InferencePool" and "endpointPickerRef" not in manifest["spec"]:
        return 'InferencePool "chat" is invalid: spec.endpointPickerRef: Required value'
    return None


def told(cluster, kind):
    return cluster.parsed().condition(kind)


def waits_without_a_trial(cluster):
    """Reconcile while operators end and restart, and yield after each reconcile. No canary may start."""
    cluster.watch = at_every_moment
    for passed in range(20):
        if passed % 5 == 1:
            cluster.restart()
        cluster.tick()
        assert "canary" not in cluster.status
        yield passed


def test_a_pool_refused_without_a_picker_is_reported_and_trials_without_a_route_still_run():
    cluster = on_trial(cluster={"refuses": before_v1_6})
    edit(cluster, inferencePool={}, kvCache={"mode": "Fixed", "dtype": NEW})
    cluster.watch = at_every_moment
    cluster.until(stage("Shifting"))
    found = told(cluster, "Reconciling").message
    assert "name a picker in spec.inferencePool.endpointPickerRef" in found
    assert told(cluster, "Serving").status == "True"
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"
    assert cluster.pools == {}
    edit(cluster, inferencePool=PICKERS)
    cluster.settle()
    assert revisions(cluster) == {"chat": cluster.status["stable"]["revision"]}
    assert told(cluster, "Stalled").status == "False"


def test_no_trial_with_a_route_starts_while_one_of_its_pools_is_refused():
    to_service = [{"backendRefs": [{"name": KEY.name, "port": 80}]}]
    cluster = on_trial(cluster={"refuses": before_v1_6, "rules": to_service}, routeRef={"name": "web"})
    edit(cluster, inferencePool={}, kvCache={"mode": "Fixed", "dtype": OLD})
    cluster.settle()
    old = cluster.status["stable"]["revision"]
    edit(cluster, kvCache={"mode": "Fixed", "dtype": NEW})
    for _ in waits_without_a_trial(cluster):
        assert (cluster.rules, cluster.traffic, cluster.shares()) == (to_service, old, {old: 1.0})
    found = told(cluster, "Stalled").message
    assert "(InferencePool chat)" in found
    assert "(InferencePool chat-canary)" in found
    assert "InferencePool chat, a backend of the route, is refused" in told(cluster, "Stalled").message
    edit(cluster, inferencePool=PICKERS)
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"


def test_a_pool_that_needs_a_picker_keeps_it_and_no_trial_starts_without_one():
    cluster = pooled(rules=None, cluster={"refuses": before_v1_6})
    edit(cluster, inferencePool={}, kvCache={"mode": "Fixed", "dtype": OLD})
    cluster.settle()
    old = cluster.status["stable"]["revision"]
    edit(cluster, kvCache={"mode": "Fixed", "dtype": NEW})
    for _ in waits_without_a_trial(cluster):
        assert (revisions(cluster), cluster.traffic) == ({"chat": old}, old)
    edit(cluster, inferencePool=PICKERS)
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"


@pytest.mark.parametrize(("asked", "keeps"), [({"endpointPickerRef": PICKERS["endpointPickerRef"]}, True), ({}, False)])
def test_a_canarys_pool_keeps_its_picker_after_the_spec_drops_it(asked, keeps):
    picker = {"kind": "Service", **PICKERS["canaryEndpointPickerRef"]}
    obj = service(OLD)
    old = revision_of(obj, OLD)
    there = {("InferencePool", f"chat{end}"): ObjectView(f"p{end}", True, "1", old, picker) for end in ("", "-canary")}
    obj = apply_defaults({**obj, "spec": {**obj["spec"], "inferencePool": asked}})
    s = running(obj, OLD, objects=there, server=ServerFacts(inference_pools=True))
    placed = decide(s).objects
    made = {one["metadata"]["name"]: one["spec"] for one in placed.apply if one["kind"] == "InferencePool"}
    assert made["chat-canary"].get("endpointPickerRef") == (picker if keeps else None)
    # A server-side apply cannot remove the picker, because another field manager has set it, too.
    assert placed.removed == ({} if keeps else {key: {"endpointPickerRef": None} for key in there})
    assert made["chat"].get("endpointPickerRef", {}).get("name") == asked.get("endpointPickerRef", {}).get("name")


def test_a_pool_of_another_owner_changes_nothing():
    theirs = {("InferencePool", "chat"): ObjectView("theirs", False, "1", None)}
    old = revision_of(service(OLD), OLD)
    for obj in (service(OLD), apply_defaults({**service(OLD), "spec": {**service(OLD)["spec"], "inferencePool": {}}})):
        s = running(obj, OLD, objects=theirs, traffic=old, server=ServerFacts(inference_pools=True))
        assert decide(s).status.inference_pool is None
        assert decide(s).objects.absent == ()


def test_pools_that_could_not_be_read_stay_in_the_status():
    obj = service(OLD)
    s = running(obj, OLD, unanswered=(Unanswered(Question.POOLS, "ClusterError HTTP 403"),))
    known = replace(s, status=msgspec.structs.replace(s.status, inference_pool="chat"))
    assert decide(known).status.inference_pool == "chat"
