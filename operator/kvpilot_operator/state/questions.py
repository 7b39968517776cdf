"""Questions (parts) of one reconcile: observations and decisions. If one fails, the others are still answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpilot_operator.errors import ClusterError, places


class Question(StrEnum):
    """The questions of a reconcile of one service, in their order."""

    ROUTE = "Route"  # read the HTTPRoute
    POOLS = "Pools"  # read the service's InferencePools
    PROBE_SETS = "ProbeSets"  # read the prompts for accuracy probes
    NODE = "Node"  # read the GPU of the engines' nodes
    GROUPS = "Groups"  # read why pods of multi-node groups cannot be created
    WORKLOAD = "Workload"  # find the resource that limits the service
    REPLICAS = "Replicas"  # decide the number of replicas
    STEP = "Step"  # weigh the steps and choose one
    TARGET = "Target"  # choose the revision that should serve
    STORAGE = "Storage"  # decide the claim for weights
    TRIAL = "Trial"  # advance the rollout
    ACCURACY = "Accuracy"  # judge the last probe and choose the next
    SUMMARY = "Summary"  # write the figures of the status
    ENGINES = "Engines"  # decide the replicas of each revision
    TEMPLATES = "Templates"  # render the workloads of the revisions
    TRAFFIC = "Traffic"  # render the Service and the disruption budget
    SHARE = "Share"  # render the canary's share of the requests in the HTTPRoute
    OBJECTS = "Objects"  # order the writes of the objects
    ADMISSION = "Admission"  # open or close the pods' readiness gates
    JOURNAL = "Journal"  # write the journal
    CONDITIONS = "Conditions"  # write the conditions


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question that failed, with the error's type and place. The error's text is omitted, as it may hold secrets."""

    question: Question
    error: str
    where: tuple[str, ...] = ()
    """FILE:LINE in the operator's own code, outermost first."""

    def __str__(self) -> str:
        at = f" at {self.where[-1]}" if self.where else ""
        return f"{self.question} ({self.error}{at})"


def keeps_probe(unanswered: Sequence[Unanswered]) -> bool:
    """Return True if a running probe must continue, because the decision about probes failed."""
    return any(one.question in (Question.PROBE_SETS, Question.ACCURACY) for one in unanswered)


def unanswered(question: Question, error: Exception) -> Unanswered:
    """Return the failed question with the error's type, HTTP status (if any) and places in the operator's code."""
    status = f" HTTP {error.status}" if isinstance(error, ClusterError) and error.status else ""
    return Unanswered(question, f"{type(error).__name__}{status}", places(error))
