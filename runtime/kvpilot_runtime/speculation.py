"""Speculative decoding with our dtypes: refuse unsupported methods, and count draft tokens.

A sequence with k draft tokens has 1 + k query tokens in an engine step. Each query token attends to the tokens up to
itself. The model accepts drafts up to the first wrong one. The next step overwrites the slots of rejected drafts.
"""

from typing import Any

from kvpilot_formats.arguments import rules
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, unsupported_drafts
from kvpilot_runtime.errors import UnsupportedModelError


def drafts(vllm_config: Any) -> int:
    """Return the maximum number of draft tokens per sequence and step; 0 without speculative decoding."""
    found = getattr(vllm_config, "speculative_config", None)
    return 0 if found is None else int(found.num_speculative_tokens)


def refuse_other_drafters(vllm_config: Any, dtype: str) -> None:
    """Raise UnsupportedModelError for speculative decoding that our dtypes do not support."""
    found = getattr(vllm_config, "speculative_config", None)
    what = None if found is None else unsupported_drafts(found.method, vars(found))
    if what is None and has_draft_model(vllm_config):
        found_beside = rules.first_set(vllm_config, rules.BESIDE_DRAFT_MODELS)
        what = None if found_beside is None else f"a model that drafts, beside {found_beside[1]},"
    if what is not None:
        raise UnsupportedModelError(
            f"{what} is not supported with kv-cache dtype {dtype!r}; leave it out, or use --kv-cache-dtype auto"
        )


def has_draft_model(vllm_config: Any) -> bool:
    """Return True if a draft model makes the drafts. vLLM lists the layers of draft model and target model together."""
    found = getattr(vllm_config, "speculative_config", None)
    return found is not None and found.method in DRAFT_MODELS
