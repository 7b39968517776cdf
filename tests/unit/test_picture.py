"""README's picture is drawn from the recording of a command, complete and in its colours."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import picture


def test_a_recording_has_the_command_and_its_output_on_a_terminal(tmp_path: Path) -> None:
    said = f"import sys; print('first', sys.stdout.isatty()); print('\\x1b[32mgreen\\x1b[0m {Path.home()}/x')"
    assert picture.record(tmp_path / "one.ansi", [sys.executable, "-c", said]) == 0
    command, *lines = (tmp_path / "one.ansi").read_text().splitlines()
    assert command.startswith("$ ")
    assert lines == ["first True", "\x1b[32mgreen\x1b[0m ~/x"]


def test_a_command_that_fails_or_is_missing_leaves_the_last_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last = tmp_path / "one.ansi"
    last.write_text("$ before\nfine\n")
    assert picture.record(last, [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert picture.record(last, ["no-such-program"]) == 127
    assert last.read_text() == "$ before\nfine\n"
    told = capfd.readouterr().err
    assert "exit code 3: nothing was written" in told
    assert "no-such-program does not start" in told


def test_a_picture_of_a_recording_begins_at_the_given_text_and_loads_no_files() -> None:
    drawn = picture.draw("$ make demo\nbefore\nhere it \x1b[32mbegins\x1b[0m\nend\n", "here")
    assert "before" not in drawn
    assert all(word in drawn for word in ("here", "begins", "end", "make&#160;demo"))
    assert "url(" not in drawn.replace("url(#", "")
    with pytest.raises(ValueError, match="name a text that the command prints"):
        picture.draw("$ make demo\nend\n", "here")
