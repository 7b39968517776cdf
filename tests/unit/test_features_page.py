"""Each row of docs/features.md names existing tests, or says that no test ran."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text()
SECTION = PAGE.partition("## Which features work?\n")[2].partition("\n## ")[0]
TABLE = SECTION.partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TABLE.splitlines()]
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
FIGURES = re.compile(r"\]\((benchmarks/[\w-]+\.md)(?:#([\w-]+))?\)")


def defined_in(file: str) -> set[str]:
    """Return the names of the tests in a module of tests/runtime."""
    tree = ast.parse((ROOT / "tests" / "runtime" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_features_page_names_existing_tests_or_says_not_run(row: tuple[str, ...]) -> None:
    _, _, verdict, proof, gpu = row
    named = TEST.findall(proof)
    assert all(name in defined_in(file) for file, name in named), named
    assert verdict.startswith(("served", "refused", "passed on"))
    if verdict.startswith("passed on") or (verdict.startswith("served") and not named):
        assert "not run" in proof
        assert verdict.startswith("passed on") or "served" in gpu
    else:
        assert named
        assert "not run" not in proof
    # Supported features need a test with an engine; refused features need a test without an engine.
    assert all(("engine" in file) == verdict.startswith("served") for file, _ in named)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_gpu_result_is_on_a_benchmark_page(row: tuple[str, ...]) -> None:
    verdict, gpu = row[2], row[4]
    pages = FIGURES.findall(gpu)
    assert (gpu == "-") == verdict.startswith("refused")
    assert bool(pages) == ("served" in gpu)
    assert pages or gpu in ("-", "not run")
    for page, place in pages:
        heads = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert not place or place in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "what",
    ["LoRA", "structured output", "tool calling", "prompt logprobs", "parallel sampling", "beam search", "pooling",
     "sleep mode", "data parallel", "expert parallel", "pipeline parallel", "context parallel", "batch invariance",
     "dual batch overlap", "speculative decoding", "KV connectors", "offloading", "AWQ", "images", "sinks",
     "cross attention", "chunked attention"],
)  # fmt: skip
def test_every_feature_that_people_turn_on_has_a_row(what: str) -> None:
    assert any(what in row[0] for row in ROWS)


def test_tests_named_outside_the_table_exist() -> None:
    named = TEST.findall(SECTION)
    assert len(named) > len(ROWS) / 2
    assert all(name in defined_in(file) for file, name in named)
