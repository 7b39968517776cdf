"""No package outside tests/ imports from tests/, and no code connects to a cluster that nobody named.

The import contracts in pyproject.toml check the order of the packages.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = [
    "benchmarks", "cli", "demo", "formats", "kernels", "kubectl", "localcluster", "operator", "probes", "runtime",
    "scripts", "smallmodels",
]  # fmt: skip


def imported(file: Path) -> Iterator[str]:
    """Yield the top-level package of each import of a module, at any depth."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_the_architecture_page_lists_the_operators_layers_in_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["kvpilot_operator"])
    page = (ROOT / "docs/architecture.md").read_text()
    told = page.partition("has no exception: ")[2].partition("\n\n")[0]
    told = re.sub(r"\([^)]*\)|, which know nothing of one another", "", told)
    assert [set(re.findall(r"`(\w+)`", layer)) for layer in told.split(";")] == [
        set(layer.split(" | ")) for layer in layers
    ]


def test_demo_benchmarks_and_scripts_import_nothing_from_tests() -> None:
    ours = {"tests", *(path.name for path in TESTS.iterdir()), *(path.stem for path in TESTS.rglob("*.py"))}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert {"manifests.py", "fleet.py", "cpu_backend.py", "world.py"} <= {file.name for file in files}
    # A module of a benchmark or package may share its name with a helper of the tests.
    found = {(str(file.relative_to(ROOT)), name) for file in files for name in imported(file) if name in ours}
    assert {(file, name) for file, name in found if not (ROOT / file).with_name(f"{name}.py").is_file()} == set()


def test_only_the_operator_reads_a_cluster_from_the_environment() -> None:
    """Every connection outside the operator names its client configuration.

    `kubectl kvpilot` uses the client configuration that the user named, if any.
    """
    found = set()
    for file in (file for folder in [*FOLDERS, "tests"] for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        if "connect" not in text and "load_" not in text:
            continue  # parsing is slow, and most files have neither word
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name, given = ast.unparse(call.func), {one.arg for one in call.keywords}
            if name == "Cluster.connect" or (name.startswith("config.load_") and "config_file" not in given):
                found.add(str(file.relative_to(ROOT)))
    assert found == {"operator/kvpilot_operator/cluster/client.py", "operator/kvpilot_operator/main.py"}


def test_no_test_uses_the_developers_own_cluster() -> None:
    script = "import asyncio; from kubernetes.aio import config; asyncio.run(config.load_kube_config())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert "ConfigException" in done.stderr
