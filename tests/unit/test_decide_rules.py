"""The rules of a decision are pure functions of one frozen context, which renders and plans only once."""

import importlib
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from unittest.mock import patch

import pytest

from kvpilot_operator.decide import context, decide
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.decide import Rule, fold
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot
from support.services import manifest, running, spec_of
from support.trials import NEW, OLD, ROUTE, ended, on_trial, service

RULES = importlib.import_module("kvpilot_operator.decide.decide").RULES


def trial(**spec: object) -> list[Snapshot]:
    """Return the snapshots of a trial from its start to its end."""
    cluster = on_trial(2, cluster={"rules": ROUTE if spec else None}, **spec)
    seen = []
    while not seen or not ended(cluster.parsed()):
        seen.append(cluster.snapshot())
        cluster.tick()
    return seen


@pytest.mark.parametrize("spec", [{}, {"routeRef": {"name": "web"}}])
def test_each_template_is_rendered_once_a_reconcile_and_each_traffic_plan_computed_once(spec):
    for s in trial(**spec):
        rendered: Counter[str] = Counter()
        planned: Counter[object] = Counter()

        def render(name, spec, dtype, *, real=context.pod_template, count=rendered, **of_server):
            count[dtype] += 1
            return real(name, spec, dtype, **of_server)

        def plan(s, spec, *args, real=context.traffic_plan, count=planned):
            count[args] += 1
            return real(s, spec, *args)

        with patch.object(context, "pod_template", render), patch.object(context, "traffic_plan", plan):
            decide(s)
        assert set(rendered.values()) == {1}
        assert set(rendered) <= {OLD, NEW}
        assert set(planned.values()) <= {1}


def test_a_rule_does_not_change_its_input_and_is_deterministic():
    for s in trial():
        c = Context.of(s, s.spec)
        for rule in RULES:
            before = (repr(c.status), repr(c.wanted), repr(c.engines))
            after = rule.answer(c)
            assert (repr(c.status), repr(c.wanted), repr(c.engines)) == before, rule.question
            assert rule.answer(c) == after, rule.question
            c = after


def test_a_context_cannot_be_changed_in_place():
    c = Context.of(running(manifest(), OLD), spec_of(manifest()))
    with pytest.raises(FrozenInstanceError):
        c.status = c.status
    with pytest.raises(AttributeError):
        c.status.replicas = 3


def test_a_rule_that_raises_does_not_change_the_context():
    def breaks(c: Context) -> Context:
        c.set(replicas=99).event("Never", "posted")
        raise KeyError("x")

    start = Context.of(running(service(OLD), OLD), spec_of(service(OLD)))
    rules = (
        Rule(Question.WORKLOAD, lambda c: c.set(replicas=1).event("One", "1")),
        Rule(Question.STEP, breaks),
        Rule(Question.TRIAL, breaks, otherwise=lambda c: c.set(ready_replicas=c.status.replicas)),
        Rule(Question.SUMMARY, lambda c: replace(c, wanted={"r": c.status.replicas})),
    )
    c = fold(start, rules)
    assert (c.status.replicas, c.status.ready_replicas, c.wanted) == (1, 1, {"r": 1})
    assert [event.reason for event in c.events] == ["One"]
    assert [(one.question, one.error) for one in c.unanswered] == [("Step", "KeyError"), ("Trial", "KeyError")]
