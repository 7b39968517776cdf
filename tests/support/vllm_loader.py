"""Files that vLLM's default loader reads in folders, asked by `support.own_process`: `[FOLDER, ...]`.

The answer is a sorted list of file names for each, or null if the loader finds no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Read folders from stdin and write the names of their files to stdout."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    found: list[list[str] | None] = []
    for folder in json.load(sys.stdin):
        try:
            files = loader._prepare_weights(folder, None, None, True, None)[1]
        except (RuntimeError, FileNotFoundError):
            found.append(None)
        else:
            found.append(sorted(Path(file).name for file in files))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
