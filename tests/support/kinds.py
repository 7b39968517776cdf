"""Checks of manifests against the official client's models."""

import re
from typing import Any

from kubernetes.aio.client import models


def unknown(kind: str, value: Any, path: str) -> list[str]:
    """Return the paths in a JSON value that the official client's model lacks, or declares with another type.

    Args:
        kind: the model's name, or a type of the client such as `List[V1Container]`.
        value: the JSON value.
        path: path of `value`, with which the returned paths begin.
    """
    if (inner := re.fullmatch(r"List\[(.*)\]", kind)) is not None:
        return [f for i, item in enumerate(value) for f in unknown(inner[1], item, f"{path}[{i}]")]
    if (inner := re.fullmatch(r"Dict\[\w+, (.*)\]", kind)) is not None:
        return [f for name, item in value.items() for f in unknown(inner[1], item, f"{path}.{name}")]
    if kind in ("str", "int", "bool", "object"):
        return [] if kind == "object" or type(value).__name__ == kind else [f"{path} is not of type {kind}"]
    model = getattr(models, kind)
    fields = {json: model.openapi_types[name] for name, json in model.attribute_map.items()}
    missing = [f"{path}.{name} is unknown" for name in value if name not in fields]
    return missing + [f for n, v in value.items() if n in fields for f in unknown(fields[n], v, f"{path}.{n}")]
