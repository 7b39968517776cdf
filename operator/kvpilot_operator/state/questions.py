"""The questions of one reconcile, and those without an answer. An error in one leaves the others alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpilot_operator.errors import ClusterError, places


class Question(StrEnum):
    """The questions of a reconcile of one service, in their order."""

    ROUTE = "Route"  # Observed: what the HTTPRoute says.
    POOLS = "Pools"  # Observed: what the service's InferencePools select.
    PROBE_SETS = "ProbeSets"  # Observed: which prompts accuracy is measured on.
    NODE = "Node"  # Observed: which GPU the engines run on.
    GROUPS = "Groups"  # Observed: why pods of groups cannot be created.
    PREFETCH = "Prefetch"  # Observed: how far the Job is that fills the claim for weights.
    WORKLOAD = "Workload"  # What binds?
    REPLICAS = "Replicas"  # How many replicas?
    STEP = "Step"  # What to weigh, and which step to take?
    TARGET = "Target"  # Which revision should serve?
    STORAGE = "Storage"  # What keeps the weights?
    TRIAL = "Trial"  # How does the trial go on?
    ACCURACY = "Accuracy"  # What did the probes find, and what is asked next?
    SUMMARY = "Summary"  # What do the status' figures say?
    ENGINES = "Engines"  # How many replicas of each revision?
    TEMPLATES = "Templates"  # What do their Deployments look like?
    TRAFFIC = "Traffic"  # What does the Service select, and how many pods may be disrupted?
    SHARE = "Share"  # What share of the requests does the HTTPRoute give to the canary?
    OBJECTS = "Objects"  # In which order do the objects go out?
    ADMISSION = "Admission"  # Which pods may be sent requests?
    DO_NOT_EVICT = "DoNotEvict"  # Which pods should stay where they are?
    JOURNAL = "Journal"  # What is written down?
    CONDITIONS = "Conditions"  # What do the conditions say?


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question without an answer, and the type and place of the error. Values may be secrets and are left out."""

    question: Question
    error: str
    where: tuple[str, ...] = ()
    """FILE:LINE in the operator's own code, outermost first."""

    def __str__(self) -> str:
        at = f" at {self.where[-1]}" if self.where else ""
        return f"{self.question} ({self.error}{at})"


def keeps_probe(unanswered: Sequence[Unanswered]) -> bool:
    """Return True if a running probe goes on, because the next probe could not be decided."""
    return any(one.question in (Question.PROBE_SETS, Question.ACCURACY) for one in unanswered)


def unanswered(question: Question, error: Exception) -> Unanswered:
    """Keep the error's type, the API server's HTTP status if any, and the places in our code."""
    status = f" HTTP {error.status}" if isinstance(error, ClusterError) and error.status else ""
    return Unanswered(question, f"{type(error).__name__}{status}", places(error))
