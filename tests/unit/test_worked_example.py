"""The worked example shows the commands of its script, and only conditions, fields and columns that exist today."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.crd import load_crd, root_schema

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import worked_example

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/worked-example.md").read_text(encoding="utf-8")
STATUS: Any = root_schema()["properties"]["status"]["properties"]


def outputs() -> list[tuple[str, str]]:
    """Return the commands of the page with their outputs."""
    blocks = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
    parts = re.split(r"^\$ (.*)\n", blocks, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_the_worked_example_equals_the_scripts_output_of_one_run() -> None:
    day, vllm = re.findall(r"one real run on ([\d-]+): .* vLLM ([\d.]+) on", PAGE, re.DOTALL)[0]
    assert worked_example.page([text for _, text in outputs()], day, vllm) == PAGE
    assert all(text for _, text in outputs())


@pytest.mark.parametrize("command", [command for step in worked_example.STEPS for command in step.commands])
def test_a_path_that_a_command_reads_is_a_field_of_the_status(command: str) -> None:
    for path in re.findall(r"\{\.status\.([\w.]+)", command):
        here = STATUS
        for name in path.split("."):
            assert name in here, path
            here = here[name].get("properties", {})


def test_the_table_of_kubectl_has_the_present_columns() -> None:
    columns = load_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [one["name"].upper() for one in columns if not one.get("priority")]
    heads = [text.splitlines()[0].split() for command, text in outputs() if command == "kubectl get qllm smollm2"]
    assert heads
    for head in heads:
        assert head == ["NAME", *shown, *([] if "AGE" in shown else ["AGE"])]


def test_conditions_and_figures_on_the_page_are_those_of_the_api() -> None:
    told = re.findall(
        r"^([A-Z][A-Za-z]+) +(?:True|False|Unknown) ", dict(outputs())["kubectl kvpilot status smollm2"], re.MULTILINE
    )
    assert "Ready" in told
    reference = (ROOT / "docs/conditions.md").read_text()
    assert not [name for name in told if f"`{name}`" not in reference]
    last = next(text for command, text in outputs() if ".status.accuracy.last}" in command)
    known = STATUS["accuracy"]["properties"]["last"]["properties"]
    assert json.loads(last).keys() <= known.keys()
