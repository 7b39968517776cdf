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


def test_generated_files_are_up_to_date_after_make_generate(checkout: Path) -> None:
    generate.generate(checkout)
    (checkout / "ignored").write_text("whatever")
    assert generate.stale() == []


@pytest.mark.parametrize("before", [None, "old"])
def test_the_check_names_missing_or_stale_files_and_does_not_write_them(checkout: Path, before: str | None) -> None:
    if before is not None:
        (checkout / "answer").write_text(before)
    assert generate.stale() == ["answer"]
    assert (checkout / "answer").exists() == (before is not None)


def test_a_failing_generator_is_an_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "COMMANDS", (("-c", "raise SystemExit(3)"),))
    with pytest.raises(subprocess.CalledProcessError):
        generate.stale()
