"""Strategic merge of pod templates, as `kubectl patch` merges them: maps by key, some lists by a key of their items.

Only what a template of the API may hold has to be known here: its schema has no patch directive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_operator.api.pod_template import KEYS

Json = Any


def strategic_merge(base: Mapping[str, Json], patch: Mapping[str, Json]) -> dict[str, Json]:
    """Merge `patch` over `base`; items that only the patch has come last. An empty list changes nothing."""
    merged = dict(base)
    for field, value in patch.items():
        there = base.get(field)
        if isinstance(value, Mapping):
            merged[field] = strategic_merge(there, value) if isinstance(there, Mapping) else dict(value)
        elif isinstance(value, list) and field in KEYS:
            if value:
                merged[field] = _merged_items(there or (), value, KEYS[field])
        else:
            merged[field] = value
    return merged


def _merged_items(base: Sequence[Json], patch: Sequence[Json], key: str) -> list[Json]:
    items = {item[key]: item for item in base}
    for item in patch:
        items[item[key]] = strategic_merge(items.get(item[key], {}), item)
    return list(items.values())
