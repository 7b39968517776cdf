"""README is short, its commands can be pasted, and its figures are those of the benchmarks' pages."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from kvpilot_kubectl.commands import parser
from kvpilot_localcluster.toolbox.helm import helm
from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.spec import parse
from support.crd import apply_defaults
from support.page_commands import Command, commands_of, installed_images, options_of, subcommand

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOP, _, BELOW = README.partition("\n## ")
COMMANDS = commands_of(README)


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def of(program: str) -> list[Command]:
    return [one for one in COMMANDS if one.words[0] == program]


def test_the_readme_is_short_and_has_few_links() -> None:
    assert len(README.splitlines()) <= 150
    assert len(re.findall(r"\]\((?!#)", BELOW)) <= 10


def test_the_first_screen_has_a_picture_a_figure_and_the_project_status() -> None:
    assert re.search(r"!\[[^\]]{20,}\]\(docs/images/\w+\.svg\)", TOP)
    assert re.search(r"\*\*[^*]*\d[^*]*\*\*", TOP)
    assert "not released" in TOP


def test_the_options_of_every_command_are_checked() -> None:
    assert {one.words[0] for one in COMMANDS} == {"make", "docker", "helm", "kubectl", "pip"}


def test_make_demo_and_make_test_run_the_same_programs_as_ci() -> None:
    assert [one.words for one in of("make")] == [("make", "demo"), ("make", "test")]
    plan = {
        name: subprocess.run(["make", "--dry-run", name], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in ("demo", "test")
    }
    assert "-m kvpilot_demo.prepare" in plan["demo"]
    assert '"-m", "kvpilot_demo.prepare"' in (ROOT / "tests/e2e/test_demo.py").read_text(encoding="utf-8")
    assert "scripts/run_tests.py" in plan["test"]
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == "make test"


def test_the_readme_names_all_programs_that_the_local_build_needs() -> None:
    assert {"make", "dpkg-dev", "patch", "xz-utils", "openssl", "python3-venv"} <= set(
        re.findall(r"`([\w-]+)`", section("Try it"))
    )


@pytest.mark.parametrize("program", ["kubectl", "helm"])
def test_kubectl_and_helm_have_the_options_of_the_readme(program: str) -> None:
    at = Path({"kubectl": kubectl, "helm": helm}[program]())
    asked = [one for one in of(program) if one.words[1] != "kvpilot"]
    assert asked
    for one in asked:
        assert set(one.options) <= options_of(at, *subcommand(one.words)), one.words


def test_our_own_command_takes_its_arguments_and_its_extra_exists() -> None:
    (ours,) = (one for one in of("kubectl") if one.words[1] == "kvpilot")
    assert parser().parse_args(list(ours.words[2:])).service == "chat"
    assert [one.words for one in of("pip")] == [("pip", "install", ".[kubectl]")]


def test_each_image_is_built_for_gpu_nodes_pushed_and_used() -> None:
    build, push = (
        [
            one.words[-1] if verb == "push" else one.words[one.words.index("-t") + 1]
            for one in of("docker")
            if one.words[1] == verb
        ]
        for verb in ("build", "push")
    )
    assert build == push
    assert len(set(build)) == 2
    for one in of("docker"):
        if one.words[1] == "build":
            assert "--platform" in one.options
            assert (ROOT / one.words[one.words.index("-f") + 1]).is_file()
    (install,) = of("helm")
    assert installed_images(install) | {service()["spec"]["engine"]["image"]} == set(push)


@cache
def service() -> dict:
    (apply,) = (one for one in of("kubectl") if "apply" in one.words)
    return yaml.safe_load(apply.given)


def test_the_readmes_service_is_valid_and_uses_at_most_one_gpu() -> None:
    assert faults(service()) == ()
    spec = parse(apply_defaults(service()))
    assert spec.kv_cache.mode == "Recommend"
    assert spec.scaling.max_replicas * spec.engine.tensor_parallel_size == 1
    engine = service()["spec"]["engine"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": spec.engine.tensor_parallel_size}
    assert {"cpu", "memory"} <= set(engine["resources"]["requests"])


def test_the_programs_in_the_support_matrix_exist() -> None:
    named = re.findall(r"`(benchmarks/[\w/.]+)`", section("What works where"))
    assert named
    assert all((ROOT / path).is_file() for path in named)


def test_figures_equal_those_of_the_benchmarks_page() -> None:
    page = (ROOT / "docs/benchmarks/h200-engine-window.md").read_text(encoding="utf-8")
    rows = [line for line in section("On a GPU").splitlines() if line.startswith(("| bf16", "| fp8", "| `k"))]
    assert len(rows) == 5
    for row in rows:
        measured = row.rsplit(" | ", 2)[0] + " |"  # users and KL are from other pages
        for figure in re.findall(r"\d[\d,.]*(?= ms| tokens/s| \|)", measured):
            assert figure in page, figure


def test_the_readmes_numbers_of_users_are_those_of_the_benchmarks_raw_file() -> None:
    runs = json.loads((ROOT / "docs/benchmarks/h200-users.json").read_text())["one host"]
    claim = re.search(
        r"serves (\d+) users .*?, (\d+) with `fp8` and (\d+) with bf16.*?\((\d+), (\d+), (\d+)\)", README, re.S
    )
    assert claim is not None
    for place, dtype in enumerate(("k4v4", "fp8", "auto")):
        *_, held, missed = runs[dtype]["levels"]
        assert (held["held"], missed["held"]) == (True, False)
        assert (str(held["users"]), str(missed["users"])) == (claim[place + 1], claim[place + 4])
        assert f"| {held['users']} |" in section("On a GPU")
