"""The committed reference page is the one that the CRD gives."""

from __future__ import annotations

from pathlib import Path

from kvpilot_operator.api.docs import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "quantizedllmservice.md"


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference_page(), (
        f"run: python -m kvpilot_operator.api.docs > docs/reference/{PAGE.name}"
    )
