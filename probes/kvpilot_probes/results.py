"""Define tasks and their results, and compare the results of two engines. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

# Largest probability that the test of a bucket calls one of two equally good engines worse, if tasks are independent.
# The two built-in buckets of tasks together add at most 1/1000 to sequential.FALSE_ALARM.
FALSE_ALARM = 1 / 2000
# Smallest share of facts that a sound engine copies. An engine below it answers nonsense, so it gives no baseline.
# SmolLM2-135M copies 8 of 8 in vLLM 0.32.0 on a CPU. The share is low, because a model may think before it answers.
LEAST_COPIED = 0.25


class Task(msgspec.Struct, frozen=True):
    """Task with an answer of at most `tokens` tokens. `wanted` is JSON, whose content depends on `kind`:

    - `text`: the text that the answer must contain.
    - `fact`: the same, but the prompt contains the text, so that a model need only copy it.
    - `call`: the expected `name` and `arguments` of a tool call, and the `schema` of its arguments.
    """

    kind: Literal["text", "fact", "call"]
    wanted: str
    tokens: int


class Done(msgspec.Struct, frozen=True):
    """Number of answers to one task, and how many of them solve it."""

    asked: int = 0
    solved: int = 0


@dataclass(frozen=True, slots=True)
class Tasks:
    """Number of tasks of one bucket, and how many of them each engine has solved."""

    bucket: str
    asked: int
    baseline_solved: int
    candidate_solved: int


def compared_tasks(results: Iterable[tuple[str, Done | None, Done | None]]) -> tuple[Tasks, ...]:
    """Add up results by bucket. `results` has (bucket, the baseline's result, the candidate's result) for each task."""
    sums: dict[str, Tasks] = {}
    for bucket, ours, theirs in results:
        if ours is not None and theirs is not None:
            old = sums.get(bucket, Tasks(bucket, 0, 0, 0))
            solved = old.baseline_solved + ours.solved, old.candidate_solved + theirs.solved
            sums[bucket] = Tasks(bucket, old.asked + ours.asked, *solved)
    return tuple(sums.values())


def copied(results: Iterable[tuple[Task | None, Done | None]]) -> tuple[int, int]:
    """Return the number of answers that should copy a fact from the prompt, and how many of them did."""
    found = [done for task, done in results if task is not None and task.kind == "fact" and done is not None]
    return sum(done.asked for done in found), sum(done.solved for done in found)


def candidate_worse(found: Tasks) -> bool:
    """Return True if the candidate solved significantly fewer tasks than the baseline, so it is damaged."""
    return _chance(found.asked, found.baseline_solved, found.candidate_solved) < FALSE_ALARM


def baseline_worse(found: Tasks) -> bool:
    """Return True if the baseline solved significantly fewer tasks than the candidate, so the baseline is damaged."""
    return _chance(found.asked, found.candidate_solved, found.baseline_solved) < FALSE_ALARM


def _chance(asked: int, more: int, fewer: int) -> float:
    """Return the probability of at most `fewer` solved tasks if both engines are equally good.

    This is the one-sided exact test of Fisher. Each engine has answered `asked` tasks. One engine has solved `more` of
    them, the other `fewer`.
    """
    both = more + fewer
    ways = sum(math.comb(asked, i) * math.comb(asked, both - i) for i in range(fewer + 1))
    return ways / math.comb(2 * asked, both)
