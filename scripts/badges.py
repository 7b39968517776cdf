"""Draw README's badges from pyproject.toml, the Helm chart and the supported vLLM versions.

    .venv/bin/python scripts/badges.py docs/images/badges       # `make generate` does it

The badges are files in the repository, so that a page with them loads nothing from another host.
"""

import sys
import tomllib
from html import escape
from pathlib import Path

import yaml

from kvpilot_runtime.vllm_api.compat import NEWEST, OLDEST, shown

ROOT = Path(__file__).parents[1]
CHARACTER, PADDING = 6.5, 6
"""Width of a character and of the space beside a text, in pixels."""
SHAPE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="20" role="img" aria-label="{name}: {value}">
  <clipPath id="round"><rect width="{width:g}" height="20" rx="3"/></clipPath>
  <g clip-path="url(#round)">
    <rect width="{left:g}" height="20" fill="#12344d"/>
    <rect x="{left:g}" width="{right:g}" height="20" fill="#2a7f77"/>
  </g>
  <g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="{name_at:g}" y="14" textLength="{name_length:g}">{name}</text>
    <text x="{value_at:g}" y="14" textLength="{value_length:g}">{value}</text>
  </g>
</svg>
"""


def facts(root: Path) -> dict[str, str]:
    """Return the value of each badge by its name."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((root / "charts/kvpilot/Chart.yaml").read_text(encoding="utf-8"))
    return {
        "license": project["license"],
        "python": project["requires-python"],
        "kubernetes": chart["kubeVersion"].removesuffix(".0-0"),
        "vllm": f"{shown(OLDEST)} to {shown(NEWEST)}",
    }


def badge(name: str, value: str) -> str:
    """Return the picture of a badge."""
    lengths = [len(text) * CHARACTER for text in (name, value)]
    left, right = (length + 2 * PADDING for length in lengths)
    return SHAPE.format(
        name=escape(name), value=escape(value), width=left + right, left=left, right=right, name_at=PADDING,
        value_at=left + PADDING, name_length=lengths[0], value_length=lengths[1],
    )  # fmt: skip


def main() -> None:
    """Write a file for each badge into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in facts(ROOT).items():
        (folder / f"{name}.svg").write_text(badge(name, value), encoding="utf-8")


if __name__ == "__main__":
    main()
