"""vLLM in a process of its own: a module of this package gets a question as JSON, and its last line is the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HANGS = 900
"""Seconds, ten times what the longest question takes."""

_QUIET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "KVPILOT_PREFILL_FROM_PAGES": "1",
}  # fmt: skip


def ask(module: str, asked: DataclassInstance, **environment: str) -> dict[str, Any]:
    """What `python -m MODULE` answers, with these variables beside what keeps an engine small and offline.

    Raises:
        RuntimeError: it ended in an error, with the end of what it said.
    """
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module], input=json.dumps(asdict(asked)), capture_output=True, text=True,
        env={**os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(sys.path), **environment}, timeout=HANGS,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:] + ended.stdout[-1000:])
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
