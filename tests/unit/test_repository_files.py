"""Issue forms and the owners file have the format that GitHub reads, and name only existing files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yaml"))
REPOSITORY = "https://github.com/kvpilot/kvpilot/"


@pytest.mark.parametrize("name", ["SECURITY", "CODE_OF_CONDUCT", "ROADMAP", "SCOPE", "CONTRIBUTING", "CHANGELOG"])
def test_pages_that_newcomers_look_for_are_at_the_root(name: str) -> None:
    assert (ROOT / f"{name}.md").read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_has_the_fields_that_github_requires(form: Path) -> None:
    read: dict[str, Any] = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert set(read) == {"name", "description", "labels", "body"}
    fields = [one for one in read["body"] if one["type"] != "markdown"]
    assert {one["type"] for one in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(one["attributes"]["label"] for one in fields)
    assert len({one["id"] for one in fields}) == len(fields)


def test_links_of_the_templates_lead_to_files_or_to_pages_of_github() -> None:
    links = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/config.yml").read_text(encoding="utf-8"))["contact_links"]
    for address in (one["url"] for one in links):
        assert address.startswith(REPOSITORY)
        path = address.removeprefix(REPOSITORY)
        assert path == "security/policy" or (ROOT / path.removeprefix("blob/main/")).is_file()


def test_every_path_with_owners_exists() -> None:
    lines = (GITHUB / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert rules
    for path, *owners in rules:
        assert path == "*" or (ROOT / path.strip("/")).exists()
        assert owners
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", one) for one in owners)
