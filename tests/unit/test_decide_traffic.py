"""Traffic: valid canary steps, the Service's selector, and changes of a user's HTTPRoute."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.render import route
from kvpilot_operator.render.route import Backend, weighted
from kvpilot_operator.state.objects import RouteView
from kvpilot_operator.state.snapshot import ServerFacts
from kvpilot_operator.state.status import Canary, Stable, Status
from support.services import NOW, manifest, pod, snapshot, spec_of

OURS = {"name": "chat", "port": 80}


def planned(weights, replicas, *, rules=None, route_ref=None, served=True, **canary):
    steps = [{"weightPercent": weight} for weight in weights]
    asked = {"steps": steps, **({"routeRef": {"name": route_ref}} if route_ref else {})}
    scaling = {"minReplicas": 0, "maxReplicas": 16}
    obj = manifest(replicas=replicas, scaling=scaling, canary=asked)
    view = None if rules is None else RouteView("web", "7", tuple(rules))
    trial = on_trial(**canary) if canary else None
    s = snapshot(obj, route=view, server=ServerFacts(http_routes=served), status=Status(canary=trial))
    return Context.of(s, spec_of(obj)).plan


def on_trial(stage="Shifting", **changes):
    base = Canary(
        revision="new", dtype="k4v4", from_dtype="auto", stage=stage, started_time=NOW, stage_time=NOW, step=0
    )
    fields = {"revision": "new", "dtype": "k4v4", "from_dtype": "auto", "started_time": NOW, "stage_time": NOW}
    return Canary(**{**fields, "stage": stage, "step": base.step, **changes})


def splits(plan):
    return [(step.index, step.weight_percent, step.replicas) for step in plan.steps]


def test_without_steps_the_probes_alone_decide():
    assert planned([], 4).mode == "ProbeOnly"


def test_without_a_route_the_canary_gets_no_more_than_the_steps_share():
    assert splits(planned([25, 50], 4)) == [(0, 20, 1), (1, 40, 2)]
    assert splits(planned([33], 2)) == [(0, 33, 1)]


def test_steps_below_one_pods_share_and_100_percent_are_skipped_and_named():
    plan = planned([1, 5, 50, 100], 3)
    assert splits(plan) == [(2, 50, 2)]
    assert "1%, 5%, 100%" in plan.message


def test_if_pods_cannot_give_any_steps_share_the_probes_alone_decide():
    plan = planned([5], 1)
    assert (plan.mode, plan.steps) == ("ProbeOnly", ())
    assert "50%" in plan.message
    assert "routeRef" in plan.message


def test_a_canarys_share_leaves_the_stable_revision_at_least_one_pod():
    assert splits(planned([80], 4)) == [(0, 80, 4)]
    assert splits(planned([99], 4)) == [(0, 80, 4)]


def test_a_canary_that_replaces_a_replica_adds_no_pod():
    assert splits(planned([25, 50], 4, replaces_one=True)) == [(0, 25, 1), (1, 50, 2)]


def test_a_route_allows_any_weight_and_the_canary_grows_with_it():
    plan = planned([5, 50], 4, rules=[{"backendRefs": [OURS]}], route_ref="web")
    assert plan.mode == "HTTPRoute"
    assert splits(plan) == [(0, 5, 1), (1, 50, 2)]


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        (None, "has no HTTPRoute web"),
        ([{"backendRefs": [{"name": "other"}]}], "no rule of HTTPRoute web sends requests to Service chat"),
        ([{"backendRefs": [{**OURS, "namespace": "elsewhere"}]}], "no rule of HTTPRoute web"),
        ([{"backendRefs": [{**OURS, "weight": 20_000}]}], "weight of 20000"),
    ],
)
def test_an_unusable_route_delays_the_canary_with_the_reason(rules, word):
    plan = planned([5], 4, rules=rules, route_ref="web")
    assert plan.held is not None
    assert word in plan.held
    assert plan.steps == ()


def test_a_server_without_the_gateway_api_delays_the_canary_and_is_reported():
    plan = planned([5], 4, route_ref="web", served=False)
    assert plan.held is not None
    assert "gateway.networking.k8s.io/v1" in plan.held


def test_removing_route_ref_during_a_trial_delays_the_trial():
    plan = planned([5], 4, traffic_mode="HTTPRoute")
    assert plan.held is not None
    assert "routeRef was removed" in plan.held


def test_a_route_ref_added_during_a_trial_applies_to_the_next_trial():
    assert planned([50], 4, route_ref="web", traffic_mode="ReplicaRatio").mode == "ReplicaRatio"


# --- the route's rules --------------------------------------------------------------------------------------------


def split(rules, share):
    return weighted(rules, Backend("models", "chat"), share)


def test_the_share_of_a_rule_with_one_backend_is_its_weights():
    (rule,) = split([{"backendRefs": [OURS]}], 40)
    assert rule["backendRefs"] == [{**OURS, "weight": 60}, {"name": "chat-canary", "port": 80, "weight": 40}]


def test_other_backends_of_a_rule_keep_their_part_of_the_traffic():
    (rule,) = split([{"backendRefs": [{**OURS, "weight": 3}, {"name": "other", "port": 80}]}], 10)
    weights = {ref["name"]: ref["weight"] for ref in rule["backendRefs"]}
    assert weights["other"] / sum(weights.values()) == 1 / 4
    assert weights["chat-canary"] / (weights["chat"] + weights["chat-canary"]) == 0.1


def test_rules_of_other_services_and_filters_are_not_changed():
    other = {"matches": [{"path": {"value": "/x"}}], "backendRefs": [{"name": "other"}]}
    ours = {"filters": [{"type": "URLRewrite"}], "backendRefs": [{**OURS, "filters": [{"type": "X"}]}], "name": "r"}
    changed = split([other, ours], 5)
    assert changed[0] is other
    assert changed[1]["filters"] == ours["filters"]
    assert changed[1]["name"] == "r"
    assert all(ref["filters"] == [{"type": "X"}] for ref in changed[1]["backendRefs"])
    assert other["backendRefs"] == [{"name": "other"}]


def test_a_backend_of_the_route_with_weight_0_keeps_that_weight():
    assert split([{"backendRefs": [{**OURS, "weight": 0}]}], 50)[0]["backendRefs"] == [{**OURS, "weight": 0}]


def test_weights_edited_during_a_trial_are_used_unchanged():
    (during,) = split([{"backendRefs": [OURS]}], 40)
    edited = {**during, "backendRefs": [{**during["backendRefs"][0], "weight": 7}, during["backendRefs"][1]]}
    assert split([edited], 0)[0]["backendRefs"] == [{**OURS, "weight": 7}]


MIRROR = {"group": "", "kind": "Service", "name": "chat-canary", "port": 80}


def test_a_mirror_filter_is_added_beside_the_users_filters_and_removed_again():
    other = {"backendRefs": [{"name": "other", "port": 80}]}
    theirs = {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "audit", "port": 80}}}
    ours = {"backendRefs": [OURS], "filters": [theirs]}
    plain = {"backendRefs": [OURS]}
    during = weighted([other, ours, plain], Backend("models", "chat"), 0, 50)
    copies = {"type": "RequestMirror", "requestMirror": {"backendRef": MIRROR, "percent": 50}}
    assert during == (other, {**ours, "filters": [theirs, copies]}, {**plain, "filters": [copies]})
    assert weighted(during, Backend("models", "chat"), 0, 50) == during
    assert route.carries(RouteView("web", "1", during), Backend("models", "chat-canary"))
    assert split(during, 0) == (other, ours, plain)


def test_all_requests_are_copied_if_one_replica_serves():
    (rule,) = weighted([{"backendRefs": [OURS]}], Backend("models", "chat"), 0, 100)
    # Releases before Gateway API 1.3 have no field `percent` in RequestMirror.
    assert rule["filters"] == [{"type": "RequestMirror", "requestMirror": {"backendRef": MIRROR}}]


def test_a_step_of_0_percent_mirrors_one_replicas_share_and_is_skipped_without_a_route():
    rules = [{"backendRefs": [OURS]}]
    by_route = planned([0, 25], 4, route_ref="web", rules=rules)
    assert [(one.weight_percent, one.mirrored_percent, one.replicas) for one in by_route.steps] == [
        (0, 25, 1),
        (25, 0, 1),
    ]
    assert planned([0], 1, route_ref="web", rules=rules).steps[0].mirrored_percent == 100
    by_ratio = planned([0, 50], 3)
    assert [one.weight_percent for one in by_ratio.steps] == [50]
    assert "0%" in by_ratio.message


NAMES = st.sampled_from(["chat", "other", "third"])
WEIGHTS = st.one_of(st.none(), st.integers(0, 10_000))


@st.composite
def rules(draw):
    made = []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(NAMES, unique=True, max_size=3))
        refs = []
        for name in names:
            weight = draw(WEIGHTS)
            refs.append({"name": name, "port": 80, **({} if weight in (None, 1) else {"weight": weight})})
        made.append({"backendRefs": refs, "matches": [{"path": {"value": "/"}}]})
    return made


@given(rules(), st.lists(st.integers(1, 99), min_size=1, max_size=4))
def test_after_any_steps_the_route_is_as_the_user_wrote_it(written, shares):
    now = tuple(written)
    for share in shares:
        now = split(now, share)
        assert split(now, share) == now
        weights = [ref.get("weight", 1) for rule in now for ref in rule["backendRefs"]]
        assert all(0 <= weight <= 1_000_000 for weight in weights)
    assert split(now, 0) == tuple(written)


def test_a_route_names_the_canary_only_while_it_is_a_backend():
    during = RouteView("web", "1", split([{"backendRefs": [OURS]}], 5))
    assert route.carries(during, Backend("models", "chat-canary"))
    assert not route.carries(replace(during, rules=split(during.rules, 0)), Backend("models", "chat-canary"))
    assert not route.carries(None, Backend("models", "chat-canary"))


# --- the Service's selector ---------------------------------------------------------------------------------------

OBJ = manifest(replicas=2, canary={"steps": [{"weightPercent": 50}]})
STABLE = Stable(revision="old", dtype="auto", since=NOW - timedelta(hours=1), ever_ready=True)


def selected(stage, pods, *, observed="old", obj=OBJ, **canary):
    status = Status(stable=STABLE, canary=on_trial(stage, **canary))
    s = snapshot(obj, pods=tuple(pods), traffic=observed, status=status)
    return traffic.selected(Context.of(s, spec_of(obj)))


def some(revision, count, **changes):
    return [replace(pod(revision, **changes), name=f"{revision}-{i}") for i in range(count)]


def test_before_its_probes_have_passed_a_canary_is_never_selected():
    for stage in ("Starting", "Probing"):
        assert selected(stage, some("old", 2) + some("new", 1)) == "old"


def test_without_a_route_both_revisions_are_selected_and_with_a_route_only_the_stable_one():
    pods = some("old", 2) + some("new", 1)
    assert selected("Shifting", pods, traffic_mode="ReplicaRatio") == traffic.EVERY_REVISION
    assert selected("Shifting", pods, traffic_mode="HTTPRoute") == "old"


def test_two_revisions_are_never_selected_while_a_borrowed_replica_exists():
    pods = some("old", 2) + some("new", 1) + some("borrowed", 1)
    assert selected("Shifting", pods, traffic_mode="ReplicaRatio") == "old"
    assert selected("Promoting", pods) == "old"
    leaving = some("old", 2) + some("new", 1) + some("borrowed", 1, terminating=True)
    assert selected("Promoting", leaving) == traffic.EVERY_REVISION


def test_a_promotion_selects_only_the_canary_once_all_its_pods_answer_and_have_settled():
    assert selected("Promoting", some("old", 2) + some("new", 1)) == traffic.EVERY_REVISION
    whole, since = some("old", 1) + some("new", 2), NOW - timedelta(seconds=traffic.SETTLE_SECONDS)
    assert selected("Promoting", whole, observed=None) == traffic.EVERY_REVISION
    assert selected("Promoting", whole, observed=None, stage_time=since) == "new"
    assert selected("Promoting", some("old", 2) + some("new", 1, ready=False)) == "old"


def test_a_rollback_selects_the_stable_revision_as_soon_as_it_can_carry_the_traffic():
    assert selected("RollingBack", some("old", 1) + some("new", 2), observed=None) == "old"
    assert selected("RollingBack", some("new", 2), observed=None) == traffic.EVERY_REVISION


def test_a_paused_promotion_moves_no_traffic():
    paused = {**OBJ, "spec": {**OBJ["spec"], "rollout": {"denySeconds": 1, "paused": True}}}
    assert selected("Promoting", some("old", 1) + some("new", 2), obj=paused) == "old"
    assert selected("Promoting", some("old", 1) + some("new", 2), obj=paused, observed=None) == ""
