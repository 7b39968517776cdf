"""The operator's metrics about its own process: reconciles, queue, requests and scrapes."""

import contextlib
import re
import time
from importlib.metadata import version

import pytest

from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import ClusterError, Conflict


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "ok"),
        (Conflict("PATCH", "/x", 409, "changed"), "conflict"),
        (ClusterError("GET", "/x", 500, ""), "error"),
    ],
)
def test_reconciles_are_counted_by_result(error: Exception | None, result: str) -> None:
    telemetry = Telemetry()
    with contextlib.suppress(ClusterError), telemetry.timed_reconcile():
        if error is not None:
            raise error
    values = {
        one: telemetry.registry.get_sample_value("kvpilot_reconciles_total", {"result": one})
        for one in ("ok", "conflict", "error")
    }
    assert values == {**dict.fromkeys(values, 0), result: 1}
    assert telemetry.registry.get_sample_value("kvpilot_reconcile_duration_seconds_count") == 1


def test_the_queue_depth_is_computed_when_it_is_read() -> None:
    telemetry, waiting = Telemetry(), ["a", "b"]
    telemetry.queue.set_function(lambda: len(waiting))
    for _ in range(3):
        assert telemetry.registry.get_sample_value("kvpilot_queue_depth") == len(waiting)
        waiting.append("c")


def test_requests_to_the_api_server_are_counted_by_result() -> None:
    telemetry = Telemetry()
    telemetry.api_request("PATCH", "Deployment", 409, 0.02)
    telemetry.api_request("PATCH", "Deployment", 0, 15.0)
    telemetry.api_request("WATCH", "Pod", 200, 300.0)
    for code in ("409", "none"):
        labels = {"method": "PATCH", "kind": "Deployment", "code": code}
        assert telemetry.registry.get_sample_value("kvpilot_api_requests_total", labels) == 1
    watches = {"method": "WATCH", "kind": "Pod", "code": "200"}
    assert telemetry.registry.get_sample_value("kvpilot_api_requests_total", watches) == 1
    assert telemetry.registry.get_sample_value("kvpilot_api_request_duration_seconds_sum", {"method": "WATCH"}) is None
    method = {"method": "PATCH"}
    assert telemetry.registry.get_sample_value("kvpilot_api_request_duration_seconds_sum", method) == 15.02


def test_metrics_show_a_scrape_cycle_and_its_scrapes() -> None:
    telemetry = Telemetry()
    assert telemetry.registry.get_sample_value("kvpilot_scrape_cycle_timestamp_seconds") == 0
    before = time.time()
    telemetry.engine_scraped(True)
    telemetry.engine_scraped(False)
    telemetry.scraped(1.5)
    assert telemetry.registry.get_sample_value("kvpilot_scrape_cycle_duration_seconds") == 1.5
    assert before <= telemetry.registry.get_sample_value("kvpilot_scrape_cycle_timestamp_seconds") <= time.time()
    for result in ("ok", "error"):
        assert telemetry.registry.get_sample_value("kvpilot_engine_scrapes_total", {"result": result}) == 1


def test_metrics_show_the_version_and_the_process() -> None:
    registry = Telemetry().registry
    assert registry.get_sample_value("kvpilot_build_info", {"version": version("kvpilot")}) == 1
    assert registry.get_sample_value("process_resident_memory_bytes") > 1e6
    names = {family.name for family in registry.collect()}
    assert {"process_cpu_seconds", "process_open_fds", "python_info", "python_gc_collections"} <= names


def test_every_metric_of_ours_has_a_name_by_the_rules_and_a_help_text() -> None:
    families = [f for f in Telemetry().registry.collect() if not f.name.startswith(("process_", "python_"))]
    assert len(families) > 30
    for family in families:
        assert family.name.startswith("kvpilot_")
        assert not re.search(r"percent|millis|micro|_(ms|total|count|sum)$", family.name)
        assert family.documentation.endswith(".")
