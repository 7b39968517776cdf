import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_kernels import command


def test_a_command_that_does_not_exist_is_named_with_those_that_do(capsys):
    assert command.main(["calibrat"]) == 2
    said = capsys.readouterr().err
    assert "'calibrat' is no command" in said
    assert "calibrate" in said


def test_without_a_command_the_usage_is_an_error(capsys):
    assert command.main([]) == 2
    assert "usage: kvpilot {" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    assert command.main(["--help"]) == 0
    assert "calibrate" in capsys.readouterr().out


def test_the_rest_of_the_line_goes_to_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["calibrate", "--help"])
    assert ended.value.code == 0
    assert "--prompts" in capsys.readouterr().out


def test_a_reader_who_leaves_early_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    program = Path(sys.executable).with_name("kvpilot")
    command = [program, "plan", "--list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_user_who_interrupts_gets_no_traceback(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpilot_planning.plan.main", interrupted)
    assert command.main(["plan"]) == 130
    assert capsys.readouterr().err == ""
