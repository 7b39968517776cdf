"""`make check` refuses commit subjects and Markdown lines or pages that are too long, and names their place."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import check_prose

AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *AUTHOR, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit of history that violates every rule."""
    root = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", "-b", "main", root], check=True)
    git(root, "commit", "--allow-empty", "-m", "what was done before: " + "x" * 80)
    return root


@pytest.mark.parametrize("subject", ["Add a test", "Refuse `auto` on a GPU", "Write " + "x" * 66])
def test_a_subject_in_the_imperative_with_72_characters_passes(subject: str) -> None:
    assert list(check_prose.subject_faults(subject)) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Write " + "x" * 67, "73 characters"),
        ("add a test", "begins with 'add'"),
        ("Added a test", "begins with 'Added'"),
        ("The test of tests", "begins with 'The'"),
        ("README: say more", "begins with 'README:'"),
        ("", "begins with ''"),
    ],
)
def test_a_commit_subject_that_breaks_a_rule_is_refused(subject: str, fault: str) -> None:
    (found,) = check_prose.subject_faults(subject)
    assert fault in found


def test_commits_since_the_base_are_checked_but_history_and_merges_are_not(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "switch", "-q", "-c", "branch")
    git(repository, "commit", "--allow-empty", "-m", "Add one thing\n\nthe body is not a subject")
    git(repository, "switch", "-q", "main")
    git(repository, "commit", "--allow-empty", "-m", "Add another thing")
    git(repository, "merge", "-q", "--no-ff", "-m", "branch was merged", "branch")
    assert {subject for _, subject in check_prose.commits(repository, base)} == {"Add one thing", "Add another thing"}


def test_a_shallow_clone_without_the_base_has_no_commits_to_check(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    for subject in ("Add one thing", "another thing"):
        git(repository, "commit", "--allow-empty", "-m", subject)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repository}", clone], check=True)
    assert check_prose.commits(clone, base) == []


def test_a_folder_without_git_has_no_commits_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert check_prose.commits(tmp_path, check_prose.BASE) == []


def test_long_lines_are_found_outside_tables_code_and_link_targets() -> None:
    text = "\n".join(
        [
            "x" * 120,
            "y" * 121,
            "| " + "cell " * 40 + "|",
            "```sh",
            "z" * 200,
            "```",
            f"[a link](https://example.com/{'long/' * 30})",
            "- " + "word " * 30,
        ]
    )
    assert list(check_prose.long_lines(text)) == [(2, 121), (8, 152)]


def test_a_page_of_docs_may_have_200_lines_and_a_generated_page_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_prose, "LONG_PAGES", ())
    monkeypatch.setattr(check_prose, "LONG_LINES", ())
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    for name, lines in (("docs/fits.md", 200), ("docs/long.md", 201), ("docs/reference/api.md", 900), ("A.md", 300)):
        (tmp_path / name).write_text("a line\n" * lines)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "README.md").write_text("x" * 200)
    (fault,) = check_prose.page_faults(tmp_path, check_prose.pages(tmp_path))
    assert fault.startswith("docs/long.md: 201 lines")


def test_the_pages_of_this_repository_pass_the_prose_checks() -> None:
    assert list(check_prose.page_faults(check_prose.ROOT, check_prose.pages(check_prose.ROOT))) == []
