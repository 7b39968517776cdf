"""Figures in docs/faq.md match the pages that it links to."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FAQ = (DOCS / "faq.md").read_text()


def section(title: str) -> str:
    return FAQ.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_counted_models_match_the_table() -> None:
    text = "".join((DOCS / page).read_text() for page in ("models-common.md", "models-others.md"))
    rows = [line.split(" | ") for line in text.splitlines() if line.count(" | ") == 12]
    verdicts = [row[11] for row in rows if row[11].startswith(("yes", "no:"))]
    counted = {
        "published": len(verdicts),
        "yes": verdicts.count("yes"),
        "latent": sum("latent" in one for one in verdicts),
    }
    found = re.search(
        r"has (\d+) published.*: (\d+) take.*For (\d+) of them it is multi-head latent attention",
        section("Does kvpilot serve my model?"),
        re.DOTALL,
    )
    assert found is not None
    assert dict(zip(counted, map(int, found.groups()), strict=True)) == counted


def test_every_linked_page_exists() -> None:
    linked = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FAQ)
    assert linked
    assert [one for one in linked if not (DOCS / one).is_file()] == []
