"""Speculative decoding with our dtypes: refuse unsupported methods, and count draft tokens.

A sequence with k draft tokens has 1 + k query tokens in an engine step. Each query token attends to the tokens up to
itself. The model accepts drafts up to the first wrong one. The next step overwrites the slots of rejected drafts.
"""

from collections.abc import Sequence, Set
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


def refuse_other_groups(vllm_config: Any, groups: Sequence[Any], drafting: Set[str]) -> None:
    """Raise UnsupportedModelError if a layer of the draft model is outside the first KV-cache group.

    vLLM 0.32 stores the draft model's tokens with the block table of the first group. A draft layer in another group
    would overwrite pages of the target model.

    Args:
        groups: vLLM's `KVCacheGroupSpec`s.
        drafting: names of the draft model's layers.
    """
    if not drafting <= set(groups[0].layer_names):
        raise UnsupportedModelError(
            "a draft with other heads or head_dim than the served model's is not supported beside a recent window with "
            f"kv-cache dtype {vllm_config.cache_config.cache_dtype!r}; set KVPILOT_RECENT_TOKENS to 0 "
            "(--recent-tokens=0), use a draft whose layers are like the served model's, or speculate by ngram"
        )


def spares(vllm_config: Any, layer: Any) -> int:
    """Return how many unused ring layers to add, so that one KV-cache group holds all layers of a draft model.

    All KV-cache groups of vLLM have the same number of layers. Target and draft model have attention layers, but only
    the target model has ring layers. So vLLM would split the attention layers into groups as large as the ring group.
    Layers of the draft model might then be in two groups. With as many ring layers as attention layers, there is one
    group of each kind. This takes no more memory than vLLM's own padding.
    """
    found = getattr(vllm_config, "speculative_config", None)
    if found is None or found.method != "draft_model":
        return 0
    draft = found.draft_model_config
    heads = draft.get_num_kv_heads(vllm_config.parallel_config)
    alike = (heads, draft.get_head_size()) == (layer.impl.num_kv_heads, layer.impl.head_size)
    return int(draft.get_total_num_hidden_layers()) if alike else 0
