"""Pages lead to files that exist, and a decision is found by its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_of_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [one for one in links if "://" not in one and "mailto:" not in one and not (page.parent / one).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{again}" if again else slug)
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_in_a_page_lead_to_headings(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text)
    ours = [(page.parent / path if path else page, anchor) for path, anchor in links if "://" not in path]
    missing = [f"{path.name}#{anchor}" for path, anchor in ours if path.suffix == ".md" and anchor not in anchors(path)]
    assert not missing


def test_decisions_are_numbered_one_after_the_other_and_say_so_in_their_titles() -> None:
    numbers = [int(one.name[:4]) for one in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))
    for number, one in zip(numbers, DECISIONS, strict=True):
        assert re.match(rf"# (Decision )?0*{number}\b", one.read_text(encoding="utf-8")), one.name
