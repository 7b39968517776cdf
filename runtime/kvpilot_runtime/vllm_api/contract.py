"""Refuse vLLM versions that cannot work, and warn about versions that kvpilot is not tested with.

A tested version (`compat.RUN_ON`) has every part of vLLM that we use. An engine may also run a newer version. Then
`needed` refuses a version that lacks a part, and `page_check` compares the output of an engine step with a computation
in float64.
"""

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat

TOLD = "KVPILOT_VERSION_TOLD"
"""Environment variable that vLLM's first process sets, so that its other processes do not repeat the warning."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def tell(platform: str) -> None:
    """Warn, once per engine, if vLLM's version is not tested on this platform, `cpu` or `cuda`."""
    if TOLD not in os.environ:
        os.environ[TOLD] = "1"
        if unsupported := compat.unsupported_on(platform):
            log.warning("%s", unsupported)


def refuse(dtype: str) -> None:
    """Raise UnsupportedEngineError if this vLLM is too old for a dtype of ours."""
    if lacks := compat.lacks():
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} needs {lacks}; use --kv-cache-dtype auto, or a runtime image with vllm "
            f"{compat.ADVISED}"
        )


@contextmanager
def needed(dtype: str) -> Iterator[None]:
    """Turn ImportError and AttributeError in the `with` block into UnsupportedEngineError: vLLM lacks a needed part."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} cannot be served by vllm {compat.version_text()}: {error}; use --kv-cache-dtype "
            f"auto, or a runtime image with vllm {compat.ADVISED}"
        ) from error


def require(owner: Any, *names: str) -> None:
    """Raise AttributeError if a class of vLLM lacks one of these attributes, or a function one of these parameters."""
    found = inspect.signature(owner).parameters if inspect.isfunction(owner) else dir(owner)
    if missing := [name for name in names if name not in found]:
        raise AttributeError(f"{owner.__qualname__} has no {missing[0]}")
