"""Views of `kubectl kvpilot` on a service whose status the operator's own rules wrote."""

import copy
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_services import BAD, PLAIN, detailed, story, why

from kvpilot_kubectl import fields, show
from kvpilot_operator.decide import decide
from support.crd import load_crd
from support.services import manifest, running


def listed(*objects: Any, everywhere: bool = False) -> list[dict[str, str]]:
    """Return the table's rows by header. A column ends where the next one begins."""
    text = show.rendered([show.listed(objects, everywhere=everywhere)], PLAIN)
    head, *rows = text.splitlines()
    starts = [found.start() for found in re.finditer(r"\S+", head)]
    names = head.split()
    # Numbers are right-aligned below the end of their header.
    bounds = [*(start if names[i] not in ("REPLICAS", "KV%") else start - 2 for i, start in enumerate(starts)), None]
    return [{name: row[bounds[i] : bounds[i + 1]].strip() for i, name in enumerate(names)} for row in rows]


def test_the_line_of_a_service_has_dtype_revision_replicas_load_and_canary_stage() -> None:
    obj = story()["trial"]
    (row,) = listed(obj)
    assert row["NAME"] == "chat"
    assert row["DTYPE"] == "auto"
    assert row["REVISION"] == obj["status"]["stable"]["revision"]
    assert row["REPLICAS"] == f"{obj['status']['readyReplicas']}/{obj['status']['replicas']}"
    assert row["LOAD"] == "MemoryBound"
    assert row["CANARY"] == f"k4v4 {obj['status']['canary']['stage']}"
    assert row["MODE"] == "Auto"


def test_every_condition_is_in_the_api_and_may_need_attention() -> None:
    objectives = [{"metric": "TTFT", "percentile": 95, "milliseconds": 500}]
    obj = manifest(scaling={"objectives": objectives})
    status = decide(running(obj, "auto")).status.as_written()
    assert "ObjectivesHeld" in {one["type"] for one in status["conditions"]}
    described = load_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    named = described["conditions"]["items"]["properties"]["type"]["enum"]
    assert {one["type"] for one in status["conditions"]} == set(named)
    for told in status["conditions"]:
        bad = [{**told, "status": word, "reason": "ReconcileIncomplete"} for word in ("True", "False")]
        shown = [listed({**obj, "status": {"conditions": [one]}})[0]["ATTENTION"] for one in bad]
        asks = told["type"] != "Ready"  # Ready has a column of its own
        assert any(told["type"] in one for one in shown) == asks, told["type"]


def test_only_a_service_under_pressure_needs_attention() -> None:
    (calm,), (pressed,) = listed(story()["serving"]), listed(story()["trial"])
    assert calm["ATTENTION"] == "-"
    assert "MemoryPressured=True (MemoryBound)" in pressed["ATTENTION"]


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [("MetricsAvailable", "True", "EnginesStalled"), ("MemoryPressured", "False", "Imbalanced")],
)
def test_stalled_or_unevenly_used_engines_need_attention(kind: str, status: str, reason: str) -> None:
    obj = copy.deepcopy(story()["serving"])
    told = {one["type"]: one for one in obj["status"]["conditions"]}
    told[kind] |= {"status": status, "reason": reason}
    assert listed(obj)[0]["ATTENTION"] == f"{kind}={status} ({reason})"


def test_a_service_that_waits_for_a_person_needs_attention() -> None:
    obj = copy.deepcopy(story()["serving"])
    told = {one["type"]: one for one in obj["status"]["conditions"]}
    told["Reconciling"]["status"] = "True"
    assert listed(obj)[0]["ATTENTION"] == "-"
    told["Stalled"] |= {"status": "True", "reason": "DtypeDenied"}
    assert listed(obj)[0]["ATTENTION"] == "Stalled=True (DtypeDenied)"


def test_the_view_shows_the_coverage_of_the_last_accuracy_probe() -> None:
    obj = copy.deepcopy(story()["serving"])
    obj["status"]["accuracy"] = {"last": {"dtype": "k4v4", "verdict": "Passed", "covered": "general; not: agent"}}
    facts = [line.split(maxsplit=1) for line in detailed(obj).splitlines()]
    assert ["accuracy", "k4v4 Passed: general; not: agent"] in facts
    del obj["status"]["accuracy"]["last"]
    assert "accuracy" not in [fact[0] for line in detailed(obj).splitlines() if (fact := line.split())]


def test_url_and_adapters_are_shown_if_the_status_has_them() -> None:
    obj = copy.deepcopy(story()["serving"])
    obj["status"]["adapters"] = ["sql", "acme/chat"]
    facts = [line.split(maxsplit=1) for line in detailed(obj).splitlines()[1:]]
    assert ["address", "http://chat.models.svc"] in facts
    assert ["adapters", "sql, acme/chat"] in facts
    del obj["status"]["adapters"], obj["status"]["url"]
    assert "adapters" not in detailed(obj)
    assert ["address", "-"] in [line.split(maxsplit=1) for line in detailed(obj).splitlines()]


