"""Measurements of the fault tests, one JSON object per line, in the file that KVPILOT_FAULTS_RECORD names."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIABLE = "KVPILOT_FAULTS_RECORD"


def record(fault: str, recovered_seconds: float, *, what: str, answered: int | None = None, failed: int = 0) -> None:
    """Append one measurement. Do nothing if the environment names no file.

    Args:
        fault: the row of the table in docs/reliability.md.
        recovered_seconds: seconds from the fault's end to `what`, or from its start if the fault does not end.
        what: the event that ends the measurement.
        answered: user requests that were answered in that time; None without users.
        failed: user requests that failed in that time.
    """
    seconds = round(recovered_seconds, 1)
    _append({"fault": fault, "seconds": seconds, "what": what, "answered": answered, "failed": failed})


def record_machine(kubernetes: str) -> None:
    """Append a line to the record: the machine and the software versions with which the next measurements are made."""
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
