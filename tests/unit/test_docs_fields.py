"""Fields, chart values and options that the docs name exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.toolbox.helm import helm
from kvpilot_localcluster.toolbox.kubectl import kubectl
from support.crd import root_schema
from support.page_commands import options_of, subcommand

ROOT = Path(__file__).parents[2]
# Skip decisions and benchmarks, which state what was true at their time, and the reference, which is generated.
PAGES = [
    page for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if not {"decisions", "benchmarks", "upstream", "reference"} & set(page.parts)
]  # fmt: skip
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FIELDS: Any = root_schema()["properties"]
SPEC, STATUS = FIELDS["spec"]["properties"], FIELDS["status"]["properties"]
VALUES: Any = yaml.safe_load((ROOT / "charts/kvpilot/values.yaml").read_text())
# These chart values are also fields of a container.
CONTAINERS = {"resources", "securityContext"}
# A field of KServe's InferenceService.
THEIRS = ["spec", "canary", "trafficPercent"]
# Names of files look like fields.
FILES = (".md", ".py", ".yaml", ".yml", ".json", ".sh", ".svg", ".csv")


def dotted(page: Path) -> Iterator[str]:
    """Yield the dotted names in backticks."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`([a-z]\w*(?:\[\])?(?:\.\w+(?:\[\])?)+)(?:=[^`]*|: [^`]*)?`", text):
        if not name.endswith(FILES):
            yield name.replace("[]", "")


def is_value(path: list[str]) -> bool:
    """Return True if values.yaml has this path, or an empty mapping that may hold it."""
    here = VALUES
    for name in path:
        if here == {}:
            return True
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True


def has(schema: Any, path: list[str]) -> bool:
    """Return True if an object of this schema may have a field at this path. Lists are read as their items."""
    for name in path:
        while "items" in schema:
            schema = schema["items"]
        if name not in schema.get("properties", {}):
            return bool(schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties"))
        schema = schema["properties"][name]
    return True


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_field_named_on_a_page_is_in_the_api(page: Path) -> None:
    names = [name.removeprefix("spec.").split(".") for name in dotted(page)]
    ours = [["spec", *name] for name in names if name[0] in SPEC]
    ours += [name for name in names if name[0] == "status" and name[1] in STATUS]
    assert not [path for path in ours if path != THEIRS and not has({"properties": FIELDS}, path)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_chart_value_set_on_a_page_exists(page: Path) -> None:
    given = re.findall(r"--set[ =]'?([\w.]+)=", page.read_text(encoding="utf-8"))
    named = [name for name in dotted(page) if name.split(".")[0] in VALUES.keys() - SPEC.keys() - CONTAINERS]
    assert not [name for name in [*given, *named] if not is_value(name.split("."))]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_kubectl_and_helm_have_the_options_of_every_page(page: Path) -> None:
    programs = {"kubectl": kubectl(), "helm": helm()}
    for words in commands(page):
        if words[0] in programs and len(words) > 1 and "kvpilot" not in words[1:2]:
            options = {word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-zA-Z]", word)}
            assert options <= options_of(programs[words[0]], *subcommand(tuple(words))), words


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the kubectl and Helm commands in a page's shell blocks, without comments, pipes and substitutions."""
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?((?:kubectl|helm) .*)", line)
            if found is None:
                continue
            try:
                words = shlex.split(found[1], comments=True)
            except ValueError:  # a quoted text of several lines
                continue
            ends = [i for i, word in enumerate(words) if re.match(r"[|&;<>]|.*;$", word)]
            yield words[: ends[0]] if ends else words


def test_the_check_finds_names_that_do_not_exist() -> None:
    assert has({"properties": FIELDS}, ["spec", "kvCache", "offload", "cpuMemoryGiB"])
    assert not has({"properties": FIELDS}, ["spec", "kvCache", "offload", "cpuMemoryGib"])
    assert is_value(["image", "repository"])
    assert not is_value(["image", "repo"])
