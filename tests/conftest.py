"""Settings of all tests.

Property tests have no deadline, and CI draws the same examples every time. Tests and their programs never see the
user's own cluster; each names the cluster that it made. Hundreds of programs share compiled bytecode, whatever the
user's shell says, which halves the start time of engine processes. Clusters' parts take minutes to build, so they are
built before the first test and count towards no test's time limit.
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
# Handle a termination like Ctrl-C, so that the run ends everything that it started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# The time to draw an example depends only on the machine's load.
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
