"""Refusals of vLLM versions, and the warning about one that kvpilot was not run with.

A version that was run (`compat.RUN_ON`) has every part that we use. A newer one is served, too: `needed` names a part
that it lacks, and `page_check` compares a step's answer with the reference.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat

TOLD = "KVPILOT_VERSION_TOLD"
"""Environment variable that keeps vLLM's other processes from repeating the warning of the first one."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def tell(platform: str) -> None:
    """Warn of a version that is not supported on this platform, `cpu` or `cuda`; only vLLM's first process does."""
    if TOLD not in os.environ:
        os.environ[TOLD] = "1"
        if unsupported := compat.unsupported_on(platform):
            log.warning("%s", unsupported)


def refuse(dtype: str) -> None:
    """Raise UnsupportedEngineError if this vLLM is too old for a dtype of ours."""
    if lacks := compat.too_old():
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} needs {lacks}; use --kv-cache-dtype auto, or a runtime image with vllm "
            f"{compat.ADVISED}"
        )


def refuse_bound(bound: str) -> None:
    """Raise UnsupportedEngineError if bounded caches were not run with this vLLM."""
    if lacks := compat.lacks_for_bounds():
        raise UnsupportedEngineError(
            f"--retention {bound} needs {lacks}; leave it out, or use a runtime image with vllm {compat.ADVISED}"
        )


@contextmanager
def needed(dtype: str) -> Iterator[None]:
    """Refuse a dtype of ours if the code in the block finds no such module, class or function in this vLLM."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} cannot be served by vllm {compat.version_text()}: {error}; use --kv-cache-dtype "
            f"auto, or a runtime image with vllm {compat.ADVISED}"
        ) from error
