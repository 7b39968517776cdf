"""Settings of all tests.

Property tests have no deadline, and CI draws the same examples every time. Tests and the programs that they start never
use the user's own cluster: each names the cluster that it made. All processes share compiled bytecode, which halves the
start time of engines. The control plane takes minutes to build, so it is built before the first test: its build does
not count towards a test's time limit.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvpilot_localcluster import build

os.environ["KUBECONFIG"] = "/no-cluster-is-named"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Kubernetes, Prometheus and Helm are Go programs. Their garbage collection takes a third of a control plane's start.
os.environ.setdefault("GOGC", "400")
# Handle SIGTERM like Ctrl-C, so that the run ends every process that it started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# The time to draw an example depends on the machine's load, so do not limit it.
settings.register_profile(
    "kvpilot", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvpilot")

PARTS_WITH_CLUSTERS = {"cluster", "e2e", "faults", "scale"}
FIXTURES_WITH_CLUSTERS = {"cluster", "releases"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the control plane if a selected test needs it and it is missing."""
    if session.config.option.collectonly:
        return
    parts = {item.path.relative_to(Path(__file__).parent).parts[0] for item in session.items}
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if parts & PARTS_WITH_CLUSTERS or fixtures & FIXTURES_WITH_CLUSTERS:
        build.build()
