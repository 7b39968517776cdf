"""How do two revisions change places? Replica by replica, with never too many pods and never too few that answer."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_operator.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Side:
    """One revision now: the replicas that its Deployment asks for, and those that answer."""

    replicas: int
    ready: int


def side(s: Snapshot, revision: str) -> Side:
    """What is observed of one revision."""
    view = s.deployments.get(revision)
    return Side(view.replicas if view is not None else 0, len(s.ready_pods(revision)))


def exchange(
    growing: Side, goal: int, shrinking: Side, *, total: int, floor: int, both_serve: bool, others: int = 0
) -> tuple[int, int]:
    """Replicas of the growing and of the shrinking side for now.

    The growing side gets one more when all it has answers, and only in room that is observed to be free, so that both
    sides (and `others`) never ask for more than `total`, wherever a pass is cut off. The shrinking side gives way as
    long as `floor` pods still answer; pods of the growing side count where `both_serve`.
    """
    want = min(goal, max(growing.replicas, growing.ready + 1))
    room = total - shrinking.replicas - others
    grown = min(want, max(room, growing.replicas, 0))
    left = max(0, total - want - others)
    if left < shrinking.replicas:
        answering = min(shrinking.ready, left) + (min(growing.ready, grown) if both_serve else 0)
        if answering < floor:
            left = min(shrinking.replicas, total)
    return grown, left
