"""If a rule of a reconcile fails, its service reports it, and all other rules still run."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.questions import Question, Unanswered, keeps_probe, unanswered
from kvpilot_operator.state.snapshot import ProbePlan, Snapshot
from kvpilot_operator.state.status import parse_status
from support.failing_questions import SECRET, failing
from support.failing_questions import decide as rules
from support.model_cluster import ModelCluster
from support.services import manifest, running, samples
from support.trials import NEW, OLD, ROUTE, copied, end_of, ended, on_trial, service, stage

NEEDED = (Question.ROUTE, Question.POOLS, Question.PROBE_SETS, Question.NODE)
OBSERVED = (*NEEDED, Question.GROUPS)
DECIDED = sorted({rule.question for rule in rules.RULES})


def said(decision: Decision) -> tuple[str, str, str]:
    condition = decision.status.condition("Ready")
    assert condition is not None
    return condition.status, condition.reason, condition.message


def test_a_reconcile_without_failed_rules_reports_none():
    decision = decide(running(manifest(), OLD))
    assert said(decision)[1] != "ReconcileIncomplete"
    assert decision.unanswered == ()


def test_fold_catches_the_errors_of_every_rule_of_a_decision():
    asked: set[Question] = set()
    with failing((), asked):
        decide(running(manifest(), OLD))
    assert asked == set(DECIDED) == set(Question) - set(OBSERVED)


@pytest.mark.parametrize("question", DECIDED)
def test_a_failed_rule_is_reported_with_the_errors_type_and_without_values(question):
    with failing([question]):
        decision = decide(running(manifest(), OLD, samples={}))
    status, reason, message = said(decision)
    assert (status, reason) == ("False", "ReconcileIncomplete")
    assert f"{question} (ValueError at " in message
    assert SECRET not in message
    assert SECRET not in repr(decision.unanswered)
    assert {one.question for one in decision.unanswered} == {question}


@pytest.mark.parametrize("question", DECIDED)
def test_the_serving_revision_is_repaired_and_scaled_if_any_rule_fails(question):
    cluster = ModelCluster(service(OLD, 2), unanswered=(question,))
    with failing(()):
        cluster.settle()
    (stable,) = cluster.deployments
    cluster.edit(service(OLD, 4))
    cluster.drop_services()
    with failing([question]):
        for _ in range(3):
            cluster.tick()
    assert cluster.deployments[stable][1] == 4
    assert (cluster.traffic == stable) == (question != Question.TRAFFIC)
    cluster.tick()
    assert cluster.deployments[stable][1] == 4
    assert cluster.traffic == stable
    assert parse_status(cluster.status).condition("Ready").reason != "ReconcileIncomplete"


@cache
def reached(where: str, *, routed: bool = False) -> ModelCluster:
    """Return a trial at this stage; tests copy it."""
    bad = frozenset([NEW]) if where == "RollingBack" else frozenset()
    spec = {"routeRef": {"name": "web"}} if routed else {}
    cluster = on_trial(3, cluster={"bad": bad, "rules": ROUTE if routed else None}, **spec)
    cluster.until(stage(where))
    return cluster


@pytest.mark.parametrize("question", DECIDED)
@pytest.mark.parametrize("where", ["Starting", "Probing", "Shifting", "Promoting", "RollingBack"])
def test_a_trial_ends_normally_after_a_rule_has_failed_for_a_while(question, where):
    cluster = copied(reached(where))
    cluster.unanswered = (question,)
    before = set(cluster.deployments)
    with failing([question]):
        for _ in range(5):
            cluster.tick()
            assert cluster.answering() >= 2
    assert set(cluster.deployments) <= before
    status = cluster.until(ended)
    assert end_of(status) == ("RolledBack" if where == "RollingBack" else "Promoted")


def test_a_new_service_starts_once_its_rules_no_longer_fail():
    for question in DECIDED:
        cluster = ModelCluster(service(OLD, 2), unanswered=(question,))
        with failing([question]):
            cluster.tick()
        cluster.settle()
        assert parse_status(cluster.status).condition("Ready").status == "True", question


def test_nothing_that_runs_is_deleted_if_a_lost_status_cannot_be_recreated():
    cluster = ModelCluster(service(OLD, 2), unanswered=(Question.TRIAL,))
    cluster.settle()
    before = dict(cluster.deployments)
    cluster.status = {}
    with failing([Question.TRIAL]):
        for _ in range(3):
            cluster.tick()
    assert cluster.deployments == before
    cluster.settle()
    assert cluster.deployments == before


# For each part of a decision, the questions (steps of a reconcile) on which it depends. If only other questions fail,
# the part does not change.
_FIRST = {Question.WORKLOAD, Question.REPLICAS, Question.STEP, Question.TARGET, Question.TRIAL}
_BEFORE_OBJECTS = _FIRST | {Question.ACCURACY}
SUMMING_UP = ("Ready", "Reconciling", "Stalled")
PARTS = {
    "scaling": (lambda d: d.status.scaling, {Question.WORKLOAD, Question.REPLICAS, Question.STEP, Question.TRIAL}),
    "trial": (lambda d: (d.status.stable, d.status.canary, d.status.last_trial), _BEFORE_OBJECTS),
    "accuracy": (lambda d: (d.status.accuracy, d.probe, d.baseline), _BEFORE_OBJECTS),
    "replicas": (lambda d: replicas_of(d), _BEFORE_OBJECTS | {Question.ENGINES}),
    "templates": (
        lambda d: by_name(applied(d, "Deployment")),
        _BEFORE_OBJECTS | {Question.ENGINES, Question.TEMPLATES},
    ),
    "service": (lambda d: applied(d, "Service")[:1], _BEFORE_OBJECTS | {Question.TRAFFIC}),
    "route": (lambda d: applied(d, "HTTPRoute"), _BEFORE_OBJECTS | {Question.SHARE}),
    "figures": (lambda d: (d.status.replicas, d.status.selector), _BEFORE_OBJECTS | {Question.SUMMARY}),
    "conditions": (
        lambda d: [c for c in d.status.conditions if c.type not in SUMMING_UP],
        _BEFORE_OBJECTS | {Question.SUMMARY, Question.CONDITIONS, Question.JOURNAL},
    ),
}


def by_name(manifests: list[object]) -> list[object]:
    """Return manifests sorted by name. Their order does not count here, because another rule defines it."""
    return sorted(manifests, key=lambda one: one["metadata"]["name"])


def applied(decision: Decision, kind: str) -> list[object]:
    return [manifest for manifest in decision.objects.apply if manifest["kind"] == kind] if decision.objects else []


def replicas_of(decision: Decision) -> dict[str, int]:
    rendered = {m["metadata"]["name"][-8:]: m["spec"]["replicas"] for m in applied(decision, "Deployment")}
    return rendered | dict(decision.objects.scale if decision.objects else {})


@cache
def moments() -> tuple[Snapshot, ...]:
    """Return snapshots of services in all stages of successful and failed trials."""
    seen: list[Snapshot] = []
    for bad, spec in itertools.product((frozenset(), frozenset([NEW])), ({}, {"routeRef": {"name": "web"}})):
        cluster = on_trial(3, cluster={"bad": bad, "rules": ROUTE if spec else None}, **spec)
        for _ in range(100):
            seen.append(cluster.snapshot())
            if ended(cluster.parsed()):
                break
            cluster.tick()
    return tuple(seen)


@given(st.data(), st.sets(st.sampled_from(DECIDED), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_failed_rules_do_not_change_the_results_of_other_rules(data, failed):
    moment = data.draw(st.integers(0, len(moments()) - 1))
    s = moments()[moment]
    undisturbed = decide(s)
    with failing(failed):
        disturbed = decide(s)
    assert undisturbed.unanswered == ()
    assert {one.question for one in disturbed.unanswered} == failed
    for name, (part, made_of) in PARTS.items():
        if not made_of & failed:
            assert part(disturbed) == part(undisturbed), name
    if Question.TRIAL in failed and Question.ACCURACY in failed:
        assert disturbed.status.canary == s.status.canary
    if Question.ACCURACY in failed:
        assert keeps_probe(disturbed.unanswered)


def unread(question: Question, s: Snapshot) -> Snapshot:
    error = ClusterError("GET", "/x", 403, f"forbidden: {SECRET}")
    gone = {"route": None} if question == Question.ROUTE else {}
    gone |= {"probes": ProbePlan()} if question == Question.PROBE_SETS else {}
    return replace(s, unanswered=(unanswered(question, error),), **gone)


@pytest.mark.parametrize("question", NEEDED)
def test_a_failed_read_of_the_cluster_is_reported_and_no_canary_starts(question):
    spec = {"routeRef": {"name": "web"}} if question == Question.ROUTE else {}
    cluster = on_trial(2, cluster={"rules": ROUTE if spec else None}, **spec)
    s = cluster.snapshot()
    assert decide(s).status.canary is not None
    decision = decide(unread(question, s))
    assert said(decision)[:2] == ("False", "ReconcileIncomplete")
    assert f"{question} (ClusterError HTTP 403" in said(decision)[2]
    assert SECRET not in repr(decision.status)
    assert decision.status.canary is None
    assert replicas_of(decision) == {s.status.stable.revision: 2}


def test_unreadable_events_of_groups_are_reported_and_delay_nothing():
    s = on_trial(2).snapshot()
    decision = decide(unread(Question.GROUPS, s))
    assert said(decision)[:2] == ("False", "ReconcileIncomplete")
    assert decision.status.canary is not None


@pytest.mark.parametrize("question", OBSERVED)
@pytest.mark.parametrize("where", ["Starting", "Probing", "Shifting", "Promoting", "RollingBack"])
def test_reads_of_the_cluster_that_fail_for_a_while_neither_end_nor_damage_a_trial(question, where):
    cluster = copied(reached(where, routed=True))
    canary = cluster.parsed().canary
    cluster.watch = lambda c: at_no_moment_without_engines(c)
    cluster.unread = (Unanswered(question, "ClusterError HTTP 403"),)
    for _ in range(5):
        cluster.tick()
        now = cluster.parsed().canary
        assert now is None or now.revision == canary.revision
        assert not cluster.parsed().kv_cache.denied or where == "RollingBack"
    cluster.unread = ()
    status = cluster.until(ended)
    assert end_of(status) == ("RolledBack" if where == "RollingBack" else "Promoted")


def at_no_moment_without_engines(cluster: ModelCluster) -> None:
    assert cluster.answering() >= 2


def test_if_the_route_cannot_be_read_a_rollback_keeps_the_pods_that_it_may_send_to():
    cluster = on_trial(3, cluster={"rules": ROUTE, "slow": {NEW: 3.0}}, routeRef={"name": "web"})
    cluster.until(stage("Shifting", 0))
    cluster.until(lambda s: s.canary is not None and s.canary.step_time is not None)
    canary = cluster.parsed().canary.revision
    weighted = cluster.rules
    assert any(ref["name"].endswith("-canary") for ref in weighted[0]["backendRefs"])
    cluster.unread = (Unanswered(Question.ROUTE, "ClusterError HTTP 403"),)
    cluster.edit(service(OLD, 3, routeRef={"name": "web"}))
    for _ in range(10):
        cluster.tick()
        assert cluster.deployments[canary][1] >= 1
        assert cluster.parsed().canary.stage == "RollingBack"
    cluster.unread = ()
    assert cluster.until(ended).last_trial.reason == "Superseded"
    assert not any(ref["name"].endswith("-canary") for ref in cluster.rules[0]["backendRefs"])


def test_unreadable_probe_sets_cancel_no_probe_and_do_not_change_accuracy():
    s = running(manifest(), OLD, samples={"x": samples(usage=0.1, waiting=0)})
    known = decide(s)
    decision = decide(unread(Question.PROBE_SETS, replace(s, status=known.status)))
    assert keeps_probe(decision.unanswered)
    assert decision.status.condition("AccuracyVerified") == known.status.condition("AccuracyVerified")
