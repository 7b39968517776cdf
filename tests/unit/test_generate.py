"""`make check` names each file that differs from the output of `make generate`."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import generate

MAKES_ANSWER = "from pathlib import Path; Path('answer').write_text(Path('question').read_text() * 2)"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository in which `answer` is generated from `question`."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "question").write_text("21")
    (tmp_path / ".gitignore").write_text("ignored\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "COMMANDS", (("-c", MAKES_ANSWER),))
    return tmp_path


def test_what_is_generated_is_up_to_date_after_it_was_made(checkout: Path) -> None:
    generate.generate(checkout)
    (checkout / "ignored").write_text("whatever")
    assert generate.stale() == []


@pytest.mark.parametrize("before", [None, "old"])
def test_what_is_missing_or_old_is_named_and_left_as_it_is(checkout: Path, before: str | None) -> None:
    if before is not None:
        (checkout / "answer").write_text(before)
    assert generate.stale() == ["answer"]
    assert (checkout / "answer").exists() == (before is not None)


def test_a_command_that_fails_is_no_success(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "COMMANDS", (("-c", "raise SystemExit(3)"),))
    with pytest.raises(subprocess.CalledProcessError):
        generate.stale()
