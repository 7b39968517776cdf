"""Gauge of the recent window on the engine's /metrics: ``kvpilot_recent_window_info{dtype,tokens,reason} 1``.

`tokens` is the served window, 0 for none. `reason` is set if the window is neither the requested one nor the default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvpilot_runtime.metrics.worker_info import WorkerInfo

NAME = "kvpilot_recent_window_info"
INFO = WorkerInfo(
    NAME, "Tokens of the recent window, which are read with more bits than the KV-cache dtype has.",
    ("dtype", "tokens", "reason"), "KVPILOT_RECENT_REPORT",
)  # fmt: skip

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@dataclass(frozen=True)
class Window:
    """Served recent window in `tokens`, and the reason if it is neither the requested one nor the default."""

    dtype: str
    tokens: int
    reason: str = ""


def report(window: Window) -> None:
    """Report a worker's recent window to log and metrics."""
    log.info("Recent window: kv-cache dtype %s, %d tokens %s", window.dtype, window.tokens, window.reason)
    INFO.report({"dtype": window.dtype, "tokens": str(window.tokens), "reason": window.reason})
