"""Speculative decoding: which drafts go with our dtypes, and what a step with draft tokens is to a backend.

A sequence that decodes has 1 + k tokens in a step where k were drafted for it. The model's answer says how many of them
stay; the others are computed again from the first wrong one on, in the places of those that were wrong. So each token
is a query of its own, which sees what is stored up to itself, and none ever sees a token behind its own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from kvpilot_formats.arguments import rules
from kvpilot_formats.arguments.drafts import DRAFT_MODELS, unsupported_drafts
from kvpilot_runtime.errors import UnsupportedModelError


def drafts(vllm_config: Any) -> int:
    """Tokens that may be drafted for a sequence in a step; 0 without speculative decoding."""
    found = getattr(vllm_config, "speculative_config", None)
    return 0 if found is None else int(found.num_speculative_tokens)


def refuse_other_drafters(vllm_config: Any, dtype: str) -> None:
    """Refuse what of speculation is not served.

    Raises:
        UnsupportedModelError: as `unsupported_drafts`; or drafts come from a model beside what was not seen
            right with it.
    """
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
    """Whether drafts come from a model, whose layers stand among the served one's."""
    found = getattr(vllm_config, "speculative_config", None)
    return found is not None and found.method in DRAFT_MODELS


def refuse_other_groups(vllm_config: Any, groups: Sequence[Any], drafting: Set[str]) -> None:
    """Refuse a model that drafts whose layers are not in the first group of layers that share a block table.

    A draft model's proposer stores by the first group's table (vLLM 0.32), whichever its layers are in: its tokens
    would stand in the served model's pages.

    Args:
        groups: vLLM's `KVCacheGroupSpec`s. drafting: the names of the draft's layers.

    Raises:
        UnsupportedModelError: with what brings them there.
    """
    if not drafting <= set(groups[0].layer_names):
        raise UnsupportedModelError(
            "a draft with other heads or head_dim than the served model's is not supported beside a recent window with "
            f"kv-cache dtype {vllm_config.cache_config.cache_dtype!r}; set KVPILOT_RECENT_TOKENS to 0 "
            "(--recent-tokens=0), use a draft whose layers are like the served model's, or speculate by ngram"
        )


def spares(vllm_config: Any, layer: Any) -> int:
    """Rings without a use that stand beside the layers of a draft model, which has none.

    vLLM's proposer wants a draft's layers in one group. Layers that have pages like the model's, of which `layer` is
    one, are cut into groups of as many as there are rings, which would spread a draft of more than half the model's
    layers over two. With as many rings as layers there is one group of each, as large as vLLM would pad them to be.
    """
    found = getattr(vllm_config, "speculative_config", None)
    if found is None or found.method != "draft_model":
        return 0
    draft = found.draft_model_config
    heads = draft.get_num_kv_heads(vllm_config.parallel_config)
    alike = (heads, draft.get_head_size()) == (layer.impl.num_kv_heads, layer.impl.head_size)
    return int(draft.get_total_num_hidden_layers()) if alike else 0