def test_services_of_all_namespaces_are_distinguished() -> None:
    (row,) = listed(story()["serving"], everywhere=True)
    assert (row["NAMESPACE"], row["NAME"]) == ("models", "chat")


def test_one_service_is_shown_with_each_condition_on_a_line_and_its_denials() -> None:
    obj = story()["denied"]
    lines = detailed(obj).splitlines()
    for one in obj["status"]["conditions"]:
        (line,) = (line for line in lines if line.startswith(f"{one['type']} "))
        assert line.split()[1:3] == [one["status"], one["reason"]]
        assert line.endswith(one["message"].rstrip())
    assert any(line.startswith("denied") and BAD in line and "AccuracyRegressed" in line for line in lines)


def test_an_expired_denial_is_not_shown() -> None:
    obj = copy.deepcopy(story()["denied"])
    obj["status"]["kvCache"]["denied"][0]["until"] = "2026-11-21T12:00:00Z"
    assert "denied   " not in detailed(obj)


def test_why_prints_every_decision_oldest_first_with_the_compared_options() -> None:
    obj = story()["promoted"]
    text = why(obj)
    decisions = obj["status"]["decisions"][::-1]
    places = [text.index(f"  {one['action']}  ") for one in decisions]
    assert places == sorted(places)
    assert all(one["message"] in text for one in decisions)
    (weighed,) = (one["options"] for one in decisions if one.get("options"))
    chosen = weighed[0]
    begins = [chosen["action"], chosen["dtype"], str(chosen["replicas"])]
    (line,) = (line for line in text.splitlines() if line.split()[:3] == begins)
    assert "Chosen" in line
    assert f"{chosen['capacityTokens']:,}" in line.split()


def test_why_ends_with_the_figures_of_the_last_trial() -> None:
    last = story()["promoted"]["status"]["history"][0]
    (line,) = (line for line in why(story()["promoted"]).splitlines() if line.startswith("last trial:"))
    assert f"a replica holds {last['capacityPercent'] / 100:.2f}x the tokens" in line
    assert "auto -> k4v4 Promoted, Passed" in line


def test_decisions_of_the_same_time_keep_their_order() -> None:
    obj = {"status": {"decisions": [{"time": "2026-11-21T12:00:00Z", "action": f"Step{n}"} for n in (3, 2, 1)]}}
    assert re.findall(r"Step\d", why(obj)) == ["Step1", "Step2", "Step3"]


@pytest.mark.parametrize("status", [None, {}, [], "no"])
def test_a_service_without_a_status_is_reported_as_not_seen_by_an_operator(status: Any) -> None:
    obj = {**manifest(), "status": status}
    assert "no operator has written a status yet" in detailed(obj)
    assert "no operator has written a status yet" in why(obj)
    assert listed(obj)[0]["ATTENTION"] == "no status yet"


def test_a_status_of_an_older_spec_is_marked() -> None:
    obj = copy.deepcopy(story()["serving"])
    assert "newest spec" not in detailed(obj)
    obj["metadata"]["generation"] += 1
    assert "has not acted on the newest spec yet" in detailed(obj)
    assert listed(obj)[0]["ATTENTION"].startswith("newest spec not read yet")


def test_unknown_words_of_a_newer_operator_are_shown_unchanged() -> None:
    obj = copy.deepcopy(story()["promoted"])
    obj["status"]["decisions"].insert(0, {"time": "2026-11-21T23:00:00Z", "action": "Teleport", "message": "why not"})
    obj["status"]["conditions"].append({"type": "Novel", "status": "False", "reason": "Later"})
    assert "Teleport" in why(obj)
    assert "Novel" in detailed(obj)


@given(st.datetimes(timezones=st.just(UTC)), st.timedeltas())
def test_every_duration_is_shown_with_at_most_two_units(then: datetime, span: timedelta) -> None:
    assert re.fullmatch(r"0s|(\d+d)?(\d+h)?(\d+m)?(\d+s)?", fields.duration(span))
    assert len(re.findall(r"\d+", fields.duration(span))) <= 2
    assert fields.moment(fields.stamp(then)) == then.replace(microsecond=0) or then.year < 1000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (330, "5m30s"), (7260, "2h1m"), (7205, "2h"), (273600, "3d4h"), (-5, "0s")],
)
def test_durations_are_written_as_kubectl_writes_ages(seconds: int, text: str) -> None:
    assert fields.duration(timedelta(seconds=seconds)) == text
