"""Each recipe in CONTRIBUTING.md names one or two files that exist, and names that these files define."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.partition("## Where to begin\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| you want to"))
]


def defined(file: Path) -> set[str]:
    """Return the top-level names of a module, and Class.method for its classes."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                found |= {name, *(f"{name}.{one.name}" for one in body if isinstance(one, ast.FunctionDef))}
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe[0])
def test_a_recipe_names_at_most_two_files_and_names_in_them_that_exist(recipe: tuple[str, ...]) -> None:
    _, first, then = recipe
    named = re.findall(r"`([^`]+)`", first)
    assert 1 <= len(named) <= 2
    assert re.sub(r"`[^`]+`", "", first).strip() == "", "this cell has more than names"
    for name in named:
        file, _, what = name.partition("::")
        assert (ROOT / file).is_file(), file
        assert not what or what in defined(ROOT / file), name
    for path in re.findall(r"`([\w.-]+/[\w./-]+)`", then):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "what",
    [
        "pressure",
        "rolled back",
        "page is laid out",
        "add a dtype",
        "condition",
        "metric",
        "test of a fault",
        "field of the CRD",
        "options beside",
        "version of vLLM",
    ],
)
def test_each_listed_task_has_a_recipe(what: str) -> None:
    assert sum(what in recipe[0] for recipe in RECIPES) == 1


def test_make_targets_and_files_that_contributing_names_exist() -> None:
    targets = (ROOT / "Makefile").read_text().partition("\n")[0].removeprefix(".PHONY: ").split()
    assert set(re.findall(r"`make (\w+)`", PAGE)) <= set(targets)
    for path in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / path).is_file(), path
