"""Check the subjects of commits and the length of Markdown lines and pages.

    .venv/bin/python scripts/check_prose.py

Print one line for each fault and exit with 1 if there is one. Skip commits up to BASE, which are history. A shallow
clone without BASE and a folder without git have no commits to check.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "4f5b16e02a49cabbf00a485bc6c5c1f047ec0690"
SUBJECT_LIMIT = 72
LINE_LIMIT = 120
PAGE_LIMIT = 200
GENERATED = ("docs/reference/", "docs/models")
"""Path prefixes of pages that a script writes. They have no limits."""
LONG_LINES: tuple[str, ...] = ()
"""Pages that may still have longer lines. Remove a page from here once it passes."""
LONG_PAGES: tuple[str, ...] = ()
"""Pages of docs/ that may still be longer. Remove a page from here once it passes."""
VERBS_FILE = "scripts/commit_verbs.txt"
"""The verbs that a commit subject may begin with."""


def subject_faults(subject: str) -> Iterator[str]:
    """Yield what is wrong with the subject of a commit."""
    if len(subject) > SUBJECT_LIMIT:
        yield f"the subject has {len(subject)} characters: shorten it to {SUBJECT_LIMIT}"
    first = subject.partition(" ")[0]
    if first not in (ROOT / VERBS_FILE).read_text(encoding="utf-8").split():
        yield f"the subject begins with '{first}': begin it with a verb of {VERBS_FILE}"


def commits(root: Path, base: str) -> list[tuple[str, str]]:
    """Return hash and subject of each commit since `base`, without merges. Return nothing if git cannot tell."""
    log = ["git", "-C", str(root), "log", "--no-merges", "--format=%h %s", f"{base}..HEAD", "--"]
    try:
        done = subprocess.run(log, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [(name, subject) for name, _, subject in (line.partition(" ") for line in done.stdout.splitlines())]


def long_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield number and length of each line beyond the limit.

    Tables and code blocks have no limit. The target of a link does not count, because a reader does not see it. A
    command in backticks does not count either, because a reader copies it whole.
    """
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.lstrip()
        if not fence and bare.startswith(("```", "~~~")):
            fence = bare[:3]
        elif fence and bare.startswith(fence):
            fence = ""
        elif not fence and not bare.startswith(("|", "<")):
            length = len(re.sub(r"\]\([^)\s]*\)|`[^`]{50,}`", "", line))
            if length > LINE_LIMIT:
                yield number, length


def page_faults(root: Path, pages: Iterable[Path]) -> Iterator[str]:
    """Yield each line and each page of docs/ that is too long."""
    for page in pages:
        name = page.relative_to(root).as_posix()
        text = page.read_text(encoding="utf-8")
        if name.startswith(GENERATED):
            continue
        if not name.startswith(LONG_LINES):
            for number, length in long_lines(text):
                yield f"{name}:{number}: {length} characters: wrap the line at {LINE_LIMIT}"
        lines = len(text.splitlines())
        if name.startswith("docs/") and not name.startswith(LONG_PAGES) and lines > PAGE_LIMIT:
            yield f"{name}: {lines} lines: shorten or split the page, which may have {PAGE_LIMIT}"


def pages(root: Path) -> list[Path]:
    """Return the Markdown files below `root`, except those in hidden folders."""
    found = (page.relative_to(root) for page in root.rglob("*.md"))
    return sorted(root / page for page in found if not any(part.startswith(".") for part in page.parts))


def main() -> int:
    """Print all faults and return the exit status."""
    faults = [
        f"{name} {subject!r}: {fault}" for name, subject in commits(ROOT, BASE) for fault in subject_faults(subject)
    ]
    faults += page_faults(ROOT, pages(ROOT))
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
