"""JSON plans that `kvpilot plan` prints."""

import json
from typing import Any

import pytest

from kvpilot_cli.plan.command import main


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Run `kvpilot plan --json` with these arguments, and return the JSON document."""
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def sequences(document: Any, dtype: str, context: int) -> int:
    """Return how many sequences of this context length fit with this dtype."""
    row = next(row for row in document["dtypes"] if row["dtype"] == dtype)
    found: int = next(fit["sequences"] for fit in row["capacities"] if fit["context_tokens"] == context)
    return found
