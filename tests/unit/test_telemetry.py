"""The operator's own metrics: what it thinks of a service can be read off them, and ends with the service."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import Sample, ServiceKey
from kvpilot_operator.state.status import Accuracy, Canary, Condition, JournalEntry, KVCache, Option, Scaling, Status
from support.services import KEY, NOW, manifest, snapshot

OTHER = ServiceKey("models", "other")
OPTIONS = (
    Option(action="StepDown", dtype="k4v4", replicas=2, gpus=0, outcome="Chosen", message="", capacity_tokens=30_000),
    Option(action="ScaleOut", dtype="auto", replicas=3, gpus=1, outcome="Costlier", message=""),
)


def condition(kind: str, word: str, reason: str) -> Condition:
    return Condition(
        type=kind,
        status=word,  # type: ignore[arg-type]
        reason=reason,
        last_transition_time=NOW,
        observed_generation=1,
    )


STATUS = Status(
    kv_cache=KVCache(recommended_dtype="k4v4", usage_percent=91, capacity_tokens=8000),
    scaling=Scaling(desired_replicas=2, recommended_replicas=3),
    canary=Canary(
        revision="r2",
        dtype="k4v4",
        from_dtype="auto",
        stage="Shifting",
        started_time=NOW,
        stage_time=NOW,
        weight_percent=25,
    ),
    accuracy=Accuracy(failures=2),
    decisions=(
        JournalEntry(time=NOW, action="Hold", reason="Dwell", message=""),
        JournalEntry(time=NOW, action="StepDown", reason="MemoryBound", message="", options=OPTIONS),
    ),
    conditions=(condition("MemoryPressured", "True", "MemoryBound"), condition("AccuracyVerified", "False", "Drifted")),
)


def decided(telemetry: Telemetry, status: Status, key: ServiceKey = KEY, **changes: object) -> None:
    telemetry.decided(replace(snapshot(manifest()), key=key, **changes), Decision(status))  # type: ignore[arg-type]


def read(telemetry: Telemetry, name: str, key: ServiceKey = KEY, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, {"namespace": key.namespace, "name": key.name, **labels})


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("kvpilot_kv_usage_percent", {}, 91),
        ("kvpilot_kv_capacity_tokens", {}, 8000),
        ("kvpilot_workload", {"kind": "MemoryBound"}, 1),
        ("kvpilot_workload", {"kind": "Idle"}, 0),
        ("kvpilot_recommended_dtype", {"dtype": "k4v4"}, 1),
        ("kvpilot_recommended_replicas", {}, 3),
        ("kvpilot_desired_replicas", {}, 2),
        ("kvpilot_option_gpus", {"action": "ScaleOut", "dtype": "auto", "outcome": "Costlier"}, 1),
        ("kvpilot_option_gpus", {"action": "StepDown", "dtype": "k4v4", "outcome": "Chosen"}, 0),
        ("kvpilot_option_capacity_tokens", {"action": "StepDown", "dtype": "k4v4", "outcome": "Chosen"}, 30_000),
        ("kvpilot_option_capacity_tokens", {"action": "ScaleOut", "dtype": "auto", "outcome": "Costlier"}, None),
        ("kvpilot_canary_stage", {"stage": "Shifting"}, 1),
        ("kvpilot_canary_stage", {"stage": "Probing"}, 0),
        ("kvpilot_canary_weight_percent", {}, 25),
        ("kvpilot_accuracy_verified", {}, 0),
        ("kvpilot_accuracy_failures", {}, 2),
        ("kvpilot_decisions_total", {"action": "StepDown", "reason": "MemoryBound"}, 1),
    ],
)
def test_what_a_pass_found_and_decided_is_shown(name: str, labels: dict[str, str], value: float | None) -> None:
    telemetry = Telemetry()
    decided(telemetry, STATUS)
    assert read(telemetry, name, KEY, **labels) == value


def test_the_age_of_the_newest_scrape_and_the_pods_that_lie_are_shown() -> None:
    telemetry = Telemetry()
    old = Sample(NOW - timedelta(seconds=40), 1, 0.5, 1, 0, 8000, "auto", doubted=("a: why", "b: why"))
    new = replace(old, time=NOW - timedelta(seconds=7), doubted=("c: why",))
    decided(telemetry, Status(), samples={"r1": (old,), "r2": (old, new)})
    assert read(telemetry, "kvpilot_metrics_age_seconds") == 7
    assert read(telemetry, "kvpilot_doubted_pods") == 3


def test_what_is_no_longer_so_is_no_longer_shown() -> None:
    telemetry = Telemetry()
    decided(telemetry, STATUS)
    decided(telemetry, Status(kv_cache=KVCache(recommended_dtype="fp8")))
    assert read(telemetry, "kvpilot_recommended_dtype", dtype="k4v4") is None
    assert read(telemetry, "kvpilot_recommended_dtype", dtype="fp8") == 1
    assert read(telemetry, "kvpilot_kv_usage_percent") is None
    assert read(telemetry, "kvpilot_option_gpus", action="ScaleOut", dtype="auto", outcome="Costlier") is None
    assert read(telemetry, "kvpilot_canary_stage", stage="Shifting") == 0
    assert read(telemetry, "kvpilot_canary_weight_percent") == 0
    assert read(telemetry, "kvpilot_accuracy_verified") is None
    assert read(telemetry, "kvpilot_metrics_age_seconds") is None


def test_every_series_of_a_service_ends_with_it_and_no_other() -> None:
    telemetry = Telemetry()
    decided(telemetry, STATUS)
    decided(telemetry, STATUS, OTHER)

    def series(key: ServiceKey) -> int:
        return sum(s.labels.get("name") == key.name for family in telemetry.registry.collect() for s in family.samples)

    assert series(KEY) == series(OTHER) > 20
    telemetry.forget(KEY)
    assert series(KEY) == 0
    assert series(OTHER) > 20


def test_every_metric_has_a_name_of_ours_and_a_help_text() -> None:
    for family in Telemetry().registry.collect():
        assert family.name.startswith("kvpilot_")
        assert family.documentation.endswith(".")


def test_forgetting_a_service_that_was_never_seen_is_fine() -> None:
    Telemetry().forget(KEY)
