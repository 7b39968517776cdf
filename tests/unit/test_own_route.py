"""The operator creates its own HTTPRoute and weights it like a user's. It never adopts a foreign route."""

from dataclasses import replace

import msgspec
import pytest

from kvpilot_operator.act.ownership import claim
from kvpilot_operator.decide import decide
from kvpilot_operator.observe.views import route_view
from kvpilot_operator.render.objects import http_route
from kvpilot_operator.render.route import own_rules
from kvpilot_operator.state.objects import ObjectView, Parent, RouteView
from kvpilot_operator.state.questions import Question, Unanswered
from kvpilot_operator.state.snapshot import ServerFacts
from support.crd import apply_defaults, refused
from support.services import KEY, manifest, revision_of, running, spec_of
from support.trials import NEW, OLD, at_every_moment, edit, ended, killed_before_each_write, on_trial, service, stage

ROUTE = {
    "parentRefs": [{"name": "web", "namespace": "gateways", "sectionName": "https"}],
    "hostnames": ["a.example.com"],
}
TO_SERVICE = [{"backendRefs": [{"name": KEY.name, "port": 80}]}]
TO_POOL = [{"backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": KEY.name}]}]
SERVES_ALL = ServerFacts(http_routes=True, inference_pools=True)
OURS = {("Service", KEY.name): ObjectView("s", True, "1", None)}


def own(*, cluster=None, **spec):
    """Return a trial of a service with our own route."""
    made = on_trial(3, cluster=cluster)
    edit(made, route=ROUTE, kvCache={"mode": "Fixed", "dtype": OLD}, **spec)
    made.settle()
    edit(made, kvCache={"mode": "Fixed", "dtype": NEW})
    return made


def asked(**spec):
    obj = service(OLD, 1)
    return apply_defaults({**obj, "spec": {**obj["spec"], "route": ROUTE, **spec}})


def observed(**about):
    obj = about.pop("obj", None) or asked()
    about = {"server": SERVES_ALL, "rejections": (), "traffic": revision_of(obj, OLD), "objects": OURS, **about}
    return running(obj, OLD, **about)


def taken(*parents):
    return RouteView(KEY.name, "1", tuple(TO_SERVICE), parents)


def made_of(decision):
    return [one for one in decision.objects.apply if one["kind"] == "HTTPRoute"]


def test_a_route_of_ours_names_its_gateways_and_goes_with_the_service():
    made = http_route(KEY, "u-1", spec_of(asked()).route, TO_SERVICE)
    gateway = {"group": "gateway.networking.k8s.io", "kind": "Gateway", **ROUTE["parentRefs"][0]}
    assert made["spec"] == {"parentRefs": [gateway], "hostnames": ["a.example.com"], "rules": TO_SERVICE}
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    plain = http_route(KEY, "u-1", spec_of(asked(route={"parentRefs": [{"name": "web"}]})).route, TO_SERVICE)
    assert "hostnames" not in plain["spec"]


def test_what_claims_a_routes_name_is_attached_nowhere():
    claimed = claim(http_route(KEY, "u-1", spec_of(asked()).route, TO_SERVICE))
    assert claimed["spec"] == {}


def test_a_route_of_ours_and_one_of_the_users_exclude_each_other():
    assert not refused(manifest(route=ROUTE))
    both = manifest(route=ROUTE, canary={"routeRef": {"name": "web"}})
    assert [field for field, _ in refused(both)] == ["spec.canary.routeRef"]
    picker = {"endpointPickerRef": {"name": "epp", "port": {"number": 1}}}
    shared = manifest(route=ROUTE, inferencePool=picker)
    assert [field for field, _ in refused(shared)] == ["spec.inferencePool.canaryEndpointPickerRef"]


@pytest.mark.parametrize(
    ("pool", "there", "rules"),
    [
        (None, OURS, TO_SERVICE),
        ({}, OURS, TO_SERVICE),
        ({}, {**OURS, ("InferencePool", KEY.name): ObjectView("p", True, "1", "")}, TO_POOL),
        ({}, {**OURS, ("InferencePool", KEY.name): ObjectView("p", False, "1", "")}, TO_SERVICE),
        (None, {("Service", KEY.name): ObjectView("s", False, "1", "")}, None),
    ],
    ids=["services", "no pool yet", "pool", "a pool of somebody else's", "a Service of somebody else's"],
)
def test_it_sends_to_what_is_ours_and_there(pool, there, rules):
    s = observed(obj=asked(inferencePool=pool) if pool is not None else asked(), objects=there)
    assert own_rules(s) == (None if rules is None else tuple(rules))
    assert [one["spec"]["rules"] for one in made_of(decide(s))] == ([rules] if rules is not None else [])


def test_while_a_pool_cannot_be_read_it_sends_to_what_it_sends_to():
    unread = (Unanswered(Question.POOLS, "ClusterError HTTP 403"),)
    route = RouteView(KEY.name, "1", tuple(TO_POOL))
    s = observed(obj=asked(inferencePool={}), unanswered=unread, route=route)
    assert [one["spec"]["rules"] for one in made_of(decide(s))] == [TO_POOL]


def test_without_the_kind_the_field_is_refused_with_the_remedy_and_the_service_serves():
    told = decide(observed(server=ServerFacts()))
    stalled, serving = (told.status.condition(one) for one in ("Stalled", "Serving"))
    assert (stalled.status, stalled.reason) == ("True", "HTTPRoutesNotServed")
    assert "install the Gateway API" in stalled.message
    assert serving.status == "True"
    assert made_of(told) == []
    assert told.status.route is None


