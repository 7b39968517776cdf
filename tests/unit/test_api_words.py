"""The CRD's schema and the docs list every enum value that the operator writes into the status."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
from service_states import STATES

from kvpilot_operator.api.words import (
    Action,
    ConditionType,
    ObjectiveState,
    Outcome,
    Reason,
    Stage,
    TrafficMode,
    Verdict,
    WorkloadKind,
)
from kvpilot_operator.control.known_reasons import ENGINE, KNOWN
from kvpilot_runtime import errors
from support.crd import root_schema

DOCS = Path(__file__).parents[2] / "docs"
WEIGHED = {Action.STAY, Action.DTYPE_DOWN, Action.DTYPE_UP, Action.SCALE_OUT, Action.SCALE_IN}
TAKEN = set(Action) - {Action.STAY, Action.DTYPE_DOWN, Action.DTYPE_UP}


def fields(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the schema of each status field with this name."""

    def below(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        for key, child in schema.get("properties", {}).items():
            if key == name:
                yield child
            yield from below(child)
        if isinstance(schema.get("items"), Mapping):
            yield from below(schema["items"])

    found = list(below(root_schema()["properties"]["status"]))
    assert found
    yield from found


def words(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Z][A-Za-z]+\b", text))


@pytest.mark.parametrize(
    ("name", "enum"), [("stage", Stage), ("verdict", Verdict), ("trafficMode", TrafficMode), ("type", ConditionType)]
)
def test_the_schema_accepts_exactly_the_values_of_each_enum(name: str, enum: type[StrEnum]) -> None:
    for field in fields(name):
        assert field["enum"] == list(enum)


def test_the_schema_names_every_action_and_every_outcome_and_no_other() -> None:
    taken, weighed = (words(field["description"]) for field in fields("action"))
    assert (taken - {"The"}, weighed) == (TAKEN, WEIGHED)
    (outcome,) = fields("outcome")
    assert words(outcome["description"]) == set(Outcome)


def test_the_docs_explain_every_outcome_and_no_other() -> None:
    text = (DOCS / "pilot.md").read_text()
    rows = text[text.index("| outcome | meaning |") :].split("\n\n")[0].splitlines()[2:]
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])} == set(Outcome)


def test_the_docs_explain_every_limiting_resource() -> None:
    text = (DOCS / "pilot.md").read_text()
    assert [kind for kind in WorkloadKind if f"`{kind}`" not in text] == []


def test_the_docs_explain_every_stage_of_a_canary_in_flight() -> None:
    rows = re.findall(r"^\| (\w+) \|", (DOCS / "canary.md").read_text(), re.MULTILINE)
    assert [stage for stage in Stage if stage not in (Stage.PROMOTED, Stage.ROLLED_BACK) and stage not in rows] == []


def test_the_docs_have_every_reason_and_no_other() -> None:
    _, _, text = (DOCS / "conditions.md").read_text().partition("## Reasons")
    text, _, _ = text.partition("## ")
    named = {word for line in text.splitlines() for word in re.findall(r"`(\w+)`", line.split("|", 2)[-1])}
    assert set(Reason) - named == set()
    made = {"Canary", Outcome.NO_CANARY}
    assert named - {*Reason, *WorkloadKind, *ObjectiveState, ConditionType.RECONCILING, ConditionType.STALLED} == made


def test_every_reason_of_a_condition_may_be_a_label_of_a_metric() -> None:
    told = {one["reason"] for made in STATES.values() for one in made().get("status", {}).get("conditions", ())}
    assert told - KNOWN == set()


def test_every_reason_for_which_an_engine_refuses_to_start_is_known() -> None:
    assert set(get_args(errors.Reason)) == set(ENGINE)
