"""Write everything that follows from crds/ and charts/kvpilot, or check that it is up to date.

    .venv/bin/python scripts/manifests.py            # write
    .venv/bin/python scripts/manifests.py --check    # exit 1 and name the files that would change

crds/ and LICENSE -> the chart; values.yaml -> the table in the chart's README.md; the chart -> config/ (kustomize).
"""

from __future__ import annotations

import sys
from pathlib import Path

import chart_readme
import kustomize

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "kvpilot"
CONFIG = ROOT / "config"
COPIES = CHART / "files" / "crds"
_COPIED = "# A copy of crds/, by scripts/manifests.py: a chart holds only files of its own folder.\n"


def _crds() -> dict[Path, str]:
    return {COPIES / file.name: _COPIED + file.read_text() for file in sorted((ROOT / "crds").glob("*.yaml"))}


def _readme() -> dict[Path, str]:
    readme = CHART / "README.md"
    table = chart_readme.with_values(readme.read_text(), (CHART / "values.yaml").read_text())
    return {readme: table, CHART / "LICENSE": (ROOT / "LICENSE").read_text()}


def _config() -> dict[Path, str]:
    return {CONFIG / name: text for name, text in kustomize.folders(CHART).items()}


def _changed(wanted: dict[Path, str]) -> dict[Path, str]:
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def _stale(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*.yaml") if path not in wanted)


def main(check: bool) -> int:
    """Write, or with `check` only compare; returns the exit status."""
    crds = _crds()
    differing = [*_changed(crds), *_stale(COPIES, crds)]
    if differing and check:
        # The other two are made from the chart as it is, so they would only repeat this.
        return _tell(differing)
    _write(crds, COPIES)
    readme, config = _readme(), _config()
    differing = [*_changed(readme | config), *_stale(CONFIG, config)]
    if check:
        return _tell(differing)
    _write(readme, None)
    _write(config, CONFIG)
    return 0


def _write(wanted: dict[Path, str], folder: Path | None) -> None:
    for path, text in _changed(wanted).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    for path in _stale(folder, wanted) if folder is not None else []:
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")


def _tell(differing: list[Path]) -> int:
    for path in differing:
        print(f"{path.relative_to(ROOT)} is not up to date: run .venv/bin/python scripts/manifests.py")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
