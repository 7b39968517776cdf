import os
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

from kvpilot_cli import command

ROOT = Path(__file__).parents[2]
NAMES = sorted(one.name for one in entry_points(group=command.GROUP))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """Return the Python of an environment that has kvpilot without any dependency."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    (site / "kvpilot.pth").write_text("".join(f"{(ROOT / one).parent}\n" for one in packages["packages"]))
    about = Path(str(distribution("kvpilot").locate_file("")))
    (installed,) = about.glob("kvpilot-*.dist-info")
    shutil.copytree(installed, site / installed.name)
    return folder / "bin" / "python"


@pytest.mark.parametrize("name", NAMES)
def test_a_command_without_its_dependencies_names_the_extra_in_one_line(bare, name):
    program = "import sys; from kvpilot_cli.command import main; sys.exit(main(sys.argv[1:]))"
    line = [bare, "-I", "-c", program, name, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"kvpilot {name}: the module ")
    assert f"pip install '.[{command.EXTRAS[name]}]'" in said


def test_every_command_has_an_extra_that_the_project_defines():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(command.EXTRAS) == NAMES
    assert set(command.EXTRAS.values()) <= set(extras)


def test_the_error_about_an_unknown_command_lists_the_known_ones(capsys):
    assert command.main(["calibrat"]) == 2
    said = capsys.readouterr().err
    assert "'calibrat' is not a command" in said
    assert "calibrate" in said


def test_without_a_command_the_usage_is_an_error(capsys):
    assert command.main([]) == 2
    assert "usage: kvpilot [--version] {" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    assert command.main(["--help"]) == 0
    assert "calibrate" in capsys.readouterr().out


def test_further_arguments_are_passed_to_the_command(capsys):
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

    monkeypatch.setattr("kvpilot_cli.plan.command.main", interrupted)
    assert command.main(["plan"]) == 130
    assert capsys.readouterr().err == ""
