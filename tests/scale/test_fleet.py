"""A small run of the fleet benchmark, for properties that hold at any size.

docs/benchmarks/fleet.md has the run with 2,000 services.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).parents[2]
SERVICES = 60
CHANGES_PER_SECOND = 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("fleet") / "fleet.json"
    command = [sys.executable, "-m", "benchmarks.operator.fleet", "--sizes", str(SERVICES)]
    log = out.with_suffix(".log")
    with log.open("wb") as words:
        child = subprocess.Popen(
            [*command, "--seconds", "15", "--settle", "8", "--out", out],
            cwd=ROOT,
            stdout=words,
            stderr=subprocess.STDOUT,
        )
        try:
            status = child.wait(1200)
        finally:
            # Use SIGTERM: the benchmark then ends its own processes, which a SIGKILL would leave running.
            child.terminate()
            child.wait(60)
    assert status == 0, log.read_text()
    (found,) = json.loads(out.read_text())["sizes"]
    return found


def test_every_edit_and_every_pod_that_changes_reaches_the_status(measured):
    assert measured["services"] == SERVICES
    for what in ("edit_to_status", "pod_to_status"):
        assert measured[what]["count"] > 0
        assert measured[what]["missed"] == 0


def test_no_reconcile_and_no_scrape_fails(measured):
    assert (measured["passes_failed"], measured["scrapes_failed"]) == (0, 0)
    assert measured["scrape_gap"]["count"] >= measured["pods"]


def test_services_that_do_not_change_cost_no_requests(measured):
    # A change costs one status write, writes of one or two objects, and sometimes a watch, at any size of the fleet.
    assert measured["api_requests_per_second"] < 4 * CHANGES_PER_SECOND
    assert measured["passes_per_second"] > SERVICES / 5 / 2
