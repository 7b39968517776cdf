"""The recent window of an engine, on its own /metrics: ``kvpilot_recent_window_info{dtype,tokens,reason} 1``.

`tokens` is what is served, 0 for none, and `reason` a word where it is neither what was asked for nor
the default.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvpilot_runtime.metrics.worker_info import WorkerInfo

NAME = "kvpilot_recent_window_info"
INFO = WorkerInfo(
    NAME, "The last tokens of a sequence that are read finer than the KV-cache dtype says.",
    ("dtype", "tokens", "reason"), "KVPILOT_RECENT_REPORT",
)  # fmt: skip

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


@dataclass(frozen=True)
class Window:
    """Which window an engine serves: `tokens`, and why not the one asked for."""

    dtype: str
    tokens: int
    reason: str = ""


def report(window: Window) -> None:
    """Of a worker: tell log and metrics."""
    log.info("Recent window: kv-cache dtype %s, %d tokens %s", window.dtype, window.tokens, window.reason)
    INFO.report({"dtype": window.dtype, "tokens": str(window.tokens), "reason": window.reason})
