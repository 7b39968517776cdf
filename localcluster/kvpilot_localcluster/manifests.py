"""Read manifests in YAML. Ours has 180 KB; libyaml, if PyYAML was built with it, reads it eight times as fast."""

from __future__ import annotations

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def objects(text: str) -> list[Any]:
    """Return all objects of a YAML stream, without its empty documents."""
    return [one for one in yaml.load_all(text, _LOADER) if one]
