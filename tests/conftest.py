"""What holds for all tests: property tests have no deadline of their own, and CI draws the same examples every time.

No test and no program that one starts finds the user's own cluster: each names the cluster that it made.
"""

import os

from hypothesis import settings

os.environ["KUBECONFIG"] = "/no-cluster-is-named"

settings.register_profile("kvpilot", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("kvpilot")
