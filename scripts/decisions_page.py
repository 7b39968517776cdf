"""Write docs/decisions/README.md, the table of decisions, from the head of each decision.

    .venv/bin/python scripts/decisions_page.py docs/decisions

A decision begins with `# NUMBER. TITLE`, an empty line and `Status: accepted` or `Status: superseded by NUMBER`. The
status line may also say which former decisions the page holds.
"""

import re
import sys
from pathlib import Path

HEAD = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n(?:Status: )?(?P<status>accepted|superseded by \[?(?P<by>\d+))\b",
    re.IGNORECASE,
)
FORMER = re.compile(r"(?:Holds|Replaces)(?: the former)? decisions? (?P<list>.*?)\.(?:\s|$)", re.DOTALL)
INTRODUCTION = """\
# Decisions

Find out why something is as it is, and whether that still holds. A decision keeps its number. "Holds" names former
decisions that the page took in.

A new decision gets the next free number, a title that states the decision, and its status under the title. Then run
`make generate`.

| | decision | status | holds |
|---|---|---|---|
"""


def row(page: Path, numbers: dict[int, str]) -> str:
    """Return the table's line for a decision.

    Raises:
        ValueError: the page does not begin as a decision must; the message names the page and what to write.
    """
    text = page.read_text(encoding="utf-8")
    head = HEAD.match(text)
    if not head or int(head["number"]) != int(page.name[:4]):
        raise ValueError(
            f"{page}: begin with '# {int(page.name[:4])}. Title', an empty line and 'Status: accepted' "
            "or 'Status: superseded by NUMBER'"
        )
    status = head["status"].lower()
    if head["by"]:
        if int(head["by"]) not in numbers:
            raise ValueError(f"{page}: superseded by {head['by']}, which is no decision in this folder")
        status = f"superseded by [{head['by']}]({numbers[int(head['by'])]})"
    paragraph = text.split("\n\n")[1]
    former = FORMER.search(paragraph)
    held = ", ".join(re.findall(r"\b\d+(?= \()", former["list"])) if former else ""
    return f"| {head['number']} | [{head['title']}]({page.name}) | {status} | {held} |"


def render(folder: Path) -> str:
    """Return the whole page."""
    pages = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.md"))
    numbers = {int(page.name[:4]): page.name for page in pages}
    return INTRODUCTION + "".join(f"{row(page, numbers)}\n" for page in pages)


def main() -> int:
    """Write the page of the folder that the command line names, and return the exit status."""
    folder = Path(sys.argv[1])
    try:
        text = render(folder)
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 1
    (folder / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
