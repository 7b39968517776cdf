"""Methods of speculative decoding that our dtypes support, and their options in vLLM's arguments."""

from collections.abc import Mapping

from kvpilot_formats.arguments.parser import Arguments

DRAFTERS = ("ngram", "suffix")
"""Methods of speculative decoding that draft from the request's own tokens, without a model."""

DRAFT_MODELS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding with a draft model, which has its own layers and KV cache."""

SUFFIX_TOKENS = 24
"""Number of draft tokens that the method `suffix` has by default."""

_CONFIG = "--speculative-config"
_PARTS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_OF_DRAFTS = {"kv_cache_dtype": "a KV-cache dtype of the draft's own", "parallel_drafting": "parallel drafting",
              "use_heterogeneous_vocab": "a draft of another vocabulary"}  # fmt: skip
"""Fields of a speculative configuration that our dtypes do not support."""
_OFF = (None, False, "False", "false")


def speculation(arguments: Arguments) -> dict[str, str]:
    """Return the fields of vLLM's SpeculativeConfig that the arguments set, and always `method`.

    Return an empty dictionary without speculative decoding. Ignore a value that cannot be read, because vLLM's own
    parser refuses it.
    """
    whole = arguments.mapping(_CONFIG)
    found = {str(name).replace("-", "_"): str(part) for name, part in whole.items() if part is not None}
    for option, field in _PARTS.items():
        if (value := arguments.value(option)) is not None:
            found[field] = value
    if found:  # like vLLM, derive a missing method from the model's name, and accept synonyms
        method = found.get("method") or {"ngram": "ngram", "[ngram]": "ngram"}.get(found.get("model", ""))
        method = "mtp" if (method or "").endswith("_mtp") else method
        found["method"] = "ngram" if method == "[ngram]" else method or "draft_model"
    return found


def unsupported_drafts(method: str | None, asked: Mapping[str, object]) -> str | None:
    """Name a part of a speculative configuration that our dtypes do not support, or return None.

    Args:
        method: vLLM's name of the method; None without speculative decoding.
        asked: fields of vLLM's SpeculativeConfig.
    """
    served = DRAFTERS + DRAFT_MODELS
    if method is not None and method not in served:
        return f"speculative decoding by {method!r} ({', '.join(served[:-1])} and {served[-1]} are served)"
    if method not in DRAFT_MODELS:
        return None
    return next((f"{_OF_DRAFTS[name]} ({name})" for name in _OF_DRAFTS if asked.get(name) not in _OFF), None)


def drafts(arguments: Arguments) -> int:
    """Return the maximum number of draft tokens per sequence and step; 0 without speculative decoding."""
    found = speculation(arguments)
    tokens = found.get("num_speculative_tokens", "")
    return int(tokens) if tokens.isdecimal() else SUFFIX_TOKENS if found.get("method") == "suffix" else 0
