"""Links in the docs lead to existing files, and links to decisions have the right number."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import decisions_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
INDEX = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_of_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [one for one in links if "://" not in one and "mailto:" not in one and not (page.parent / one).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
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


def reachable(start: Path) -> set[Path]:
    """Return the pages of docs/ that a reader can reach from `start` by links."""
    found, waiting = set(), [start]
    while waiting:
        page = waiting.pop()
        if page in found or page.suffix != ".md" or not page.is_file():
            continue
        found.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    return found


def test_every_page_of_the_docs_can_be_reached_from_their_index() -> None:
    pages = set((ROOT / "docs").rglob("*.md"))
    assert pages - reachable(ROOT / "docs" / "README.md") == set()


def test_an_index_links_every_page_of_its_folder() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(links) == set()


def test_no_decision_reuses_the_number_of_a_former_one() -> None:
    numbers = [int(one.name[:4]) for one in DECISIONS]
    held = [int(number) for line in INDEX.splitlines() for number in re.findall(r"\d+", line.rpartition(" | ")[2])]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) & set(held) == set()
    assert set(numbers) | set(held) >= set(range(1, 57))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# Title\n\nStatus: accepted\n", "begin with '# 1. Title'"),
        ("# 2. Title\n\nStatus: accepted\n", "begin with '# 1. Title'"),
        ("# 1. Title\n\n**Context.**\n", "'Status: accepted'"),
        ("# 1. Title\n\nStatus: superseded by 3\n", "superseded by 3"),
    ],
)
def test_a_decision_without_title_or_status_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "0001-title.md").write_text(text)
    with pytest.raises(ValueError, match=re.escape(fault)):
        decisions_page.render(tmp_path)


def test_the_table_of_decisions_has_status_and_former_numbers(tmp_path: Path) -> None:
    (tmp_path / "0001-a.md").write_text("# 1. Do A\n\nStatus: superseded by 2\n")
    held = "Holds the former decisions 3 (an\nold one) and 4 (another)."
    (tmp_path / "0002-b.md").write_text(f"# 2. Do B\n\nStatus: accepted. {held}\n\nText.\n")
    assert decisions_page.render(tmp_path).splitlines()[-2:] == [
        "| 1 | [Do A](0001-a.md) | superseded by [2](0002-b.md) |  |",
        "| 2 | [Do B](0002-b.md) | accepted | 3, 4 |",
    ]
