"""docs/api-stability.md lists exactly the fields, labels, enum values and pages of the current API."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpilot_operator.api import names
from support.crd import load_crd, root_schema

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api-stability.md").read_text()
PROMISED = PAGE.partition("## What stays")[2].partition("Not promised:")[0]
FORGOTTEN = PAGE.partition("Not promised:")[2].partition("\n\n")[0]
STATUS = root_schema()["properties"]["status"]


def leads_to(schema: Mapping[str, Any], path: str) -> bool:
    head, _, rest = path.partition(".")
    if head not in schema.get("properties", {}):
        return False
    return not rest or leads_to(schema["properties"][head], rest)


def promised() -> list[str]:
    """Return the status paths in the first column of the table.

    A name without a dot continues the previous row's section.
    """
    found = []
    for line in PROMISED.splitlines():
        if not line.startswith("| `status."):
            continue
        section = ""
        for name in re.findall(r"`([\w.]+)`", line.split("|")[1]):
            path = name.removeprefix("status.")
            if name.startswith("status."):
                section = path.rpartition(".")[0]
            elif "." not in name and not leads_to(STATUS, name):
                path = f"{section}.{name}"
            found.append(path)
    return found


def test_every_field_of_the_status_that_is_promised_is_there() -> None:
    paths = promised()
    assert {"observedRevision", "stable.dtype", "kvCache.denied", "scaling.recommendedReplicas"} <= set(paths)
    assert [path for path in paths if not leads_to(STATUS, path)] == []


def test_no_field_is_both_promised_and_excluded() -> None:
    memory = {name for name in re.findall(r"`(\w+)`", FORGOTTEN) if name in STATUS["properties"]}
    assert memory == {"history", "accuracy", "scaling"}
    assert not {"history", "accuracy"} & {path.partition(".")[0] for path in promised()}


@pytest.mark.parametrize("label", [names.SERVICE_LABEL, names.REVISION_LABEL, names.DTYPE_LABEL])
def test_the_promised_labels_and_names_exist(label: str) -> None:
    assert f"`{label}`" in PROMISED
    assert f"`{names.API_VERSION}`" in PAGE
    assert f"`{names.canary_service('NAME')}`" in PROMISED
    assert f"`{load_crd()['spec']['names']['shortNames'][0]}`" in PROMISED


def test_the_crd_has_one_version_and_no_webhook_as_the_page_says() -> None:
    spec = load_crd()["spec"]
    assert [one["name"] for one in spec["versions"]] == [names.VERSION]
    assert spec.get("conversion", {"strategy": "None"}) == {"strategy": "None"}


def test_every_page_that_the_page_links_to_exists() -> None:
    linked = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert linked
    assert [one for one in linked if not (DOCS / one).is_file()] == []
