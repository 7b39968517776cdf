"""The operator's metrics about services describe each service, disappear with it, and are bounded in number."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import Action, ConditionType, ObjectiveState
from kvpilot_operator.control.service_metrics import ServiceSeries
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.state.accuracy import Accuracy, Measured
from kvpilot_operator.state.decision import Decision, Figures, ObjectiveResult
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.state.status import (
    Canary,
    Condition,
    Denied,
    Experience,
    JournalEntry,
    KVCache,
    Scaling,
    Status,
)
from support.services import KEY, NOW, manifest, snapshot

OTHER = ServiceKey("models", "other")


def condition(kind: str, word: str, reason: str) -> Condition:
    return Condition(
        type=kind,
        status=word,  # type: ignore[arg-type]
        reason=reason,
        last_transition_time=NOW,
        observed_generation=1,
    )


def denied(dtype: str, hours: int) -> Denied:
    until = NOW + timedelta(hours=hours)
    return Denied(dtype=dtype, model="m", image="i", gpu="g", reason="AccuracyRegressed", message="", until=until)


ENDED = Experience(
    revision="r1",
    dtype="k8v4",
    from_dtype="auto",
    model="m",
    image="i",
    gpu="g",
    time=NOW - timedelta(hours=1),
    verdict="Failed",
    reason="AccuracyRegressed",
)
PROBE = Measured(
    revision="r2",
    dtype="k4v4",
    verdict="Passed",
    probe_time=NOW,
    excess_kl_micronats=2500,
    top1_agreement_permille=985,
)
STATUS = Status(
    replicas=3,
    ready_replicas=2,
    kv_cache=KVCache(
        active_dtype="auto",
        recommended_dtype="k4v4",
        usage_percent=91,
        capacity_tokens=8000,
        denied=(denied("k8v4", 1), denied("k8v4", 3)),
    ),
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
    history=(ENDED,),
    accuracy=Accuracy(failures=2, errors=1, last=PROBE),
    decisions=(
        JournalEntry(time=NOW, action="Hold", reason="Dwell", message=""),
        JournalEntry(time=NOW, action=Action.DTYPE_DOWN, reason="MemoryBound", message=""),
    ),
    conditions=(
        condition("MemoryPressured", "True", "MemoryBound"),
        condition("AccuracyVerified", "False", "AccuracyDrifted"),
    ),
)


FIGURES = Figures(
    recent_tokens=64,
    objectives=(
        ObjectiveResult(Objective("TTFT", 95, 500), ObjectiveState.HELD, 0.4),
        ObjectiveResult(Objective("ITL", 99, 50), ObjectiveState.NO_SAMPLES),
    ),
)


class Shown(Telemetry):
    """The operator's metrics, which include some services."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[ServiceKey, ServiceSeries] = {}
        self.services(self.known.items)


def decided(telemetry: Shown, status: Status, key: ServiceKey = KEY, **changes: object) -> None:
    series = telemetry.known.setdefault(key, ServiceSeries())
    series.show(replace(snapshot(manifest()), key=key, **changes), Decision(status, figures=FIGURES))  # type: ignore[arg-type]


def read(telemetry: Telemetry, name: str, key: ServiceKey = KEY, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, {"namespace": key.namespace, "name": key.name, **labels})


LAST_CANARY = {"dtype": "k8v4", "verdict": "Failed", "reason": "AccuracyRegressed"}


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("kvpilot_service_info", {"mode": "Auto", "scaling": "Operator", "model": "chat"}, 1),
        ("kvpilot_kv_usage_ratio", {}, 0.91),
        ("kvpilot_kv_capacity_tokens", {}, 8000),
        ("kvpilot_recent_tokens", {}, 64),
        ("kvpilot_objective_seconds", {"metric": "ITL", "percentile": "99"}, 0.05),
        ("kvpilot_objective_observed_seconds", {"metric": "TTFT", "percentile": "95"}, 0.4),
        ("kvpilot_objective_observed_seconds", {"metric": "ITL", "percentile": "99"}, None),
        ("kvpilot_condition", {"type": "MemoryPressured", "status": "True", "reason": "MemoryBound"}, 1),
        ("kvpilot_condition", {"type": "AccuracyVerified", "status": "False", "reason": "AccuracyDrifted"}, 1),
        ("kvpilot_condition", {"type": "AccuracyVerified", "status": "True", "reason": "AccuracyDrifted"}, None),
        ("kvpilot_active_dtype", {"dtype": "auto"}, 1),
        ("kvpilot_recommended_dtype", {"dtype": "k4v4"}, 1),
        ("kvpilot_denied_until_timestamp_seconds", {"dtype": "k8v4"}, (NOW + timedelta(hours=3)).timestamp()),
        ("kvpilot_replicas", {}, 3),
        ("kvpilot_ready_replicas", {}, 2),
        ("kvpilot_recommended_replicas", {}, 3),
        ("kvpilot_desired_replicas", {}, 2),
        ("kvpilot_max_replicas", {}, manifest()["spec"]["scaling"]["maxReplicas"]),
        ("kvpilot_canary_stage", {"stage": "Shifting", "dtype": "k4v4"}, 1),
        ("kvpilot_canary_stage", {"stage": "Probing", "dtype": "k4v4"}, None),
        ("kvpilot_canary_weight_ratio", {}, 0.25),
        ("kvpilot_canary_deadline_timestamp_seconds", {}, (NOW + timedelta(hours=1)).timestamp()),
        ("kvpilot_last_canary_timestamp_seconds", LAST_CANARY, (NOW - timedelta(hours=1)).timestamp()),
        ("kvpilot_probe_excess_kl_nats", {"dtype": "k4v4"}, 0.0025),
        ("kvpilot_probe_top1_agreement_ratio", {"dtype": "k4v4"}, 0.985),
        ("kvpilot_probe_failures", {}, 2),
        ("kvpilot_probe_errors", {}, 1),
        ("kvpilot_last_reconcile_timestamp_seconds", {}, NOW.timestamp()),
        ("kvpilot_decisions_total", {"action": "DtypeDown", "reason": "MemoryBound"}, 1),
    ],
)
def test_metrics_show_the_result_of_a_reconcile(name: str, labels: dict[str, str], value: float | None) -> None:
    telemetry = Shown()
    decided(telemetry, STATUS)
    assert read(telemetry, name, KEY, **labels) == value


