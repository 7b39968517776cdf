"""Measurements of the fault tests, one JSON object a line, in the file that KVPILOT_FAULTS_RECORD names."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIABLE = "KVPILOT_FAULTS_RECORD"


def record(fault: str, recovered_seconds: float, *, what: str, answered: int | None = None, failed: int = 0) -> None:
    """Append one measurement, unless no file is named.

    Args:
        fault: the row of the table in docs/reliability.md.
        recovered_seconds: seconds to `what` from the fault's end, or from its start if it does not end.
        what: the event that ends the measurement.
        answered: users' requests that were answered meanwhile; None without users.
        failed: users' requests that failed.
    """
    seconds = round(recovered_seconds, 1)
    _append({"fault": fault, "seconds": seconds, "what": what, "answered": answered, "failed": failed})


def record_machine(kubernetes: str) -> None:
    """Append the versions and the machine of the following measurements."""
    versions = {name: version(name) for name in ("kvpilot", "kubernetes", "aiohttp")}
    _append(
        {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "cores": os.cpu_count(),
            "versions": {"Kubernetes": kubernetes, **versions, "Python": platform.python_version()},
        }
    )


def _append(line: dict[str, Any]) -> None:
    if file := os.environ.get(VARIABLE):
        with Path(file).open("a") as out:
            out.write(json.dumps(line) + "\n")
