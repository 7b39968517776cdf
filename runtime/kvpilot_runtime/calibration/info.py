"""Report the source of an engine's factors on /metrics: ``kvpilot_calibration_info{hash,source,reason} 1``."""

import logging

from kvpilot_runtime.metrics.worker_info import WorkerInfo

NAME = "kvpilot_calibration_info"
INFO = WorkerInfo(
    NAME,
    "Source of the KV cache's static factors.",
    ("hash", "source", "reason"),
    "KVPILOT_CALIBRATION_REPORT",
)

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def report(source: str, factors: str, reason: str) -> None:
    """Report the result of a worker's calibration to log and metrics.

    Args:
        source: `self` (calibrated at start), `file`, `off` (turned off) or `none` (calibration is not possible).
        factors: hash of the factors of all layers and ranks.
        reason: why calibration is not possible, or `RandomTokens`; otherwise empty.
    """
    log.info("Calibration: source %s, hash %s %s", source, factors, reason)
    INFO.report({"source": source, "hash": factors, "reason": reason})
