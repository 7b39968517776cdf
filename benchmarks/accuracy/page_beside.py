"""Common code of programs that make a page from a JSON file."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write(markdown: Callable[[dict[str, Any]], str]) -> None:
    """Make a page of each JSON file that the command line names, and write it beside that file."""
    for name in sys.argv[1:]:
        figures = Path(name)
        figures.with_suffix(".md").write_text(markdown(json.loads(figures.read_text())))
