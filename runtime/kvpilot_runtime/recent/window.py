"""Size of the recent window, in tokens: what the environment asks for, and what the engine uses."""

import logging
import os
from typing import Any

from kvpilot_formats import formats
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import RECENT_WINDOW

VARIABLE = "KVPILOT_RECENT_TOKENS"
"""Environment variable with the recent window in tokens, which kvpilot-serve sets; empty for the default."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def keeps_all() -> bool:
    """Return True if the environment asks for residual pages of all blocks while memory is free."""
    return os.environ.get(VARIABLE, "").strip() == formats.ALL


def asked() -> int | None:
    """Return the recent window of the environment in tokens, or None. Raise UnsupportedModelError if it is invalid."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text or keeps_all():
        return None
    if not text.isdecimal() or int(text) not in formats.RECENT_CHOICES:
        raise UnsupportedModelError(
            f"{VARIABLE} is {text!r}; use {formats.recent_choices()}, or leave it out for the default "
            f"({formats.default_windows()})"
        )
    return int(text)


def window(config: Any) -> int:
    """Return the recent window of an engine with a dtype of ours, in tokens.

    Raises:
        UnsupportedModelError: the requested window is invalid, or longer than the context.
    """
    context = config.model_config.max_model_len
    found = formats.parse(config.cache_config.cache_dtype).recent_tokens(asked(), context)
    if found > context:
        raise UnsupportedModelError(
            f"{VARIABLE} is {found}, but the context has {context} tokens (--max-model-len): a window must not be "
            "longer; use a smaller one, or 0"
        )
    return found


def report(config: Any) -> None:
    """Report the engine's recent window to log and metrics."""
    dtype = config.cache_config.cache_dtype
    found, wanted = window(config), formats.parse(dtype).recent_tokens(asked())
    cut = f"; the context is shorter than the default of {wanted}" if found < wanted else ""
    more = ", and older tokens while memory is free" if found and keeps_all() else ""
    log.info("Recent window: kv-cache dtype %s, %d tokens%s%s", dtype, found, more, cut)
    RECENT_WINDOW.report({"dtype": dtype, "tokens": str(found), "reason": "ShortContext" if cut else ""})
