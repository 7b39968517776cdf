"""scripts/run_tests.py, which CI relies on, runs every part, counts every failure, and prints the total at the end."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
# Test files of the parts that run tests of their own, by the name of the part.
TESTS = {
    "e2e": "def test_works(): pass\ndef test_breaks(): assert 1 == 2\n",
    "unit": "import pytest\n@pytest.fixture\ndef broken(): raise OSError('no')\ndef test_needs(broken): pass\n",
    "chart": "import pytest\ndef test_a(): pass\ndef test_b(): pass\n@pytest.mark.skip\ndef test_c(): pass\n",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the script with the parts of TESTS. Any other part crashes before it writes a report."""
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)

    def command(part: str, report: Path, _options: tuple[str, ...]) -> list[str]:
        if part == "check":
            return [sys.executable, "-c", "print('all is well')"]
        if part == "scale":
            return [sys.executable, "-m", "pytest", "-q", str(tmp_path), "--collect-only", "-p", "no:cacheprovider"]
        if part not in TESTS:
            return [sys.executable, "-c", "import os; print('last words', flush=True); os.kill(os.getpid(), 9)"]
        file = tmp_path / part / "test_it.py"
        file.parent.mkdir()
        file.write_text(TESTS[part])
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file), f"--junitxml={report}"]

    monkeypatch.setattr(module, "command", command)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *arguments])
    status: int = script.main()
    return status


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_failed_part_of_the_tests_stops_no_other_part_and_all_are_summed_up(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], jobs: str
) -> None:
    assert run(script, monkeypatch, "--jobs", jobs, "e2e", "unit", "chart", "cluster", "check") == 1
    said = capfd.readouterr().out
    for words in ("assert 1 == 2", "OSError: no", "last words", "all is well"):
        assert words in said
    summary = said.splitlines()
    rows = {
        line.split()[0]: line.split()[1:4]
        for line in summary
        if not line.startswith("FAILED") and " | " not in line and len(line.split()) == 5
    }
    assert rows["e2e"] == ["1", "1", "0"]
    assert rows["unit"] == ["0", "1", "0"]
    assert rows["chart"] == ["2", "0", "1"]
    assert rows["cluster"] == ["0", "1", "0"]
    assert rows["check"] == ["1", "0", "0"]
    assert rows["together"] == ["4", "3", "1"]
    failed = [line for line in summary if line.startswith("FAILED")]
    assert len(failed) == 3
    assert any("test_it" in line and "test_breaks" in line for line in failed)
    assert "FAILED cluster ended with exit code -9" in failed
    assert summary[-1] == "4 passed, 3 failed"


def test_without_failed_tests_the_exit_code_is_0(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "chart", "check") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "3 passed, 0 failed"


def test_a_part_of_the_tests_that_ran_no_test_has_failed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "scale") == 1
    assert capfd.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"


def test_an_unknown_part_of_the_tests_is_refused_before_any_part_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(script, monkeypatch, "chart", "carts")
    assert caught.value.code == 2
    assert "unknown part carts: use runtime" in capfd.readouterr().err


def test_the_script_lists_every_folder_of_tests_and_those_with_long_tests(script: ModuleType) -> None:
    files = list((SCRIPT.parents[1] / "tests").glob("*/test_*.py"))
    assert {*(file.parent.name for file in files), "check"} == set(script.PARTS)
    assert {file.parent.name for file in files if "mark.long" in file.read_text()} - {"unit"} == set(script.LONG)
