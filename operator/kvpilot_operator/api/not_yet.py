"""What the API accepts and this release does not act on yet, and how to tell a user who asked for it.

A field is never silently ignored: the operator reports what `unacted_fields` finds in the condition SpecAccepted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvpilot_operator.api.schema import apply_defaults, minimal_object
from kvpilot_operator.api.spec import Json


@dataclass(frozen=True, slots=True)
class NotYet:
    """A field under spec (`path`, dotted) and what stands in for it now; `acted_on` are values that do work already."""

    path: str
    instead: str
    acted_on: tuple[Json, ...] = ()


@dataclass(frozen=True, slots=True)
class Unacted:
    """A field that a user set and that nothing acts on yet."""

    field: str
    value: Json
    message: str


NOT_YET_ACTED_ON: tuple[NotYet, ...] = (
    NotYet(
        "scaling.mode",
        "the operator only keeps spec.replicas within scaling.minReplicas and scaling.maxReplicas",
        acted_on=("External",),
    ),
    NotYet(
        "scaling.scaleDownStabilizationSeconds",
        "the operator only keeps spec.replicas within scaling.minReplicas and scaling.maxReplicas",
    ),
    NotYet("canary.steps", "a canary that has passed its probes takes all traffic in one switch"),
    NotYet("canary.capacityPolicy", "a canary always waits for spare capacity", acted_on=("Surge",)),
    NotYet("canary.maxTTFTP95RegressionPercent", "a canary is judged on accuracy and capacity alone"),
    NotYet("canary.maxITLP95RegressionPercent", "a canary is judged on accuracy and capacity alone"),
    NotYet("accuracy.periodSeconds", "accuracy is measured before promotion only"),
    NotYet("accuracy.onFailure", "accuracy is measured before promotion only"),
)
"""The one list; remove an entry with the change that acts on its field."""


def unacted_fields(obj: Mapping[str, Json], not_yet: Iterable[NotYet] = NOT_YET_ACTED_ON) -> tuple[Unacted, ...]:
    """The fields of `obj` that differ from their default and that nothing acts on yet, in the order of `not_yet`.

    `obj` is the whole object, defaulted or not. A default that the server filled in looks like one that the user wrote,
    so a field that was set to its own default is not listed.
    """
    given, default = apply_defaults(obj), minimal_object()
    found = []
    for entry in not_yet:
        value = _at(given, entry.path)
        if value is not None and value != _at(default, entry.path) and value not in entry.acted_on:
            message = f"spec.{entry.path} is accepted and not acted on yet: {entry.instead}"
            found.append(Unacted(f"spec.{entry.path}", value, message))
    return tuple(found)


def _at(obj: Mapping[str, Json], path: str) -> Json:
    """The value at the dotted `path` under spec, or None."""
    here: Json = obj.get("spec")
    for name in path.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return here
