"""Checks of the pages in docs/clouds that need no cloud account."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.toolbox.helm import helm
from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.spec import parse
from kvpilot_operator.observe.nodes import node_facts
from support.crd import apply_defaults
from support.page_commands import Command, commands_of, installed_images, options_of, subcommand

ROOT = Path(__file__).parents[2]
CLOUDS = ROOT / "docs" / "clouds"
PAGES = sorted(path.stem for path in CLOUDS.glob("*.md") if path.stem != "README")
KNOWN: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests/support/cloud_options.yaml").read_text())
LABELS = {
    "eks": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    "gke": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    "aks": {"nvidia.com/gpu.product": "NVIDIA-A100-80GB-PCIe"},
    "openshift": {"nvidia.com/gpu.product": "NVIDIA-L4"},
}


@cache
def page(name: str) -> str:
    return (CLOUDS / f"{name}.md").read_text()


def commands(name: str, program: str) -> list[Command]:
    return [one for one in commands_of(page(name)) if one.words[0] == program]


def test_each_cloud_has_a_page_and_the_index_lists_it() -> None:
    assert PAGES == ["aks", "eks", "gke", "kind", "openshift"]
    assert re.findall(r"\((\w+)\.md\)", page("README").partition("##")[0]) == ["eks", "gke", "aks", "openshift", "kind"]


@pytest.mark.parametrize("name", PAGES)
def test_the_options_of_every_program_are_checked(name: str) -> None:
    ours = {"kubectl", "helm", "kvpilot"}
    for one in commands_of(page(name)):
        assert one.words[0] in ours or known(one), one.words


def known(one: Command) -> dict[str, Any] | None:
    """Return the recorded options of a command: those of the longest recorded prefix of its words."""
    names = [name for name in KNOWN if f"{one.name} ".startswith(f"{name} ")]
    return KNOWN[max(names, key=len)] if names else None


@pytest.mark.parametrize("name", PAGES)
def test_vendors_programs_get_only_documented_options(name: str) -> None:
    for one in commands_of(page(name)):
        about = known(one)
        if about is not None:
            assert about["source"]
            assert set(one.options) <= set(about["options"]), one.words


def test_every_listed_option_is_used_by_a_page() -> None:
    used = [one for name in PAGES for one in commands_of(page(name))]
    for name, about in KNOWN.items():
        theirs = {option for one in used if known(one) is about for option in one.options}
        assert theirs == set(about["options"]), name


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("program", ["kubectl", "helm"])
def test_kubectl_and_helm_have_the_options_of_the_page(name: str, program: str) -> None:
    at = {"kubectl": kubectl, "helm": helm}[program]()
    asked = commands(name, program)
    assert asked
    for one in asked:
        assert set(one.options) <= options_of(Path(at), *subcommand(one.words)), one.words


def test_an_option_that_helm_or_kubectl_lacks_is_found() -> None:
    assert "--waitt" not in options_of(helm(), "install")
    assert "--for" in options_of(Path(kubectl()), "wait")
    assert "--for" not in options_of(Path(kubectl()), "apply")


@pytest.mark.parametrize("name", PAGES)
def test_our_chart_has_the_values_of_the_page(name: str) -> None:
    (install,) = (one for one in commands(name, "helm") if "charts/kvpilot" in one.words)
    pushed = {one.words[-1] for one in commands(name, "docker") if one.words[1] == "push"}
    loaded = {word for one in commands(name, "kind") if one.words[1] == "load" for word in one.words[5:]}
    assert installed_images(install) <= pushed | loaded


@pytest.mark.parametrize("name", PAGES)
def test_the_service_of_the_page_is_valid_and_its_image_was_built_on_the_page(name: str) -> None:
    (apply,) = (one for one in commands(name, "kubectl") if "apply" in one.words)
    service = yaml.safe_load(apply.given)
    assert faults(service) == ()
    spec = parse(apply_defaults(service))
    built = {one.words[one.words.index("-t") + 1] for one in commands(name, "docker") if one.words[1] == "build"}
    assert spec.engine.image in built
    assert spec.model.served_name == "chat"
    assert spec.kv_cache.mode == ("Auto" if name == "kind" else "Recommend")


@pytest.mark.parametrize("name", [name for name in PAGES if name != "kind"])
def test_the_model_fits_on_the_gpu_of_the_page(name: str) -> None:
    (plan,) = commands(name, "kvpilot")
    done = subprocess.run(
        [Path(sys.executable).with_name("kvpilot"), *plan.words[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = (line.split() for line in done.stdout.splitlines() if line.startswith("auto "))
    assert int(row[-1].replace(",", "")) >= 4, row


@pytest.mark.parametrize("name", LABELS)
def test_the_operator_knows_the_gpu_that_the_page_rents(name: str) -> None:
    ((label, value),) = LABELS[name].items()
    assert value in page(name)
    assert f"`{label}`" in page(name)
    (plan,) = commands(name, "kvpilot")
    node = {"metadata": {"labels": {label: value}}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    known_as = node_facts(node).gpu
    assert known_as.removeprefix("NVIDIA-") == plan.words[plan.words.index("--gpu") + 1]


@pytest.mark.parametrize("name", [*PAGES, "README"])
def test_no_page_names_a_price_and_every_linked_page_exists(name: str) -> None:
    assert not re.search(r"(?<![\w$])[$€]\s?\d|\d\s?(USD|EUR|dollars?|cents?)\b", page(name))
    for link in re.findall(r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)", page(name)):
        assert (CLOUDS / link).resolve().is_file(), link


@pytest.mark.parametrize("name", PAGES)
def test_every_page_deletes_what_it_creates(name: str) -> None:
    end = page(name).partition("## The end")[2]
    assert [one for one in commands_of(page(name).partition("## 2.")[0] + end) if "delete" in one.words]
