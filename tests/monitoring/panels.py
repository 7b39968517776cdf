"""The expressions of our dashboards and rules, and the names in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).parents[2] / "charts" / "kvpilot" / "files"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
RULES = FILES / "rules" / "kvpilot.rules.yaml"

_WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
    "inf",
}


@dataclass(frozen=True)
class Panel:
    """Expression of a panel, before Grafana replaces its variables."""

    dashboard: str
    title: str
    expression: str

    def filled(self, namespace: str, name: str) -> str:
        """Return the expression as Grafana sends it with these values of its variables."""
        text = self.expression.replace("$__rate_interval", "1m").replace("$namespace", namespace)
        text = text.replace("$job", "kvpilot-operator").replace("$operator_namespace", "kvpilot-system")
        return text.replace("$cluster", ".*").replace("$name", name)


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels() -> Iterator[Panel]:
    for path in DASHBOARDS:
        for panel in load(path)["panels"]:
            for target in panel.get("targets", ()):
                yield Panel(path.stem, panel["title"], target["expr"])


def annotations() -> Iterator[Panel]:
    """Yield the queries that mark decisions in all panels of a dashboard."""
    for path in DASHBOARDS:
        for one in load(path)["annotations"]["list"]:
            if "expr" in one:
                yield Panel(path.stem, one["name"], one["expr"])


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metric_names(expression: str) -> set[str]:
    """Return every metric that an expression reads."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    called = set(re.findall(r"([a-z_0-9]+)\s*\(", bare))
    return set(re.findall(r"\b[a-z_][a-zA-Z0-9_:]*", bare)) - called - _WORDS


def label_names(expression: str) -> set[tuple[str, str, str]]:
    """Return (metric, label, value) of every matcher."""
    found = set()
    for metric, inside in re.findall(r"([a-z_][a-zA-Z0-9_:]*)\{([^}]*)\}", expression):
        for label, value in re.findall(r'([a-z_]+)\s*[=!]~?\s*"([^"]*)"', inside):
            found.add((metric, label, value))
    return found
