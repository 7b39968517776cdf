"""Write pages beside the JSON files that they are made from."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(markdown: Callable[[dict[str, Any]], str]) -> None:
    """Make a page from each JSON file that the command line names, and write it beside the file."""
    for name in sys.argv[1:]:
        figures = Path(name)
        figures.with_suffix(".md").write_text(markdown(json.loads(figures.read_text())))
