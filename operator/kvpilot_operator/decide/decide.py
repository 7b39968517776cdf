"""Decide one reconcile: list all rules in their order, and apply them to a snapshot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from kvpilot_operator.decide import step_rules, summary, target
from kvpilot_operator.decide.conditions import tell
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.objects import gates, placement, storage
from kvpilot_operator.decide.rollout import probing, requested, rollout
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.questions import Question, unanswered
from kvpilot_operator.state.snapshot import Snapshot

D = TypeVar("D", bound=Draft)


@dataclass(frozen=True, slots=True)
class Rule(Generic[D]):
    """One rule: the pure function `answer`, and `otherwise`, which decides if `answer` raises an error."""

    question: Question
    answer: Callable[[D], D]
    otherwise: Callable[[D], D] | None = None
    """Fallback, which must not raise an error. None keeps the results of earlier rules."""


def fold(draft: D, rules: Sequence[Rule[D]]) -> D:
    """Apply every rule in turn. This is the only place that catches unexpected errors."""
    for rule in rules:
        try:
            draft = rule.answer(draft)
        except Exception as error:
            draft = replace(draft, unanswered=(*draft.unanswered, unanswered(rule.question, error)))
            draft = draft if rule.otherwise is None else rule.otherwise(draft)
    return draft


RULES: tuple[Rule[Context], ...] = (
    Rule(Question.TRIAL, requested.act),
    Rule(Question.WORKLOAD, step_rules.judge_workload),
    Rule(Question.REPLICAS, step_rules.keep_replicas),
    Rule(Question.STEP, step_rules.weigh_steps, otherwise=step_rules.weigh_nothing),
    Rule(Question.REPLICAS, step_rules.take_replica_step),
    Rule(Question.TARGET, target.choose, otherwise=target.stay),
    Rule(Question.STORAGE, storage.keep),
    Rule(Question.TRIAL, rollout.advance),
    Rule(Question.TARGET, target.after_rollback),
    Rule(Question.ACCURACY, probing.probe),
    Rule(Question.SUMMARY, summary.summarise),
    Rule(Question.ENGINES, placement.replicas, otherwise=placement.as_they_are),
    Rule(Question.TEMPLATES, placement.deployments),
    Rule(Question.TRAFFIC, placement.own_service),
    Rule(Question.SHARE, placement.share_traffic),
    Rule(Question.OBJECTS, placement.in_order, otherwise=placement.in_any_order),
    Rule(Question.ADMISSION, gates.admit),
    Rule(Question.JOURNAL, summary.explain),
    Rule(Question.CONDITIONS, tell.tell, otherwise=tell.leave),
)
"""The rules in order. Each rule sees the decisions of the rules above it in the Context."""

REFUSED: tuple[Rule[Draft], ...] = (
    Rule(Question.ADMISSION, gates.admit_serving),
    Rule(Question.CONDITIONS, tell.refuse, otherwise=tell.leave),
)
"""The rules for a service with an invalid spec. They leave its objects unchanged."""

_AGAIN_SECONDS = 10.0


def decide(s: Snapshot) -> Decision:
    """Decide on a snapshot. Never raise an error: `unanswered` of the decision lists the rules that raised one."""
    if s.spec is None:
        return _decision(fold(_seen(Draft(status=s.status, snapshot=s)), REFUSED))
    c = fold(_seen(Context.of(s, s.spec)), RULES)
    return replace(_decision(c), again_seconds=_AGAIN_SECONDS if c.canary is not None else None)


def _seen(draft: D) -> D:
    s = draft.snapshot
    return replace(draft, unanswered=s.unanswered).set(observed_generation=s.generation)


def _decision(draft: Draft) -> Decision:
    return Decision(**{one.name: getattr(draft, one.name) for one in fields(Decision)})
