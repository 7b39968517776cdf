"""What holds for all tests: property tests have no deadline of their own, and CI draws the same examples every time.

No test and no program that one starts finds the user's own cluster: each names the cluster that it made. And what one
of hundreds of programs has compiled the next one reads, whatever the user's shell says of bytecode: an engine's
processes start in half the time.
"""

import os
import signal
import sys

from hypothesis import HealthCheck, settings

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