def test_metrics_show_the_time_of_the_scrape_and_implausible_and_silent_pods() -> None:
    telemetry = Shown()
    old = Sample(
        NOW - timedelta(seconds=40), 1, 0.5, 1, 0, 8000, "auto", implausible=("a: why", "b: why"), unanswered=1
    )
    new = replace(old, time=NOW - timedelta(seconds=7), implausible=("c: why",), unanswered=0)
    decided(
        telemetry, Status(), samples={"r1": (old,), "r2": (old, new)}, backed_off={"d": "HTTP 404", "e": "HTTP 500"}
    )
    assert read(telemetry, "kvpilot_engine_metrics_timestamp_seconds") == NOW.timestamp() - 7
    assert read(telemetry, "kvpilot_doubted_pods") == 3
    assert read(telemetry, "kvpilot_unanswered_pods") == 1
    assert read(telemetry, "kvpilot_scrape_backoff_pods") == 2


def test_series_of_the_operator_that_are_out_of_date_disappear() -> None:
    telemetry = Shown()
    decided(telemetry, STATUS)
    decided(telemetry, Status(kv_cache=KVCache(recommended_dtype="fp8")))
    assert read(telemetry, "kvpilot_recommended_dtype", dtype="k4v4") is None
    assert read(telemetry, "kvpilot_recommended_dtype", dtype="fp8") == 1
    for name in ("kvpilot_kv_usage_ratio", "kvpilot_canary_weight_ratio", "kvpilot_engine_metrics_timestamp_seconds"):
        assert read(telemetry, name) is None
    assert read(telemetry, "kvpilot_canary_stage", stage="Shifting", dtype="k4v4") is None


def test_a_service_with_a_refused_spec_keeps_its_series() -> None:
    telemetry = Shown()
    decided(telemetry, STATUS, spec=None)
    assert read(telemetry, "kvpilot_kv_usage_ratio") == 0.91
    assert read(telemetry, "kvpilot_max_replicas") is None


def series(telemetry: Telemetry, key: ServiceKey) -> int:
    samples = [s for family in telemetry.registry.collect() for s in family.samples]
    return sum(s.labels.get("namespace") == key.namespace and s.labels.get("name") == key.name for s in samples)


def test_when_a_service_is_deleted_only_its_own_series_disappear() -> None:
    telemetry = Shown()
    decided(telemetry, STATUS)
    decided(telemetry, STATUS, OTHER)
    assert series(telemetry, KEY) == series(telemetry, OTHER) > 20
    del telemetry.known[KEY]
    assert series(telemetry, KEY) == 0
    assert series(telemetry, OTHER) > 20


@pytest.mark.parametrize(("given", "shown"), [("536870912", 2**29), (None, math.nan)])
def test_the_memory_limit_is_the_containers_if_the_environment_has_it(monkeypatch, given, shown) -> None:
    monkeypatch.delenv("MEMORY_LIMIT_BYTES", raising=False)
    if given is not None:
        monkeypatch.setenv("MEMORY_LIMIT_BYTES", given)
    assert Telemetry().registry.get_sample_value("kvpilot_memory_limit_bytes") == pytest.approx(shown, nan_ok=True)


def test_metrics_show_which_replica_leads() -> None:
    telemetry = Shown()
    for leads in (False, True, False):
        telemetry.leader.set(leads)
        assert telemetry.registry.get_sample_value("kvpilot_leader") == leads


def test_invented_reasons_of_an_engine_add_no_series() -> None:
    telemetry, known = Shown(), set()
    for number in range(30):
        reason = f"Excuse{number}"
        entry = JournalEntry(time=NOW, action="RollBack", reason=reason, message="")
        line = Condition(type="Ready", status="False", reason=reason, last_transition_time=NOW, observed_generation=1)
        ended = msgspec.structs.replace(ENDED, reason=reason)
        decided(telemetry, Status(decisions=(entry,), conditions=(line,), history=(ended,)))
        known |= {str(sorted(one.labels.items())) for one in shown_of(telemetry, "Other")}
    assert read(telemetry, "kvpilot_decisions_total", action="RollBack", reason="Other") == 30
    assert read(telemetry, "kvpilot_condition", type="Ready", status="False", reason="Other") == 1
    assert len(known) == 3
    assert not list(shown_of(telemetry, "Excuse29"))


def shown_of(telemetry: Telemetry, reason: str) -> Iterator[Any]:
    samples = (one for family in telemetry.registry.collect() for one in family.samples)
    return (one for one in samples if one.labels.get("reason") == reason)


def test_a_busy_service_has_at_most_fifty_series() -> None:
    telemetry = Shown()
    every = tuple(condition(kind, "True", "Why") for kind in ConditionType)
    decided(telemetry, msgspec.structs.replace(STATUS, conditions=every))
    assert 35 < series(telemetry, KEY) <= 50


def test_counters_have_no_created_series() -> None:
    telemetry = Shown()
    decided(telemetry, STATUS)
    assert b"_created" not in generate_latest(telemetry.registry)
