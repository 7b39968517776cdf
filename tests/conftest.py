"""Settings of all tests: property tests have no deadline of their own, and CI draws the same examples every time.

No test and no program that one starts finds the user's own cluster: each names the cluster that it made. And what one
of hundreds of programs has compiled the next one reads, whatever the user's shell says of bytecode: an engine's
processes start in half the time. What clusters are built of, which takes minutes the first time and longer on a busy
machine, is built before the first test: no test's time runs meanwhile.
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
# A run that is terminated ends what it has started, as after Ctrl-C.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# How long it takes to draw an example says how busy the machine is.
settings.register_profile(
    "kvpilot", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvpilot")

PARTS_WITH_CLUSTERS = {"cluster", "e2e", "faults", "scale"}
FIXTURES_WITH_CLUSTERS = {"cluster", "releases"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the control plane if a test is to have one and it is not there."""
    if session.config.option.collectonly:
        return
    parts = {item.path.relative_to(Path(__file__).parent).parts[0] for item in session.items}
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if parts & PARTS_WITH_CLUSTERS or fixtures & FIXTURES_WITH_CLUSTERS:
        build.build()
