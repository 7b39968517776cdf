"""Every command in the docs can be pasted, and does what its page says."""

import re
from pathlib import Path

import pytest

from kvpilot_cli.command import EXTRAS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
# kind builds images on the machine that runs them, so these pages need no --platform.
LOCAL = {"docs/clouds/kind.md"}


def lines(page: Path) -> list[str]:
    """Return the commands of the page's code blocks, one a line."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_an_upgrade_names_its_namespace_and_keeps_the_values_of_the_installation(page: Path) -> None:
    for line in lines(page):
        if line.startswith("helm upgrade"):
            assert "--namespace " in line, line
            # `--reuse-values` keeps the old chart's defaults; a plain upgrade drops the user's values.
            assert "--reuse-values" not in line, line
            assert "--set" not in line or "--reset-then-reuse-values" in line, line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_an_image_for_a_cluster_is_built_for_the_platform_of_its_nodes(page: Path) -> None:
    for line in lines(page):
        if re.match(r"docker build .*\.Dockerfile", line) and str(page.relative_to(ROOT)) not in LOCAL:
            assert "--platform linux/amd64" in line, line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_installs_kvpilot_with_the_extras_of_its_commands(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    extras = set(re.findall(r"pip install '\.\[([\w,]+)\]'", text))
    used = {EXTRAS[name] for name in re.findall(r"(?m)^kvpilot (\w+) ", "\n".join(lines(page))) if name in EXTRAS}
    if extras and used == {"cli"}:
        assert extras & {"cli", "kubectl"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_command_installs_an_unpublished_image(page: Path) -> None:
    for line in lines(page):
        if line.startswith("helm install") and "charts/kvpilot" in line:
            assert "image.repository=" in line or "-f " in line or "--values" in line, line
