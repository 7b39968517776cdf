"""What holds for all tests: property tests have no deadline of their own, and CI draws the same examples every time."""

import os

from hypothesis import settings

settings.register_profile("kvpilot", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("kvpilot")
