"""Write the table of values in the chart's README from the "# --" comments of values.yaml."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

BEGIN, END = "<!-- values: written by `make generate` -->", "<!-- end of values -->"
_TYPES = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}


@dataclass(frozen=True)
class Value:
    """A documented value: its dotted path, its default and its description."""

    path: str
    default: Any
    description: str


def documented(text: str) -> Iterator[Value]:
    """Yield the values of a values.yaml in its order. The description of a map covers all its values.

    Raises:
        ValueError: neither a value nor its parent has a description, or the text is not a map.
    """
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml is not a map")
    yield from _walk(root, yaml.safe_load(text), text.splitlines(), "")


def _walk(node: yaml.MappingNode, values: Mapping[str, Any], lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        path, value = prefix + key.value, values[key.value]
        description = _description(lines, key.start_mark.line)
        if description:
            yield Value(path, value, description)
        elif isinstance(child, yaml.MappingNode) and child.value:
            yield from _walk(child, value, lines, f"{path}.")
        else:
            raise ValueError(f'values.yaml: {path} has no description: write a "# --" comment above it')


def _description(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip().removeprefix("#").strip())
        if comment[0].startswith("-- "):
            return " ".join([comment[0].removeprefix("-- "), *comment[1:]])
    return ""


def table(text: str) -> str:
    """Return the values as a Markdown table."""
    rows = ["| value | type | default | what it does |", "|---|---|---|---|"]
    for value in documented(text):
        default = json.dumps(value.default).replace("|", r"\|")
        description = value.description.replace("|", r"\|")
        rows.append(f"| `{value.path}` | {_TYPES[type(value.default)]} | `{default}` | {description} |")
    return "\n".join(rows)


def with_values(readme: str, values: str) -> str:
    """Return the README with the table of these values between its two marks.

    Raises:
        ValueError: the marks are missing.
    """
    new, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n{table(values)}\n{END}",
        readme,
        count=1,
        flags=re.DOTALL,
    )
    if not count:
        raise ValueError(f"the chart's README has no place for the table: it needs the lines {BEGIN} and {END}")
    return new
