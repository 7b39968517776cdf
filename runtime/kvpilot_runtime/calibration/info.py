"""Report the source of an engine's factors on /metrics: ``kvpilot_calibration_info{hash,source,reason} 1``.

`source` is `self` (calibrated at start), `file`, `off` (turned off) or `none` (calibration is not possible). `reason`
says why calibration is not possible. It is `WeightsChanged` if the weights were replaced after calibration.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpilot_runtime.metrics.worker_info import WorkerInfo

NAME = "kvpilot_calibration_info"
INFO = WorkerInfo(
    NAME,
    "Source of the KV cache's static factors.",
    ("hash", "source", "reason"),
    "KVPILOT_CALIBRATION_REPORT",
)

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@dataclass(frozen=True)
class Outcome:
    """Result of an engine's calibration: the labels of the gauge. `hash` covers the factors of all layers and ranks."""

    source: str
    hash: str
    reason: str = ""


WEIGHTS_CHANGED = "WeightsChanged"


def settle(impls: Iterable[Any], outcome: Outcome) -> None:
    """Store the result of a calibration in the engine's layers, and report it to log and metrics."""
    for impl in impls:
        impl.calibrated = outcome
    report(outcome)


def outdate(impls: list[Any]) -> None:
    """Report to log and metrics that the weights were replaced after the factors were fitted.

    Do nothing if no factors were fitted. Keep the factors, because pages in the prefix cache can be read only with the
    factors that they were quantized with.
    """
    found = impls[0].calibrated if impls else None
    if found is None or found.source not in ("self", "file") or found.reason == WEIGHTS_CHANGED:
        return
    log.warning("The weights have changed since the KV cache was calibrated: answers stay right, and are less accurate "
                "than they could be; restart the engine with the new weights to calibrate it anew")  # fmt: skip
    settle(impls, replace(found, reason=WEIGHTS_CHANGED))


def report(outcome: Outcome) -> None:
    """Report the result of a worker's calibration to log and metrics."""
    log.info("Calibration: source %s, hash %s %s", outcome.source, outcome.hash, outcome.reason)
    INFO.report(asdict(outcome))
