"""Nothing outside tests/ needs what lies in it (import contracts in pyproject.toml order the packages)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = ["demo", "kernels", "localcluster", "operator", "planning", "runtime", "scripts"]


def imported(file: Path) -> Iterator[str]:
    """The first part of each name that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_demo_benchmarks_and_scripts_import_nothing_from_tests() -> None:
    ours = {"tests", *(path.name for path in TESTS.iterdir()), *(path.stem for path in TESTS.rglob("*.py"))}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert {"manifests.py", "fleet.py", "cpu_backend.py", "world.py"} <= {file.name for file in files}
    # A benchmark's or a package's own module may bear the name of a helper of the tests.
    found = {(str(file.relative_to(ROOT)), name) for file in files for name in imported(file) if name in ours}
    assert {(file, name) for file, name in found if not (ROOT / file).with_name(f"{name}.py").is_file()} == set()
