"""Where an engine's factors come from, on its own /metrics: ``kvpilot_calibration_info{hash,source,reason} 1``.

`source` is `self` (calibrated at start), `file`, `off` (turned off) or `none`, for the `reason` given.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from kvpilot_runtime.metrics.worker_info import WorkerInfo

NAME = "kvpilot_calibration_info"
INFO = WorkerInfo(
    NAME,
    "Where the static factors of the KV cache come from.",
    ("hash", "source", "reason"),
    "KVPILOT_CALIBRATION_REPORT",
)

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


@dataclass(frozen=True)
class Outcome:
    """What became of an engine's calibration. `hash` is over the factors of all layers and ranks, in hexadecimal."""

    source: str
    hash: str
    reason: str = ""


def report(outcome: Outcome) -> None:
    """Of a worker: tell log and metrics."""
    log.info("Calibration: source %s, hash %s %s", outcome.source, outcome.hash, outcome.reason)
    INFO.report(asdict(outcome))
