"""Pure functions that divide requests among revisions by the rules of an HTTPRoute, as a gateway does."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Behind = Callable[[dict[str, Any]], Mapping[str, float]]
"""Function that returns the share of each revision behind a backendRef."""


def weighted(rules: Sequence[Mapping[str, Any]], names: Collection[str], behind: Behind) -> dict[str, float]:
    """Return each revision's share of the requests that the first rule sends to backends of these names."""
    refs = [ref for ref in rules[0]["backendRefs"] if ref["name"] in names]
    weights = [ref.get("weight", 1) for ref in refs]
    shares: dict[str, float] = {}
    for ref, weight in zip(refs, weights, strict=True):
        for revision, share in behind(ref).items():
            shares[revision] = shares.get(revision, 0.0) + share * weight / sum(weights)
    return shares


def copied(rules: Sequence[Mapping[str, Any]], behind: Behind) -> dict[str, float]:
    """Return the share of the requests that the first rule copies to each revision."""
    filters = [one["requestMirror"] for rule in rules[:1] for one in rule.get("filters", ()) if "requestMirror" in one]
    return {
        revision: share * one.get("percent", 100) / 100
        for one in filters
        for revision, share in behind(one["backendRef"]).items()
    }
