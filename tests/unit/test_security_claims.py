"""docs/security-claims.md lists how much kvpilot trusts each party. Each line names the tests that verify it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "security-claims.md").read_text()
SECTION = PAGE.partition("## Who is trusted with what\n")[2].partition("\n## ")[0]
CLAIMS = [
    tuple(cell.strip() for cell in line.strip("|").split("|")) for line in SECTION.splitlines() if line[:1] == "|"
]
CLAIMS = [cells for cells in CLAIMS if cells not in {("claim", "test"), ("---", "---")}]


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("cells", CLAIMS, ids=lambda cells: cells[0][:60])
def test_each_claim_names_tests_that_exist(cells: tuple[str, ...]) -> None:
    claim, tests = cells
    assert claim
    named = re.findall(r"`([^`]+)`", tests)
    assert named
    assert re.sub(r"`[^`]+`", "", tests).strip() == "", "a cell of tests holds their names and nothing else"
    for name in named:
        file, _, test = name.partition("::")
        assert test.startswith("test_"), name
        assert test in functions_of(file), f"{name} is no test"


def test_there_are_claims_about_every_trusted_party() -> None:
    assert len(CLAIMS) >= 20
    assert re.findall(r"^\*\*(.+?)\*\*", SECTION, re.MULTILINE) == [
        "A tenant",
        "A user of a service",
        "A client of the operator's port",
        "A cluster administrator",
    ]
