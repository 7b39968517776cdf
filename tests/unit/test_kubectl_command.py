"""`kubectl kvpilot` as a command: its arguments, its output and its exit codes."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubectl_runs import COMMANDS, Run, refused, runner, serving_chat
from loopback_api import LoopbackApi

from kvpilot_kubectl.commands import parser
from kvpilot_kubectl.main import main


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with serving_chat(tmp_path) as api:
        yield api


@pytest.fixture
def run(api: LoopbackApi, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(api, capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["stat"], "stat"),
        (["why"], "SERVICE"),
        (["status", "--everything"], "--everything"),
        (["status", "-o", "json"], "-o"),
        (["why", "chat", "--deny"], "--deny"),
        (["promote"], "SERVICE"),
        (["pause", "Chat"], "'Chat' is not a valid name"),
        (["pause", ""], "'' is not a valid name"),
        (["pause", "../../pods/x"], "'../../pods/x' is not a valid name"),
        (["status", "-n", "a b"], "'a b' is not a valid name"),
        (["status", "chat", "-A"], "leave SERVICE out"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_reported_in_one_line_before_any_request(
    run: Run, api: LoopbackApi, argv: list[str], named: str
) -> None:
    assert named in refused(run, *argv, code=2)
    assert api.asked == []


def test_help_describes_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)


def test_the_docs_list_every_command_and_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubectl.md").read_text()
    whole = parser()
    (commands,) = (one for one in whole._actions if isinstance(one, argparse._SubParsersAction))
    for part in (whole, *commands.choices.values()):
        for action in part._actions:
            for name in [*(action.choices or ()), *action.option_strings]:
                assert name in ("-h", "--help") or re.search(rf"(?<![-\w]){name}(?![-\w])", page), name


def test_options_may_stand_before_the_command_and_after_it(run: Run) -> None:
    outputs = [run("--context", "here", "status"), run("status", "--context", "here")]
    assert outputs[0] == outputs[1]
    assert outputs[0][1].splitlines()[1].startswith("chat ")


def test_the_default_namespace_is_the_contexts(run: Run, api: LoopbackApi) -> None:
    for argv in (["status"], ["status", "-n", "other"], ["status", "--context", "bare"], ["status", "-A"]):
        assert run(*argv)[0] == 0
    asked = [path.partition("/v1alpha1/")[2].partition("?")[0] for _, path in api.asked]
    named = [f"namespaces/{one}/quantizedllmservices" for one in ("models", "other", "default")]
    assert asked == [*named, "quantizedllmservices"]


def test_without_services_the_command_says_so_on_stderr(run: Run, api: LoopbackApi) -> None:
    api.services.clear()
    assert run("status") == (0, "", "no services found in namespace models\n")


def test_a_reader_who_leaves_early_gets_no_traceback(api: LoopbackApi) -> None:
    api.services = {f"s{number}": {"metadata": {"name": f"s{number}" * 20}} for number in range(2000)}
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    command = f"'{program}' status --kubeconfig '{api.kubeconfig}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.startswith("NAME ")
    assert done.stderr == ""


def test_a_user_who_interrupts_gets_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpilot_kubectl.commands.cluster", asked)
    assert run("status") == (130, "", "")


def test_a_terminal_without_unicode_shows_replacements(api: LoopbackApi) -> None:
    api.services["chat"]["status"] = {"decisions": [{"action": "Hold", "message": "≥ 85% …"}]}
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    done = subprocess.run(
        [program, "why", "chat", "--kubeconfig", api.kubeconfig],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "? 85% ?" in done.stdout


def test_without_its_dependencies_the_command_names_the_extra(tmp_path: Path) -> None:
    """The operator's image has the script but not the optional dependency."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    program = Path(sys.executable).with_name("kubectl-kvpilot")
    done = subprocess.run(
        [program, "status"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kubectl kvpilot: the module rich is not installed: pip install 'kvpilot[kubectl]'")