def test_a_route_of_somebody_elses_is_not_said_to_be_ours_and_not_deleted():
    theirs = {**OURS, ("HTTPRoute", KEY.name): ObjectView("theirs", False, "1")}
    for obj in (service(OLD), asked()):
        told = decide(observed(obj=obj, objects=theirs))
        assert told.status.route is None
        assert "HTTPRoute" not in {kind for _, kind, _ in told.objects.absent}


def test_a_route_that_could_not_be_read_is_not_forgotten():
    s = observed(unanswered=(Unanswered(Question.ROUTE, "ClusterError HTTP 500"),), obj=service(OLD))
    known = replace(s, status=msgspec.structs.replace(s.status, route=KEY.name))
    assert decide(known).status.route == KEY.name


@pytest.mark.parametrize(
    ("route", "reason", "tools"),
    [
        (None, "RouteWaiting", "Reconciling"),
        (taken(), "RouteWaiting", "Reconciling"),
        (taken(Parent("Gateway g/web", None)), "RouteWaiting", "Reconciling"),
        (taken(Parent("Gateway g/web", True)), "Settled", None),
        (
            taken(Parent("Gateway g/a", True), Parent("Gateway g/b", False, "NotAllowedByListeners: no")),
            "RouteUnusable", "Stalled",
        ),
    ],
)  # fmt: skip
def test_tools_wait_until_gateways_accept_the_route_and_stop_where_one_refuses_it(route, reason, tools):
    told = decide(observed(route=route)).status
    assert [one.type for one in told.conditions if one.status == "True" and one.type in ("Reconciling", "Stalled")] == (
        [tools] if tools else []
    )
    assert told.condition("Serving").status == "True"
    if tools:
        assert told.condition(tools).reason == reason


def test_a_trial_waits_for_a_gateway_that_takes_the_route():
    refused = taken(Parent("Gateway g/web", False, "NotAllowedByListeners: no"))
    told = decide(running(asked(kvCache={"mode": "Fixed", "dtype": NEW}), OLD, route=refused, server=SERVES_ALL)).status
    assert told.canary is None
    assert told.condition("Stalled").reason == "RouteUnusable"
    assert "Gateway g/web says NotAllowedByListeners: no; fix the cause" in told.condition("Stalled").message
    theirs = service(NEW, 1, routeRef={"name": KEY.name})
    assert decide(running(theirs, OLD, route=refused, server=SERVES_ALL)).status.canary is not None


def condition(kind, status, generation=3):
    return {"type": kind, "status": status, "reason": "Why", "message": "so", "observedGeneration": generation}


@pytest.mark.parametrize(
    ("conditions", "accepted"),
    [
        ([], None),
        ([condition("Accepted", "True")], True),
        ([condition("Accepted", "True", 2)], None),
        ([condition("Accepted", "True"), condition("ResolvedRefs", "False")], False),
        ([condition("Accepted", "False")], False),
        ([{"type": "Accepted", "status": "True"}], True),
    ],
)
def test_what_a_gateway_says_counts_for_the_route_as_it_is(conditions, accepted):
    ref = {"name": "web", "namespace": "gateways", "sectionName": "https"}
    said = {"parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", **ref}, "conditions": conditions}
    other = {"parentRef": {"name": "web"}, "conditions": [condition("Accepted", "False")]}
    obj = {
        "metadata": {"name": KEY.name, "generation": 3},
        "spec": {"parentRefs": [ref], "rules": TO_SERVICE},
        "status": {"parents": [said, other]},
    }
    message = "Why: so" if accepted is False else ""
    assert route_view(obj, KEY).parents == (Parent("Gateway gateways/web, listener https", accepted, message),)


def test_a_canarys_share_is_in_the_route_and_gone_after_it():
    cluster = own()
    assert cluster.rules == TO_SERVICE
    assert cluster.status["route"] == KEY.name
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    assert {ref["name"]: ref["weight"] for ref in cluster.rules[0]["backendRefs"]} == {"chat": 75, "chat-canary": 25}
    assert cluster.status["canary"]["trafficMode"] == "HTTPRoute"
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] == "Passed"
    assert cluster.rules == TO_SERVICE


def test_a_trial_whose_route_is_taken_away_waits_for_it_and_reports_it():
    cluster = own()
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    edit(cluster, route=None)
    cluster.watch = at_every_moment
    cluster.tick()
    cluster.tick()
    assert cluster.rules is None
    assert "spec.route or spec.canary.routeRef was removed" in cluster.status["canary"]["message"]
    cluster.until(ended)
    assert cluster.status["history"][0]["verdict"] != "Passed"


def test_what_others_write_into_it_is_repaired():
    cluster = own()
    cluster.until(stage("Shifting"))
    cluster.edit_route([{"backendRefs": [{"name": "elsewhere", "port": 80}]}])
    cluster.tick()
    assert cluster.rules[0]["backendRefs"][0]["name"] == KEY.name


def test_it_goes_when_it_is_not_asked_for_any_more_and_a_pool_after_it_has_left_it():
    cluster = own(inferencePool={})
    cluster.until(ended)
    assert cluster.rules == TO_POOL
    cluster.watch = at_every_moment
    edit(cluster, inferencePool=None)
    cluster.settle()
    assert (cluster.rules, cluster.pools) == (TO_SERVICE, {})
    edit(cluster, route=None)
    cluster.settle()
    assert cluster.rules is None
    assert "route" not in cluster.status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "slow", "end"), [(None, {}, "Promoted"), (None, {NEW: 1.4}, "RolledBack"), ({}, {NEW: 1.4}, "RolledBack")]
)
def test_wherever_the_operator_is_killed_no_share_leads_to_an_unprobed_canary(pool, slow, end):
    pools = {"inferencePool": pool} if pool is not None else {}
    killed_before_each_write(lambda: own(cluster={"slow": slow}, **pools), lambda: at_every_moment, end)
